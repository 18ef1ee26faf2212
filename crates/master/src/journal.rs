//! The log on disk: every change of placement is written before it is acknowledged.
//!
//! A thread that changes the state appends the effects to a queue while it still holds the lock on
//! the state, so that the log has the order of the changes. After unlocking, the call waits until
//! its effects are written. The whole queue is written at a time, as one group commit. A task of the
//! runtime leaves the write to a maintenance thread and awaits it; a thread that may block writes
//! itself if no other thread does. Nothing waits for the disk while the state or the queue is
//! locked. A second maintenance thread syncs the log, at an interval or when asked; a third takes
//! snapshots that bound the log, and restarts the log after a failure. See
//! `docs/decisions/0010-the-log.md`.

mod confirmations;
mod directory;
mod disk;
mod durability;
mod followers;
#[cfg(test)]
pub(crate) mod hanging_disk;
pub(crate) mod level;
mod log_frame;
mod maintenance;
mod queue;
mod recovery;
mod request;
pub(crate) mod shipping;
#[cfg(any(test, feature = "test-util"))]
mod simulated_disk;
mod snapshot;
mod standby;
mod status;
#[cfg(test)]
mod tests;
mod waiting;
mod writing;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_base::{Error, Result};
use tokio::sync::Notify;

use self::{
    directory::{file_error, file_name},
    followers::Followers,
    level::KeptLevel,
    log_frame::{FRAME_BYTES, Kind},
    queue::Queue,
    recovery::Recovered,
    request::Requests,
    waiting::WaitingEffect,
};
use crate::{
    fatal::FatalError,
    state::{DecodeError, Image},
};

use self::durability::NOTHING_WAITS;
pub use self::{
    directory::Directory,
    disk::{Disk, LogFile},
    status::JournalStatus,
};
pub(crate) use confirmations::{ConfirmationSource, Confirmations, StandbyProgress};
pub(crate) use followers::{
    DirectSender, FollowerId, FollowerStatus, Newcomer, NextShipment, Sent, Shipment,
};
pub(crate) use maintenance::{Maintenance, StateOwner};
#[cfg(any(test, feature = "test-util"))]
pub use simulated_disk::SimulatedDisk;
pub use snapshot::Snapshot;
#[cfg(test)]
pub(crate) use standby::IncomingSnapshot;
pub(crate) use standby::{Accepted, StandbyLog};

/// A snapshot is due when the log exceeds this size and twice the size of the last snapshot.
const LOG_BYTES_MAX: u64 = 64 << 20;
/// A snapshot is due at the start when there are more log files than this.
const LOGS_MAX: usize = 8;
/// More bytes than this in the queue make a sweep wait until they are written.
const BACKLOG_MAX: usize = 16 << 20;

/// When the log is synced to disk. Every change is written to the page cache before it is
/// acknowledged in any case, so that only a crash of the machine can lose changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogSync {
    /// Before each acknowledgement.
    Always,
    /// At an interval.
    Interval(Duration),
    /// Never; the kernel decides when to write back. After a crash of the machine the log is not
    /// used.
    Never,
}

/// What the master does when its log cannot be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnLogFailure {
    /// It refuses all calls and ends. The files stay: they hold everything that was acknowledged.
    Stop,
    /// It continues from memory, after it has made the files void, and starts a new log when it can.
    Continue,
}

/// The log and the state recovered from a state directory.
#[derive(Debug)]
pub struct RecoveredJournal {
    /// The log, ready to append to.
    pub journal: Journal,
    /// The recovered state.
    pub image: Image,
    /// Whether acknowledged changes may be missing at the end, because the machine went down.
    pub may_lack_end: bool,
}

