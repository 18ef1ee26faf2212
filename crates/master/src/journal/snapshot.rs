//! A snapshot: the state in slices, and the log file that starts with it. Step by step, so that
//! nothing waits for the disk while the state is locked.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
};

use mooncake_base::{Clock, Error, ErrorCode, Moment, Result, SystemClock};

use super::{
    Journal, LogFile, LogSync, NewFile,
    directory::{UNFINISHED, file_error, file_name},
    log_frame::{self, FRAME_BYTES, Kind, PAYLOAD_MAX, PAYLOAD_TARGET},
    recovery::SNAPSHOT_END,
};
use crate::state::{Effect, SnapshotCursor, State};

/// A snapshot being taken.
#[derive(Debug)]
pub struct Snapshot {
    number: u64,
    timeline_id: [u8; 16],
    /// The failures of the log when the snapshot began. Another failure makes it useless.
    failures: u64,
    started: Moment,
    /// The next log file, until the state is switched to it.
    new_file: Option<NewFile>,
    cursor: Option<SnapshotCursor>,
    file: Option<Arc<dyn LogFile>>,
    /// An encoded slice that is not written.
    bytes: Vec<u8>,
    length: u64,
}

impl Snapshot {
    /// Creates the next log file. It has another timeline id if the log was broken. If the master
    /// dies before anything is written to the file, recovery finds it empty behind the previous one.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn prepare(journal: &Journal, new_timeline_id: Option<[u8; 16]>) -> Result<Self> {
        let started = SystemClock.now();
        // Little is left to be synced when the files are switched.
        journal.sync_now();
        let failures = journal.failures.load(Ordering::Acquire);
        let number = journal.with_writer(|writer| writer.next_file);
        let timeline_id = new_timeline_id.unwrap_or_else(|| *journal.timeline_id.lock());
        let marker = new_timeline_id.map(|id| journal.directory.mark(id)).transpose()?;
        let new_file = Some(journal.make_file(number, timeline_id, marker)?);
        Ok(Self {
            number,
            timeline_id,
            failures,
            started,
            new_file,
            cursor: None,
            file: None,
            bytes: vec![0; FRAME_BYTES],
            length: 0,
        })
    }

    /// Starts the snapshot and the next log file with the present state, all of whose effects were
    /// appended. Does not wait for the disk.
    pub fn begin(&mut self, journal: &Journal, state: &State, now: Moment) {
        if let Some(file) = self.new_file.take() {
            let is_restart = file.marker.is_some();
            let position = {
                let queue = &mut *journal.queue.lock();
                queue.continue_in(file);
                queue.append(|_| 0)
            };
            if is_restart && journal.sync != LogSync::Never {
                // From here on memory is reused only after the new log has its release on disk.
                journal.set_synced(position);
            }
            self.cursor = Some(state.begin_snapshot(now, &mut self.bytes));
        }
    }

    /// Encodes the next slice of `objects` objects. Returns whether it was the last. Does not wait
    /// for the disk; [`write`](Self::write) must follow.
    pub fn slice(&mut self, state: &State, objects: u32) -> bool {
        let Some(cursor) = &mut self.cursor else { return true };
        state.snapshot_slice(cursor, objects, &mut self.bytes)
    }

    /// Writes what was encoded.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&mut self, journal: &Journal) -> Result<()> {
        let header = journal.header(Kind::Snapshot, self.number, self.timeline_id).encode();
        let mut write = || -> io::Result<()> {
            let file = match &self.file {
                Some(file) => file.clone(),
                None => {
                    let file = journal.directory.disk().create(UNFINISHED)?;
                    file.append(&header)?;
                    self.length += header.len() as u64;
                    self.file.insert(file).clone()
                }
            };
            self.length += append_frames(&*file, &mut self.bytes)?;
            self.bytes.truncate(FRAME_BYTES);
            Ok(())
        };
        write().map_err(|source| {
            file_error("cannot be written", &journal.directory.path_of(UNFINISHED), source)
        })
    }

    /// Puts the snapshot in place and removes what it replaces.
    ///
    /// # Errors
    /// It cannot be written, or the log failed meanwhile.
    pub fn finish(mut self, journal: &Journal, now: Moment) -> Result<()> {
        // Changes made while the snapshot was written are in the log, which must be on disk as well.
        journal.sync_now();
        self.write_end(journal)?;
        let (directory, name) = (&journal.directory, file_name(Kind::Snapshot, self.number));
        {
            let _placing = journal.placing.lock();
            if journal.failures.load(Ordering::Acquire) != self.failures {
                return Err(failed_error());
            }
            directory.disk().rename(UNFINISHED, &name).map_err(|source| {
                file_error("cannot be renamed", &directory.path_of(UNFINISHED), source)
            })?;
        }
        directory.sync()?;
        let removed = directory
            .remove_before(self.number)
            .and_then(|()| directory.remove_markers(Some(self.timeline_id)));
        if let Err(error) = removed {
            tracing::error!(
                %error,
                "files that a snapshot replaces cannot be removed; the next one tries again"
            );
        }
        self.report(journal, now)
    }

    /// Writes the last frame, which names the first frame of the log.
    fn write_end(&mut self, journal: &Journal) -> Result<()> {
        self.write(journal)?;
        let (number, first_frame) =
            journal.with_writer(|writer| (writer.number, writer.first_frame));
        let Some(file) = self.file.take() else { return Err(failed_error()) };
        if number != self.number {
            return Err(failed_error());
        }
        let mut end = [0; FRAME_BYTES];
        log_frame::seal(&mut end, SNAPSHOT_END, first_frame);
        self.length += end.len() as u64;
        file.append(&end).and_then(|()| file.sync()).map_err(|source| {
            file_error("cannot be written", &journal.directory.path_of(UNFINISHED), source)
        })
    }

    fn report(&self, journal: &Journal, now: Moment) -> Result<()> {
        journal.with_writer(|writer| {
            if journal.failures.load(Ordering::Acquire) != self.failures {
                return Err(failed_error());
            }
            let status = &mut *journal.status.lock();
            status.snapshots += 1;
            status.snapshot_bytes = self.length;
            status.snapshot_at = Some(now);
            status.snapshot_time = SystemClock.now().since(self.started);
            status.log_bytes = writer.length;
            if !status.is_healthy {
                status.is_healthy = true;
                status.failure.clear();
                journal.is_healthy.store(true, Ordering::Release);
                tracing::warn!("the log was restarted");
            }
            tracing::info!(
                bytes = self.length,
                milliseconds = status.snapshot_time.as_millis(),
                "took a snapshot"
            );
            Ok(())
        })
    }

    /// Gives the snapshot up. After a failure of the log, nothing waits for a sync again.
    pub fn give_up(journal: &Journal) {
        if !journal.is_healthy.load(Ordering::Acquire) {
            journal.abandon_restart();
        }
    }
}

/// Appends the effects behind the space for a frame head, in frames of a few mebibytes: the head of a
/// snapshot may be larger than a frame that is read. Returns the bytes written.
pub(super) fn append_frames(file: &dyn LogFile, bytes: &mut [u8]) -> io::Result<u64> {
    if bytes.len() <= PAYLOAD_TARGET {
        log_frame::seal(bytes, 0, 0);
        file.append(bytes)?;
        return Ok(bytes.len() as u64);
    }
    let mut written = 0;
    let mut frame = Vec::new();
    for part in Effect::split(&bytes[FRAME_BYTES..], PAYLOAD_TARGET) {
        frame.clear();
        frame.resize(FRAME_BYTES, 0);
        frame.extend_from_slice(part);
        if part.len() > PAYLOAD_MAX {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        log_frame::seal(&mut frame, 0, 0);
        file.append(&frame)?;
        written += frame.len() as u64;
    }
    Ok(written)
}

fn failed_error() -> Error {
    let why = "the log failed while a snapshot was taken";
    Error::new(ErrorCode::PERSISTENT_FAIL, why)
}
