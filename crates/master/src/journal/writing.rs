//! Writing the queue to the log file, and what follows if that fails.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
};

use mooncake_base::sync::MutexGuard;
use mooncake_base::{Error, ErrorCode, Result};

use super::{
    Journal, LOG_BYTES_MAX, LogSync, LogWriter, NOTHING_WAITS, NewFile, OnLogFailure,
    directory::{file_error, file_name},
    disk::LogFile,
    log_frame::{self, Header, Kind},
    queue::Batch,
};

impl Journal {
    /// Writes all that is queued, and wakes the tasks that wait for it.
    pub(super) fn write_queue(&self, mut guard: MutexGuard<'_, LogWriter>) {
        let writer = &mut *guard;
        let mut batch = self.queue.lock().take(std::mem::take(&mut writer.spare));
        if let Err(error) = self.write_batch(writer, &mut batch) {
            self.fail(writer, "cannot be written", error);
        }
        // A batch whose last frames lie before a change of files has told no position yet.
        self.followers.ship(&[], batch.end);
        writer.position = batch.end;
        self.written.store(batch.end, Ordering::Release);
        writer.spare = batch.into_spare();
        drop(guard);
        self.progress.notify_waiters();
    }

    fn write_batch(&self, writer: &mut LogWriter, batch: &mut Batch) -> io::Result<()> {
        let next_file = batch.next_file.take();
        let switch_at = next_file.as_ref().map(|(index, _)| *index);
        let written = self.write_frames(writer, batch, 0, switch_at);
        let Some((index, file)) = next_file else { return written };
        if let Err(error) = written {
            self.fail(writer, "cannot be written", error);
        }
        // After a failure only a file that starts anew is written to.
        if writer.file.is_some() || file.marker.is_some() {
            self.switch(writer, file);
        }
        self.write_frames(writer, batch, index, None)
    }

    fn write_frames(
        &self,
        writer: &mut LogWriter,
        batch: &mut Batch,
        first: usize,
        end: Option<usize>,
    ) -> io::Result<()> {
        let Some(file) = writer.file.clone() else { return Ok(()) };
        // Until the last frame of a batch only the former position is known to be complete.
        let position = if end.is_none() { batch.end } else { writer.position };
        let (next_frame, synced) = (&mut writer.next_frame, writer.synced_frame);
        let mut frames = 0;
        let bytes = batch.frames(first, end, |frame| {
            log_frame::seal(frame, *next_frame, synced);
            *next_frame += 1;
            frames += 1;
        });
        if frames == 0 {
            return Ok(());
        }
        // The standbys write at the same time as this master. One that has more than a leader that died
        // gives it up when it attaches to the next one, as after a loss of power of the leader.
        self.followers.ship(bytes, position);
        file.append(bytes)?;
        let bytes = bytes.len() as u64;
        writer.length += bytes;
        let is_large = {
            let status = &mut *self.status.lock();
            status.bytes_written += bytes;
            status.log_bytes += bytes;
            status.records += std::mem::take(&mut batch.records);
            status.writes += 1;
            status.log_bytes > LOG_BYTES_MAX.max(2 * status.snapshot_bytes)
        };
        if is_large {
            self.snapshot_requests.request();
        }
        Ok(())
    }

    /// Continues in a new file.
    pub(super) fn switch(&self, writer: &mut LogWriter, new_file: NewFile) {
        *self.timeline_id.lock() = new_file.timeline_id;
        writer.number = new_file.number;
        writer.next_file = new_file.number + 1;
        writer.first_frame = writer.next_frame;
        writer.length = log_frame::HEADER_BYTES as u64;
        let old = writer.file.replace(new_file.file);
        writer.marker = new_file.marker.or_else(|| writer.marker.take());
        if self.sync != LogSync::Never && writer.synced_frame < writer.next_frame {
            writer.unsynced.extend(old);
        }
    }