/// The log of a master.
#[derive(Debug)]
pub struct Journal {
    directory: Arc<Directory>,
    sync: LogSync,
    on_failure: OnLogFailure,
    /// Set when the log failed and the master must end.
    fatal: Arc<FatalError>,
    boot: [u8; 16],
    queue: Mutex<Queue>,
    /// Held while the log is written, which may take as long as the disk does. Never locked while
    /// the state or the queue is locked.
    writer: Mutex<LogWriter>,
    /// Locked by the thread that syncs. Locked before the writer.
    syncing: Mutex<()>,
    /// Held while a snapshot is put in place and while all files are removed.
    placing: Mutex<()>,
    timeline_id: Mutex<[u8; 16]>,
    /// The position behind all effects so far. Changes while the state is locked only.
    appended: AtomicU64,
    /// The position up to which everything is written, or given up after a failure.
    written: AtomicU64,
    /// The position up to which everything is on disk; `u64::MAX` while nothing has to wait.
    synced: AtomicU64,
    /// The standbys that follow the log.
    followers: Followers,
    /// Why changes that lack a standby fail; `None` while they wait for it.
    stuck: Mutex<Option<Error>>,
    is_stuck: AtomicBool,
    /// All frames with lower numbers are on disk; 0 if that is not known.
    synced_frame: AtomicU64,
    /// The number of the frame behind the last recovered one.
    recovered_end: u64,
    /// Counts failures.
    failures: AtomicU64,
    /// Tells tasks that one of the positions rose.
    progress: Notify,
    /// Number of threads that wait until a position rises. Locked between their look at it and their wait.
    sync_waiters: Mutex<usize>,
    wakes_sync_waiters: Condvar,
    /// Whether there is a log: false from a failure until the log is restarted.
    is_healthy: AtomicBool,
    /// Which kinds of records may be written.
    level: KeptLevel,
    /// An effect for which calls wait, or will.
    waiting: Mutex<Option<WaitingEffect>>,
    /// Requests to the maintenance threads.
    write_requests: Requests,
    sync_requests: Requests,
    snapshot_requests: Requests,
    status: Mutex<JournalStatus>,
}

/// The file being written, and its counters.
#[derive(Debug)]
struct LogWriter {
    /// `None` while the log is broken.
    file: Option<Arc<dyn LogFile>>,
    /// The file that makes the files of the timeline void when it is emptied.
    marker: Option<Arc<dyn LogFile>>,
    /// Earlier files with frames that are not on disk.
    unsynced: Vec<Arc<dyn LogFile>>,
    /// The number of the file.
    number: u64,
    next_file: u64,
    next_frame: u64,
    /// The first frame of the file.
    first_frame: u64,
    /// All frames with lower numbers are on disk.
    synced_frame: u64,
    length: u64,
    /// The log position behind the last effect that was written.
    position: u64,
    spare: Vec<u8>,
}

/// A log file that contains only its header.
#[derive(Debug)]
struct NewFile {
    file: Arc<dyn LogFile>,
    number: u64,
    timeline_id: [u8; 16],
    /// The marker of its timeline, if it is the first file after a failure.
    marker: Option<Arc<dyn LogFile>>,
}

/// Applies the effects of a frame to an image.
pub type Replay<'a> = &'a mut dyn FnMut(&mut Image, &[u8]) -> Result<(), DecodeError>;

impl Journal {
    /// Recovers the state from the state directory and starts a new log file. What was recovered is
    /// on disk when this returns, unless syncing is off.
    ///
    /// # Errors
    /// The log is damaged, or cannot be read or written.
    pub fn open(directory: Directory, sync: LogSync) -> Result<RecoveredJournal> {
        Self::open_with(directory, sync, &mut |image, effects| image.replay(effects))
    }

    /// Does the same as [`open`](Self::open), with another replay.
    ///
    /// # Errors
    /// The same as for `open`.
    pub fn open_with(
        directory: Directory,
        sync: LogSync,
        replay: Replay<'_>,
    ) -> Result<RecoveredJournal> {
        let boot = directory.disk().boot_id();
        let recovered = recovery::recover(&directory, boot, replay)?;
        Self::from_recovered(Arc::new(directory), sync, recovered)
    }

