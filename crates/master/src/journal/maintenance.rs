//! The maintenance thread of the log: syncs it, takes snapshots, and restarts it after a failure.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::Path,
    sync::{Arc, Weak, atomic::Ordering},
    thread::JoinHandle,
    time::Duration,
};

use mooncake_base::sync::MutexGuard;
use mooncake_base::{Clock, Error, ErrorCode, Result, SegmentId, SystemClock};

use super::{
    Journal, LogSync, NOTHING_WAITS,
    directory::file_error,
    frame::{self, FRAME_BYTES, Kind},
    recovery::SNAPSHOT_END,
};
use crate::state::{SnapshotCursor, State};

/// How soon a failed log is restarted.
const RETRY: Duration = Duration::from_secs(2);
/// How soon a failed snapshot is tried again.
const SNAPSHOT_RETRY: Duration = Duration::from_secs(30);
/// How often a log without a sync interval is checked.
const IDLE: Duration = Duration::from_secs(5);
/// The number of objects written to a snapshot per lock of the state.
const SLICE_OBJECTS: u32 = 2048;

/// The owner of the state that the log belongs to.
pub(crate) trait StateOwner: Send + Sync + 'static {
    /// Returns the log, if there is one.
    fn journal(&self) -> Option<&Journal>;
    /// Locks the state, with all its effects appended to the log.
    fn lock_state(&self) -> MutexGuard<'_, State>;
    /// Returns the present time of the owner's clock.
    fn now(&self) -> mooncake_base::Moment;
}

/// The handle of the maintenance thread. Dropping it ends the thread, which syncs the log.
#[derive(Debug)]
pub(crate) struct Maintenance<O: StateOwner> {
    owner: Weak<O>,
    thread: Option<JoinHandle<()>>,
}

impl<O: StateOwner> Maintenance<O> {
    /// Starts the thread.
    ///
    /// # Errors
    /// The thread cannot be created.
    pub(crate) fn start(owner: &Arc<O>) -> Result<Self> {
        let weak = Arc::downgrade(owner);
        let thread = std::thread::Builder::new()
            .name("mc-log".to_owned())
            .spawn({
                let weak = weak.clone();
                move || run(&weak)
            })
            .map_err(|source| {
                Error::internal("cannot create the maintenance thread of the log").caused_by(source)
            })?;
        Ok(Self { owner: weak, thread: Some(thread) })
    }
}

impl<O: StateOwner> Drop for Maintenance<O> {
    fn drop(&mut self) {
        let owner = self.owner.upgrade();
        if let Some(journal) = owner.as_ref().and_then(|owner| owner.journal()) {
            journal.commands.lock().stop = true;
            journal.wakes_maintenance.notify_all();
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the maintenance thread of the log panicked");
        }
    }
}

fn run<O: StateOwner>(owner: &Weak<O>) {
    let mut not_before = SystemClock.now();
    while let Some(owner) = owner.upgrade() {
        let Some(journal) = owner.journal() else { return };
        let is_healthy = journal.is_healthy.load(Ordering::Acquire);
        let pause = match journal.sync {
            _ if !is_healthy => RETRY,
            LogSync::Interval(interval) => interval,
            _ => IDLE,
        };
        let (stop, snapshot) = journal.wait_command(pause);
        journal.wait_durable(u64::MAX);
        if journal.sync != LogSync::Never {
            journal.sync_now();
        }
        if stop {
            return;
        }
        if journal.is_healthy.load(Ordering::Acquire) {
            if snapshot
                && not_before.has_passed(SystemClock.now())
                && let Err(error) = take_snapshot(&*owner, journal, None)
            {
                not_before = SystemClock.now() + SNAPSHOT_RETRY;
                tracing::error!(%error, "the snapshot failed; the log keeps growing");
            }
        } else if let Err(error) =
            take_snapshot(&*owner, journal, Some(SegmentId::random().to_bytes()))
        {
            journal.set_synced(NOTHING_WAITS);
            tracing::warn!(%error, "the log cannot be restarted yet");
        }
    }
}

impl Journal {
    /// Waits for commands. Returns whether to stop, and whether a snapshot is due.
    fn wait_command(&self, pause: Duration) -> (bool, bool) {
        let mut commands = self.commands.lock();
        if !commands.stop && !commands.snapshot && !commands.sync {
            self.wakes_maintenance.wait_for(&mut commands, pause);
        }
        commands.sync = false;
        (commands.stop, std::mem::take(&mut commands.snapshot))
    }