    /// Creates a file with nothing but a header, and syncs it: also a log that is never synced must
    /// be known as such after a crash. A first file after a failure has the marker of its timeline.
    /// This may take as long as the disk does.
    pub(super) fn make_file(
        &self,
        number: u64,
        timeline_id: [u8; 16],
        marker: Option<Arc<dyn LogFile>>,
    ) -> Result<NewFile> {
        let name = file_name(Kind::Log, number);
        let make = || -> io::Result<Arc<dyn LogFile>> {
            let file = self.directory.disk().create(&name)?;
            file.append(&self.header(Kind::Log, number, timeline_id).encode())?;
            file.sync()?;
            self.directory.disk().sync_directory()?;
            Ok(file)
        };
        let path = self.directory.path_of(&name);
        let file = make().map_err(|source| file_error("cannot be written", &path, source))?;
        Ok(NewFile { file, number, timeline_id, marker })
    }

    pub(super) fn header(&self, kind: Kind, number: u64, timeline_id: [u8; 16]) -> Header {
        let header = Header::new(kind, self.sync.into(), number);
        Header { timeline_id, boot: self.boot, ..header }
    }

    /// Handles a failure of the disk, before anything is answered that is not in the log. If the
    /// master continues, the files on disk will soon be out of date and must not be used after a
    /// restart; the maintenance threads try to restart the log. If it must end, the files stay as
    /// they are: they hold all that was acknowledged.
    pub(super) fn fail(&self, writer: &mut LogWriter, what: &str, source: io::Error) {
        let path = self.directory.path_of(&file_name(Kind::Log, writer.number));
        let error = file_error(what, &path, source);
        writer.file = None;
        writer.unsynced.clear();
        self.failures.fetch_add(1, Ordering::AcqRel);
        self.is_healthy.store(false, Ordering::Release);
        {
            let status = &mut *self.status.lock();
            status.is_healthy = false;
            status.failures += 1;
            status.failure = error.to_string();
        }
        match self.on_failure {
            OnLogFailure::Stop => self.fatal.raise(stopped_error().caused_by(error)),
            OnLogFailure::Continue => self.continue_without_log(writer, error),
        }
        self.set_synced(NOTHING_WAITS);
    }

    fn continue_without_log(&self, writer: &mut LogWriter, error: Error) {
        if !self.make_void(writer) {
            tracing::error!(%error, "the log failed");
            return;
        }
        tracing::error!(
            %error,
            "the log failed: the master continues, but a restart would forget everything"
        );
    }

    /// Makes the files void: by the marker of their timeline, which needs no space on the disk, and
    /// by their removal. Either suffices. If both fail, the master ends; returns false then.
    fn make_void(&self, writer: &mut LogWriter) -> bool {
        let marker = writer.marker.take();
        let is_marked =
            marker.is_some_and(|marker| marker.truncate(0).and_then(|()| marker.sync()).is_ok());
        let removed = {
            let _placing = self.placing.lock();
            self.directory.remove_all()
        };
        match removed {
            Err(removal) if !is_marked => {
                self.fatal.raise(stale_error().caused_by(removal));
                return false;
            }
            Err(removal) => {
                tracing::warn!(error = %removal, "a restart will ignore the files of the log that failed");
            }
            Ok(()) => {}
        }
        true
    }

    /// Gives up to restart a log that failed. Its snapshot may be in place; from here on memory is
    /// reused before the log has its release on disk, so that its files must not be used.
    pub(super) fn abandon_restart(&self) {
        let writer = &mut *self.writer.lock();
        if writer.file.take().is_some() {
            writer.unsynced.clear();
            self.failures.fetch_add(1, Ordering::AcqRel);
            self.make_void(writer);
        }
        self.set_synced(NOTHING_WAITS);
    }
}

fn stopped_error() -> Error {
    Error::new(
        ErrorCode::PERSISTENT_FAIL,
        "the log failed, and --on_log_failure is stop: the log holds all that was acknowledged, and \
         clients keep running; mend the disk or free space, and start the master again",
    )
}

fn stale_error() -> Error {
    Error::new(
        ErrorCode::PERSISTENT_FAIL,
        "the log failed, and its files can neither be marked nor removed: a restart could not tell \
         that they are out of date; make the state directory writable, and start the master again",
    )
}