    /// Starts the next log file after what was recovered.
    fn from_recovered(
        directory: Arc<Directory>,
        sync: LogSync,
        recovered: Recovered,
    ) -> Result<RecoveredJournal> {
        let boot = directory.disk().boot_id();
        if sync != LogSync::Never {
            recovered.sync(&directory)?;
        }
        let level = level::open(&directory, &recovered.image, recovered.is_empty())?;
        let level = KeptLevel::new(Arc::clone(&directory), level);
        let writer = LogWriter {
            file: None,
            marker: None,
            unsynced: Vec::new(),
            number: 0,
            next_file: recovered.next_file,
            next_frame: recovered.next_frame,
            first_frame: recovered.next_frame,
            synced_frame: 0,
            length: 0,
            position: 0,
            spare: Vec::new(),
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
            on_failure: OnLogFailure::Continue,
            fatal: Arc::default(),
            boot,
            queue: Mutex::default(),
            writer: Mutex::new(writer),
            syncing: Mutex::default(),
            placing: Mutex::default(),
            timeline_id: Mutex::new(recovered.timeline_id),
            appended: AtomicU64::new(0),
            written: AtomicU64::new(0),
            synced: AtomicU64::new(if sync == LogSync::Never { NOTHING_WAITS } else { 0 }),
            followers: Followers::default(),
            stuck: Mutex::default(),
            is_stuck: AtomicBool::new(false),
            synced_frame: AtomicU64::new(0),
            recovered_end: recovered.next_frame,
            failures: AtomicU64::new(0),
            progress: Notify::new(),
            sync_waiters: Mutex::default(),
            wakes_sync_waiters: Condvar::new(),
            is_healthy: AtomicBool::new(true),
            level,
            waiting: Mutex::default(),
            write_requests: Requests::default(),
            sync_requests: Requests::default(),
            snapshot_requests: Requests::default(),
            status: Mutex::new(status),
        };
        journal.begin(recovered.next_file, recovered.timeline_id)?;
        if recovered.logs > LOGS_MAX {
            journal.snapshot_requests.request();
        }
        let (image, may_lack_end) = (recovered.image, recovered.may_lack_end);
        Ok(RecoveredJournal { journal, image, may_lack_end })
    }

    /// Starts the first file of this process. Its first frame has no payload: it says that all
    /// earlier ones are on disk.
    fn begin(&self, number: u64, timeline_id: [u8; 16]) -> Result<()> {
        let marker = self.directory.mark(timeline_id)?;
        let first = self.make_file(number, timeline_id, Some(marker))?;
        let writer = &mut *self.writer.lock();
        self.switch(writer, first);
        if self.sync == LogSync::Never {
            return Ok(());
        }
        writer.synced_frame = writer.next_frame;
        let mut frame = [0; FRAME_BYTES];
        log_frame::seal(&mut frame, writer.next_frame, writer.synced_frame);
        let write = |file: &Arc<dyn LogFile>| file.append(&frame).and_then(|()| file.sync());
        writer.file.as_ref().map_or(Ok(()), write).map_err(|source| {
            let path = self.directory.path_of(&file_name(Kind::Log, number));
            file_error("cannot be written", &path, source)
        })?;
        writer.next_frame += 1;
        writer.synced_frame = writer.next_frame;
        self.synced_frame.store(writer.synced_frame, Ordering::Release);
        writer.length += FRAME_BYTES as u64;
        Ok(())
    }

    /// Sets what the master does when the log cannot be written; it continues unless this is called.
    #[must_use]
    pub fn with_failure_policy(self, on_failure: OnLogFailure) -> Self {
        Self { on_failure, ..self }
    }

    /// Returns which kinds of records the log may have.
    pub(crate) fn level(&self) -> &KeptLevel {
        &self.level
    }

