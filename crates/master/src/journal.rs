//! The log on disk: every change of placement is written before it is acknowledged.
//!
//! A thread that changes the state appends the effects to a queue while it still holds the lock on
//! the state, so that the log has the order of the changes. After unlocking, the thread waits until
//! its effects are written. The first waiting thread writes the whole queue as one group commit,
//! and the others find their effects written. A maintenance thread syncs at an interval, takes
//! snapshots that bound the log, and restarts the log after a failure. See
//! `docs/decisions/0010-the-log.md`.

mod directory;
mod frame;
mod maintenance;
mod recovery;
#[cfg(test)]
mod tests;

use std::{
    fs::File,
    io::{self, Write as _},
    path::PathBuf,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_base::{Clock, Moment, Result, SystemClock};

use self::{
    directory::file_error,
    frame::{FRAME_BYTES, Header, Kind},
};
use crate::state::Image;

pub(crate) use directory::Directory;
pub(crate) use maintenance::{Maintenance, StateOwner};

/// A snapshot is due when the log exceeds this size and twice the size of the last snapshot.
const LOG_BYTES_MAX: u64 = 64 << 20;
/// A snapshot is due at the start when there are more log files than this.
const LOGS_MAX: usize = 8;
/// A queue buffer that grew beyond this size is freed once it is empty.
const KEPT_BYTES_MAX: usize = 4 << 20;

/// The synced position while nothing has to wait for a sync: the log is never synced, or is broken.
const NOTHING_WAITS: u64 = u64::MAX;

/// When the log is synced to disk. Every change is written to the page cache before it is
/// acknowledged in any case, so that only a crash of the machine can lose changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogSync {
    /// Before each acknowledgement.
    Always,
    /// At an interval.
    Interval(Duration),
    /// Never; the kernel decides when to write back.
    Never,
}

/// The status of the log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JournalStatus {
    /// The state directory.
    pub path: PathBuf,
    /// Whether changes are being logged. If not, a restart forgets everything.
    pub is_healthy: bool,
    /// The last failure; empty if healthy.
    pub failure: String,
    /// Number of failures.
    pub failures: u64,
    /// Bytes written since the start.
    pub bytes_written: u64,
    /// Effects written since the start.
    pub records: u64,
    /// Writes since the start, each of a group of effects.
    pub writes: u64,
    /// Syncs since the start.
    pub syncs: u64,
    /// Total duration of the syncs.
    pub sync_time: Duration,
    /// Duration of the longest sync.
    pub sync_time_max: Duration,
    /// Bytes of the log since the last snapshot.
    pub log_bytes: u64,
    /// Bytes of the last snapshot.
    pub snapshot_bytes: u64,
    /// Completion time of the last snapshot; `None` if there was none since the start.
    pub snapshot_at: Option<Moment>,
    /// Snapshots since the start.
    pub snapshots: u64,
    /// Duration of the last snapshot.
    pub snapshot_time: Duration,
    /// Duration of the recovery: reading the log and rebuilding the state.
    pub recovery_time: Duration,
}

/// The log and the state recovered from a state directory.
#[derive(Debug)]
pub(crate) struct RecoveredJournal {
    /// The log, ready to append to.
    pub(crate) journal: Journal,
    /// The recovered state.
    pub(crate) image: Image,
    /// Whether acknowledged changes may be missing at the end, because the machine went down.
    pub(crate) may_lack_end: bool,
}

/// The log of a master.
#[derive(Debug)]
pub(crate) struct Journal {
    directory: Directory,
    sync: LogSync,
    boot: [u8; 16],
    queue: Mutex<Queue>,
    /// Never locked while the queue is locked.
    writer: Mutex<Writer>,
    /// The position up to which everything is written, or given up after a failure.
    written: AtomicU64,
    /// The position up to which everything is on disk; `u64::MAX` while nothing has to wait.
    synced: AtomicU64,
    /// Locked by waiters for `synced`, and when it changes.
    sync_waiters: Mutex<()>,
    wakes_sync_waiters: Condvar,
    /// Whether there is a log: false from a failure until the log is restarted.
    is_healthy: AtomicBool,
    /// Commands to the maintenance thread.
    commands: Mutex<Commands>,
    wakes_maintenance: Condvar,
    status: Mutex<JournalStatus>,
}

/// The queue of effects to be written.
#[derive(Debug)]
struct Queue {
    /// Space for the head of a frame, then effects.
    bytes: Vec<u8>,
    records: u64,
    /// The log position behind the last effect: the total bytes of all effects so far.
    end: u64,
}

/// The file being written, and its counters.
#[derive(Debug)]
struct Writer {
    /// `None` while the log is broken.
    file: Option<File>,
    path: PathBuf,
    timeline_id: [u8; 16],
    next_file: u64,
    next_frame: u64,
    /// Bytes in the file, and how many of them are synced.
    length: u64,
    synced: u64,
    /// The log position behind the last effect that was written.
    position: u64,
    spare: Vec<u8>,
}

/// A log file that contains only its header.
#[derive(Debug)]
struct NewFile {
    file: File,
    path: PathBuf,
    number: u64,
    timeline_id: [u8; 16],
}

