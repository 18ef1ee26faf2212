//! The log on disk: every change of placement, handed to the system before it is acknowledged.
//!
//! Whoever changes the state appends the effects to a queue while it still holds the state, so that
//! the log has the order of the changes. After it has let the state go it waits until what it
//! appended is written: the first to wait writes all that is queued, and the others find it done.
//! A thread (`keeper`) syncs every so often, takes snapshots that bound the log, and starts
//! it anew after it failed. See `docs/decisions/0010-the-log.md`.

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

/// A log that has grown beyond this, and beyond twice the last snapshot, makes a new one due.
const LOG_BYTES_MAX: u64 = 64 << 20;
/// More logs than this since the last snapshot make a new one due at the start.
const LOGS_MAX: usize = 8;
/// A queue that grew beyond this is given back once it is empty.
const KEPT_BYTES_MAX: usize = 4 << 20;

/// When changes are forced to the disk. They are handed to the system in any case before they are
/// acknowledged, so that only a crash of the machine can lose any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogSync {
    /// Before each acknowledgement.
    Always,
    /// Every so often.
    Interval(Duration),
    /// When the system likes.
    Never,
}

/// How the log does.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JournalStatus {
    /// Where it lies.
    pub path: PathBuf,
    /// Whether changes are being logged. If not, a restart forgets everything.
    pub is_healthy: bool,
    /// Why not.
    pub failure: String,
    /// How often it failed.
    pub failures: u64,
    /// Bytes written since the start.
    pub bytes_written: u64,
    /// Effects written since the start.
    pub records: u64,
    /// Writes, each of a group of effects.
    pub writes: u64,
    /// Syncs.
    pub syncs: u64,
    /// How long they took altogether.
    pub sync_time: Duration,
    /// How long the longest took.
    pub sync_time_max: Duration,
    /// Bytes of the log since the last snapshot.
    pub log_bytes: u64,
    /// Bytes of the last snapshot.
    pub snapshot_bytes: u64,
    /// When it was whole; none: not since the start.
    pub snapshot_at: Option<Moment>,
    /// Snapshots since the start.
    pub snapshots: u64,
    /// How long the last of them took.
    pub snapshot_time: Duration,
    /// How long it took to read the log at the start and to make the state of it.
    pub recovery_time: Duration,
}

/// What was found in the state directory.
#[derive(Debug)]
pub(crate) struct RecoveredJournal {
    /// The log, to be written on.
    pub(crate) journal: Journal,
    /// What it knew.
    pub(crate) image: Image,
    /// Acknowledged changes may be missing at its end, since the machine itself went down.
    pub(crate) may_lack_end: bool,
}

/// The log of a master.
#[derive(Debug)]
pub(crate) struct Journal {
    directory: Directory,
    sync: LogSync,
    boot: [u8; 16],
    queue: Mutex<Queue>,
    /// Never locked while the queue is.
    writer: Mutex<Writer>,
    /// Up to which position all is written, or given up.
    written: AtomicU64,
    /// There is a log. False from a failure on until it has begun anew.
    is_healthy: AtomicBool,
    /// What the keeper waits on.
    commands: Mutex<Commands>,
    wakes_maintenance: Condvar,
    status: Mutex<JournalStatus>,
}

/// What is to be written.
#[derive(Debug)]
struct Queue {
    /// Room for the head of a frame, then effects.
    bytes: Vec<u8>,
    records: u64,
    /// The position behind the last effect: bytes of all effects up to now.
    end: u64,
}

/// Who writes.
#[derive(Debug)]
struct Writer {
    /// None while the log is broken.
    file: Option<File>,
    path: PathBuf,
    timeline_id: [u8; 16],
    next_file: u64,
    next_frame: u64,
    /// Bytes in the file, and how many of them are on disk.
    length: u64,
    synced: u64,
    spare: Vec<u8>,
}

