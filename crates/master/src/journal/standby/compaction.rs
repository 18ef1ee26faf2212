//! Snapshots that a standby makes of its own files.

use std::{
    io,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use mooncake_base::{Error, Result};

use super::{header, refused, unfinished_error};
use crate::{
    journal::{
        Directory, LogSync,
        directory::{UNFINISHED, file_name},
        log_frame::{self, FRAME_BYTES, Kind},
        recovery::{self, SNAPSHOT_END},
        snapshot::append_frames,
    },
    state::{DecodeError, Image},
};

/// Objects that are encoded at a time for a snapshot.
const SLICE_OBJECTS: u32 = 2048;

/// Makes a snapshot of the files before the one that is written.
#[derive(Debug)]
pub(crate) struct Compaction {
    pub(super) directory: Weak<Directory>,
    pub(super) sync: LogSync,
    pub(super) number: u64,
    pub(super) first_frame: u64,
    pub(super) is_cancelled: Arc<AtomicBool>,
}

impl Compaction {
    /// Makes the snapshot and removes what it replaces. Returns its size. Uses nothing but the files, and
    /// memory for another image.
    ///
    /// # Errors
    /// A file cannot be read or written, or the standby has ended.
    pub(crate) fn run(&self) -> Result<u64> {
        let directory = self.directory.upgrade().ok_or_else(ended)?;
        let _making = directory.snapshots().lock();
        let is_cancelled = || self.is_cancelled.load(Ordering::Acquire);
        let mut replay = |image: &mut Image, effects: &[u8]| {
            if is_cancelled() { Err(DecodeError { at: 0 }) } else { image.replay(effects) }
        };
        if is_cancelled() {
            return Err(ended());
        }
        let recovered = recovery::recover_before(&directory, self.number, &mut replay)?;
        if recovered.next_frame != self.first_frame {
            return Err(refused("is missing in the files", recovered.next_frame));
        }
        let kind = Kind::Snapshot;
        let header = header(&directory, self.sync, recovered.timeline_id, kind, self.number);
        let write = || -> io::Result<u64> {
            let file = directory.disk().create(UNFINISHED)?;
            let header = header.encode();
            file.append(&header)?;
            let mut length = header.len() as u64;
            let mut bytes = vec![0; FRAME_BYTES];
            recovered.image.encode(SLICE_OBJECTS, |effects| -> io::Result<()> {
                if is_cancelled() {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                bytes.truncate(FRAME_BYTES);
                bytes.extend_from_slice(effects);
                length += append_frames(&*file, &mut bytes)?;
                Ok(())
            })?;
            let mut end = [0; FRAME_BYTES];
            log_frame::seal(&mut end, SNAPSHOT_END, self.first_frame);
            file.append(&end)?;
            file.sync()?;
            if is_cancelled() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            directory.disk().rename(UNFINISHED, &file_name(kind, self.number))?;
            directory.disk().sync_directory()?;
            Ok(length + end.len() as u64)
        };
        let length = write().map_err(|source| unfinished_error(&directory, source))?;
        directory.remove_before(self.number)?;
        Ok(length)
    }
}

fn ended() -> Error {
    Error::closed("the standby has ended")
}