impl Writer {
    /// Switches to a new file. Returns the previous one.
    fn switch_to(&mut self, new_file: NewFile) -> Option<File> {
        self.timeline_id = new_file.timeline_id;
        self.next_file = new_file.number + 1;
        self.length = frame::HEADER_BYTES as u64;
        self.synced = 0;
        self.path = new_file.path;
        self.file.replace(new_file.file)
    }
}

/// Commands to the maintenance thread.
#[derive(Debug, Default)]
struct Commands {
    stop: bool,
    snapshot: bool,
    sync: bool,
}

impl Journal {
    /// Recovers the state from the state directory and starts a new log file.
    ///
    /// # Errors
    /// The log is damaged, or cannot be read or written.
    pub(crate) fn open(directory: Directory, sync: LogSync) -> Result<RecoveredJournal> {
        let boot = boot_id();
        let recovered = recovery::recover(&directory, boot)?;
        let writer = Writer {
            file: None,
            path: PathBuf::new(),
            timeline_id: recovered.timeline_id,
            next_file: recovered.next_file,
            next_frame: recovered.next_frame,
            length: 0,
            synced: 0,
            position: 0,
            spare: empty_frame(),
        };
        let status = JournalStatus {
            path: directory.path().to_owned(),
            is_healthy: true,
            log_bytes: recovered.log_bytes,
            snapshot_bytes: recovered.snapshot_bytes,
            ..JournalStatus::default()
        };
        let journal = Self {
            directory,
            sync,
            boot,
            queue: Mutex::new(Queue { bytes: empty_frame(), records: 0, end: 0 }),
            writer: Mutex::new(writer),
            written: AtomicU64::new(0),
            synced: AtomicU64::new(if sync == LogSync::Never { NOTHING_WAITS } else { 0 }),
            sync_waiters: Mutex::default(),
            wakes_sync_waiters: Condvar::new(),
            is_healthy: AtomicBool::new(true),
            commands: Mutex::default(),
            wakes_maintenance: Condvar::new(),
            status: Mutex::new(status),
        };
        let first = journal.make_file(recovered.next_file, recovered.timeline_id)?;
        drop(journal.writer.lock().switch_to(first));
        if recovered.logs > LOGS_MAX {
            journal.request_snapshot();
        }
        Ok(RecoveredJournal {
            journal,
            image: recovered.image,
            may_lack_end: recovered.may_lack_end,
        })
    }

    /// Appends effects as [`State::take_effects`](crate::state::State::take_effects) returns them.
    /// Returns the position behind them. Must be called while the state is locked.
    pub(crate) fn append(&self, take: impl FnOnce(&mut Vec<u8>) -> u64) -> u64 {
        let queue = &mut *self.queue.lock();
        let before = queue.bytes.len();
        queue.records += take(&mut queue.bytes);
        queue.end += (queue.bytes.len() - before) as u64;
        queue.end
    }

    /// Waits until everything up to the position is written, and synced if [`LogSync::Always`] is
    /// set. Returns at once if it is, or if the log is broken: the master then continues without
    /// the log.
    pub(crate) fn wait_durable(&self, position: u64) {
        if self.written.load(Ordering::Acquire) >= position {
            return;
        }
        let writer = &mut *self.writer.lock();
        // Most threads find that the previous holder of the lock has written their effects, too.
        if self.written.load(Ordering::Acquire) < position {
            self.write_queue(writer);
        }
    }

    /// Returns the position up to which all effects are on disk. It is `u64::MAX` with
    /// [`LogSync::Never`], which starts a new timeline after a crash of the machine, and while the
    /// log is broken and its files are removed. It falls back from there when the log is restarted.
    pub(crate) fn synced_position(&self) -> u64 {
        self.synced.load(Ordering::Acquire)
    }

    /// Asks for a sync at once. Does not wait.
    #[allow(dead_code, reason = "for memory that is reused only after its release is on disk")]
    pub(crate) fn request_sync(&self) {
        let commands = &mut *self.commands.lock();
        if !std::mem::replace(&mut commands.sync, true) {
            self.wakes_maintenance.notify_all();
        }
    }

    /// Asks for a sync and waits until all effects up to `position` are on disk. Returns `false` if
    /// they are not by `deadline`. All threads that wait share one sync. Must not be called while
    /// the state is locked.
    #[allow(dead_code, reason = "for memory that is reused only after its release is on disk")]
    pub(crate) fn wait_synced(&self, position: u64, deadline: Moment) -> bool {
        let mut waiters = self.sync_waiters.lock();
        while self.synced_position() < position {
            let left = deadline.left(SystemClock.now());
            if left.is_zero() {
                return false;
            }
            self.request_sync();
            self.wakes_sync_waiters.wait_for(&mut waiters, left);
        }
        true
    }

    /// Sets the synced position and wakes the threads that wait for it.
    fn set_synced(&self, position: u64) {
        let _waiters = self.sync_waiters.lock();
        self.synced.store(position, Ordering::Release);
        self.wakes_sync_waiters.notify_all();
    }