/// A file of the log in which nothing is written yet.
#[derive(Debug)]
struct NewFile {
    file: File,
    path: PathBuf,
    number: u64,
    timeline_id: [u8; 16],
}

impl Writer {
    /// What comes is written to that file; hands out the one before.
    fn switch_to(&mut self, new_file: NewFile) -> Option<File> {
        self.timeline_id = new_file.timeline_id;
        self.next_file = new_file.number + 1;
        self.length = frame::HEADER_BYTES as u64;
        self.synced = 0;
        self.path = new_file.path;
        self.file.replace(new_file.file)
    }
}

/// What the keeper is told.
#[derive(Debug, Default)]
struct Commands {
    stop: bool,
    snapshot: bool,
}

impl Journal {
    /// Reads what is in the state directory, and begins to write on.
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

    /// Takes effects, as [`State::take_effects`](crate::state::State::take_effects) hands them
    /// out; says behind which position they end. To be called while the state is held.
    pub(crate) fn append(&self, take: impl FnOnce(&mut Vec<u8>) -> u64) -> u64 {
        let queue = &mut *self.queue.lock();
        let before = queue.bytes.len();
        queue.records += take(&mut queue.bytes);
        queue.end += (queue.bytes.len() - before) as u64;
        queue.end
    }

    /// Waits until all up to that position is written, and on disk if that is the rule. At once if
    /// it is, or if the log is broken: the master goes on without it.
    pub(crate) fn wait_durable(&self, position: u64) {
        if self.written.load(Ordering::Acquire) >= position {
            return;
        }
        let writer = &mut *self.writer.lock();
        // Most find that the one who held the lock before has written theirs, too.
        if self.written.load(Ordering::Acquire) < position {
            self.write_queue(writer);
        }
    }

    /// Whether waiting may take as long as the disk does.
    pub(crate) fn is_slow(&self) -> bool {
        self.sync == LogSync::Always
    }

    /// Which history a restart of this master would go on with; none while the log is broken.
    pub(crate) fn timeline_id(&self) -> Option<[u8; 16]> {
        self.is_healthy.load(Ordering::Acquire).then(|| self.writer.lock().timeline_id)
    }

    /// The state was made of it, which took so long.
    pub(crate) fn set_recovery_time(&self, time: Duration) {
        self.status.lock().recovery_time = time;
    }

    /// How it does.
    pub(crate) fn status(&self) -> JournalStatus {
        self.status.lock().clone()
    }

    /// Writes all that is queued as one frame.
    fn write_queue(&self, writer: &mut Writer) {
        let (mut frame, records, end) = {
            let queue = &mut *self.queue.lock();
            let frame = std::mem::replace(&mut queue.bytes, std::mem::take(&mut writer.spare));
            (frame, std::mem::take(&mut queue.records), queue.end)
        };
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

    /// Makes a file with nothing but its header, which is on disk if that is the rule: it may take
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

    /// The log is broken: what lies on the disk will soon be wrong, and must not be taken for the
    /// truth after a restart. The keeper tries to begin it anew.
    fn fail(&self, writer: &mut Writer, what: &str, source: io::Error) {
        let error = file_error(what, &writer.path, source);
        tracing::error!(
            %error,
            "the log failed: the master goes on, but a restart would forget everything"
        );
        writer.file = None;
        self.is_healthy.store(false, Ordering::Release);
        if let Err(error) = self.directory.remove_all() {
            tracing::error!(%error, "what the log had cannot be removed; remove it before a restart");
        }
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

/// A frame with nothing but room for its head.
fn empty_frame() -> Vec<u8> {
    vec![0; FRAME_BYTES]
}

/// Which boot of the machine this is; one of its own if the system does not tell.
fn boot_id() -> [u8; 16] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    match u128::from_str_radix(&digits, 16) {
        Ok(id) => id.to_le_bytes(),
        Err(_) => mooncake_base::SegmentId::random().to_bytes(),
    }
}