    /// Writes nothing any more: the files belong to another from now on. The maintenance threads have
    /// ended.
    pub(crate) fn retire(&self) {
        self.is_healthy.store(false, Ordering::Release);
        self.with_writer(|writer| {
            writer.file = None;
            writer.marker = None;
            writer.unsynced.clear();
        });
        self.set_synced(NOTHING_WAITS);
    }

    /// Returns the error that the log and its master share.
    pub(crate) fn fatal(&self) -> &Arc<FatalError> {
        &self.fatal
    }

    /// Appends effects as [`Log::take_effects`](crate::state::Log::take_effects) returns them.
    /// Returns the position behind them. Must be called while the state is locked.
    pub fn append(&self, take: impl FnOnce(&mut Vec<u8>) -> u64) -> u64 {
        let position = self.queue.lock().append(take);
        self.appended.store(position, Ordering::Release);
        position
    }

    /// Returns the position behind everything that was appended.
    pub(crate) fn appended(&self) -> u64 {
        self.appended.load(Ordering::Acquire)
    }

    /// Returns whether so much waits to be written that more changes should wait.
    pub(crate) fn is_behind(&self) -> bool {
        self.queue.lock().backlog() > BACKLOG_MAX
    }

    /// Returns the timeline id under which a restart would resume; `None` while the log is broken.
    pub fn timeline_id(&self) -> Option<[u8; 16]> {
        self.is_healthy.load(Ordering::Acquire).then(|| *self.timeline_id.lock())
    }

    /// Returns the timeline and the frame before which everything is on disk, and at the in-sync
    /// standbys; `None` if nothing is known to be.
    pub(crate) fn synced(&self) -> Option<([u8; 16], u64)> {
        // Of all that may lead next, this process included.
        let own = self.synced_frame.load(Ordering::Acquire);
        let frame = own.min(self.followers.confirmed_frame());
        (frame > 0).then(|| self.timeline_id()).flatten().map(|timeline_id| (timeline_id, frame))
    }

    /// Returns the number of the frame behind the last recovered one.
    pub(crate) fn recovered_end(&self) -> u64 {
        self.recovered_end
    }

    /// Records the duration of the recovery.
    pub(crate) fn set_recovery_time(&self, time: Duration) {
        self.status.lock().recovery_time = time;
    }

    /// Returns the status of the log.
    pub(crate) fn status(&self) -> JournalStatus {
        self.status.lock().clone()
    }

    /// Writes everything appended so far, and does not sync it, as a process that is killed then.
    #[cfg(any(test, feature = "test-util"))]
    pub fn write_only(&self) {
        self.wait_written(u64::MAX);
    }

    /// Returns whether a sync or a write was requested since the last call.
    #[cfg(feature = "test-util")]
    pub fn take_request(&self) -> bool {
        let mut requests = [&self.write_requests, &self.sync_requests].into_iter();
        requests.any(|requests| requests.wait(Duration::ZERO) == request::Wake::Requested)
    }

    /// Returns whether the log is written, from its start or since it was restarted.
    #[cfg(feature = "test-util")]
    pub fn is_healthy(&self) -> bool {
        self.is_healthy.load(Ordering::Acquire)
    }

    /// Returns whether the log failed and its master must end.
    #[cfg(feature = "test-util")]
    pub fn has_ended(&self) -> bool {
        self.fatal.is_raised()
    }

    /// Returns the number of the next frame.
    #[cfg(feature = "test-util")]
    pub fn next_frame(&self) -> u64 {
        self.with_writer(|writer| writer.next_frame)
    }

    /// Locks the writer briefly.
    fn with_writer<R>(&self, read: impl FnOnce(&mut LogWriter) -> R) -> R {
        read(&mut self.writer.lock())
    }
}

/// Returns the name and the length of the file that is written.
#[cfg(test)]
pub(crate) fn file_end(journal: &Journal) -> (String, u64) {
    journal.with_writer(|writer| (file_name(Kind::Log, writer.number), writer.length))
}