    /// Returns whether waiting may take as long as a disk write.
    pub(crate) fn is_slow(&self) -> bool {
        self.sync == LogSync::Always
    }

    /// Returns the timeline id under which a restart would resume; `None` while the log is broken.
    pub(crate) fn timeline_id(&self) -> Option<[u8; 16]> {
        self.is_healthy.load(Ordering::Acquire).then(|| self.writer.lock().timeline_id)
    }

    /// Records the duration of the recovery.
    pub(crate) fn set_recovery_time(&self, time: Duration) {
        self.status.lock().recovery_time = time;
    }

    /// Returns the status of the log.
    pub(crate) fn status(&self) -> JournalStatus {
        self.status.lock().clone()
    }

    /// Writes the whole queue as one frame.
    fn write_queue(&self, writer: &mut Writer) {
        let (mut frame, records, end) = {
            let queue = &mut *self.queue.lock();
            let frame = std::mem::replace(&mut queue.bytes, std::mem::take(&mut writer.spare));
            (frame, std::mem::take(&mut queue.records), queue.end)
        };
        writer.position = end;
        if frame.len() > FRAME_BYTES
            && let Err(error) = self.write_frame(writer, &mut frame, records)
        {
            self.fail(writer, "cannot be written", error);
        }
        if frame.capacity() > KEPT_BYTES_MAX {
            frame = Vec::new();
        }
        frame.clear();
        frame.resize(FRAME_BYTES, 0);
        writer.spare = frame;
        self.written.store(end, Ordering::Release);
    }

    fn write_frame(&self, writer: &mut Writer, frame: &mut [u8], records: u64) -> io::Result<()> {
        let Some(file) = &mut writer.file else { return Ok(()) };
        frame::seal(frame, writer.next_frame, writer.synced);
        file.write_all(frame)?;
        writer.next_frame += 1;
        writer.length += frame.len() as u64;
        let is_large = {
            let status = &mut *self.status.lock();
            status.bytes_written += frame.len() as u64;
            status.log_bytes += frame.len() as u64;
            status.records += records;
            status.writes += 1;
            status.log_bytes > LOG_BYTES_MAX.max(2 * status.snapshot_bytes)
        };
        if is_large {
            self.request_snapshot();
        }
        if self.sync == LogSync::Always {
            self.sync_file(file)?;
            writer.synced = writer.length;
            self.set_synced(writer.position);
        }
        Ok(())
    }

    fn sync_file(&self, file: &File) -> io::Result<()> {
        let start = SystemClock.now();
        file.sync_data()?;
        let time = SystemClock.now().since(start);
        let status = &mut *self.status.lock();
        status.syncs += 1;
        status.sync_time += time;
        status.sync_time_max = status.sync_time_max.max(time);
        Ok(())
    }

    /// Creates a file with nothing but a header, and syncs it unless syncing is off. This may take
    /// as long as the disk does.
    fn make_file(&self, number: u64, timeline_id: [u8; 16]) -> Result<NewFile> {
        let path = self.directory.file(Kind::Log, number);
        let make = || -> io::Result<File> {
            let mut file = File::options().write(true).create(true).truncate(true).open(&path)?;
            file.write_all(&self.header(Kind::Log, number, timeline_id).encode())?;
            if self.sync != LogSync::Never {
                file.sync_all()?;
                self.directory.sync()?;
            }
            Ok(file)
        };
        let file = make().map_err(|source| file_error("cannot be written", &path, source))?;
        Ok(NewFile { file, path, number, timeline_id })
    }

    fn header(&self, kind: Kind, number: u64, timeline_id: [u8; 16]) -> Header {
        let is_synced = self.sync == LogSync::Always;
        Header { kind, is_synced, timeline_id, number, boot: self.boot }
    }

    /// Handles a write failure. The files on disk will soon be out of date and must not be used
    /// after a restart, so they are removed. The maintenance thread tries to restart the log.
    fn fail(&self, writer: &mut Writer, what: &str, source: io::Error) {
        let error = file_error(what, &writer.path, source);
        tracing::error!(
            %error,
            "the log failed: the master continues, but a restart would forget everything"
        );
        writer.file = None;
        self.is_healthy.store(false, Ordering::Release);
        if let Err(error) = self.directory.remove_all() {
            tracing::error!(%error, "cannot remove the files of the log; remove them before a restart");
        }
        self.set_synced(NOTHING_WAITS);
        let status = &mut *self.status.lock();
        status.is_healthy = false;
        status.failures += 1;
        status.failure = error.to_string();
    }

    fn request_snapshot(&self) {
        let commands = &mut *self.commands.lock();
        if !std::mem::replace(&mut commands.snapshot, true) {
            self.wakes_maintenance.notify_all();
        }
    }
}

/// Returns a frame with nothing but space for its head.
fn empty_frame() -> Vec<u8> {
    vec![0; FRAME_BYTES]
}

/// Returns the id of the present boot of the machine; a random id if the system has none.
fn boot_id() -> [u8; 16] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    match u128::from_str_radix(&digits, 16) {
        Ok(id) => id.to_le_bytes(),
        Err(_) => mooncake_base::SegmentId::random().to_bytes(),
    }
}