    /// Syncs the written frames without blocking writers.
    fn sync_now(&self) {
        let (file, length, position) = {
            let writer = self.writer.lock();
            let is_synced = writer.synced >= writer.length;
            let file = writer.file.as_ref().filter(|_| !is_synced).map(File::try_clone);
            (file, writer.length, writer.position)
        };
        let Some(file) = file else { return };
        let outcome = file.and_then(|file| self.sync_file(&file));
        let writer = &mut *self.writer.lock();
        match outcome {
            Ok(()) => {
                writer.synced = writer.synced.max(length);
                if self.synced_position() != NOTHING_WAITS {
                    self.set_synced(position);
                }
            }
            Err(error) => self.fail(writer, "cannot be synced", error),
        }
    }
}

/// Starts the next log file and writes a snapshot of the state at that moment, slice by slice. Then
/// earlier files are removed. The new file has a new timeline id if the log was broken.
fn take_snapshot(
    owner: &impl StateOwner,
    journal: &Journal,
    timeline_id: Option<[u8; 16]>,
) -> Result<()> {
    let start = SystemClock.now();
    // The disk writes here need no lock. No other thread creates log files. If the master dies
    // before anything is written to the new file, recovery finds it empty behind the previous log
    // file.
    journal.sync_now();
    let is_new_timeline = timeline_id.is_some();
    let (number, timeline_id) = {
        let writer = journal.writer.lock();
        (writer.next_file, timeline_id.unwrap_or(writer.timeline_id))
    };
    let new_file = journal.make_file(number, timeline_id)?;
    let mut bytes = super::empty_frame();
    let (first_frame, old, mut cursor) = {
        let state = owner.lock_state();
        let writer = &mut *journal.writer.lock();
        journal.write_queue(writer);
        if writer.file.is_none() && !is_new_timeline {
            // The log failed meanwhile, and the new file was removed with it.
            let why = "the log failed while its next file was created";
            return Err(Error::new(ErrorCode::PERSISTENT_FAIL, why));
        }
        if is_new_timeline {
            // From here on memory is released only after the new log has the release on disk.
            journal.set_synced(writer.position);
        }
        let old = writer.switch_to(new_file);
        let cursor = state.begin_snapshot(owner.now(), &mut bytes);
        (writer.next_frame, old, cursor)
    };
    if let Some(old) = old
        && journal.sync != LogSync::Never
    {
        old.sync_data()
            .map_err(|source| file_error("cannot be synced", journal.directory.path(), source))?;
    }
    let path = journal.directory.unfinished();
    let header = journal.header(Kind::Snapshot, number, timeline_id).encode();
    let write = || write_snapshot(owner, &path, &header, bytes, &mut cursor, first_frame);
    let length = write().map_err(|source| file_error("cannot be written", &path, source))?;
    // Changes made while the snapshot was written are in the log, which must be on disk as well.
    journal.wait_durable(u64::MAX);
    journal.sync_now();
    let place = journal.directory.file(Kind::Snapshot, number);
    fs::rename(&path, &place)
        .and_then(|()| journal.directory.sync())
        .map_err(|source| file_error("cannot be renamed", &path, source))?;
    journal.directory.remove_before(number)?;
    let writer = &mut *journal.writer.lock();
    let status = &mut *journal.status.lock();
    status.snapshots += 1;
    status.snapshot_bytes = length;
    status.snapshot_at = Some(owner.now());
    status.snapshot_time = SystemClock.now().since(start);
    status.log_bytes = writer.length;
    if writer.file.is_some() && !status.is_healthy {
        status.is_healthy = true;
        status.failure.clear();
        journal.is_healthy.store(true, Ordering::Release);
        tracing::warn!("the log was restarted");
    }
    tracing::info!(
        bytes = length,
        milliseconds = status.snapshot_time.as_millis(),
        "took a snapshot"
    );
    Ok(())
}

fn write_snapshot(
    owner: &impl StateOwner,
    path: &Path,
    header: &[u8],
    head: Vec<u8>,
    cursor: &mut SnapshotCursor,
    first_frame: u64,
) -> io::Result<u64> {
    let mut file = File::options().write(true).create(true).truncate(true).open(path)?;
    file.write_all(header)?;
    let mut length = header.len() as u64;
    let mut put = |bytes: &mut Vec<u8>, number: u64, synced: u64| {
        frame::seal(bytes, number, synced);
        length += bytes.len() as u64;
        file.write_all(bytes)?;
        bytes.truncate(FRAME_BYTES);
        io::Result::Ok(())
    };
    let mut bytes = head;
    put(&mut bytes, 0, 0)?;
    loop {
        let state = owner.lock_state();
        let is_last = state.snapshot_slice(cursor, SLICE_OBJECTS, &mut bytes);
        state.unlock_fair();
        put(&mut bytes, 0, 0)?;
        if is_last {
            break;
        }
    }
    put(&mut bytes, SNAPSHOT_END, first_frame)?;
    file.sync_all()?;
    Ok(length)
}
