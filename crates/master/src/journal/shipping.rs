//! The log for its standbys: frames from the files up to the present, then each frame as it is
//! written.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use mooncake_base::{Clock, Error, ErrorCode, Result};

#[cfg(test)]
use super::confirmations::StandbyProgress;
use super::{
    Directory, Journal, RecoveredJournal,
    directory::file_name,
    followers::{FollowerId, Followers, Newcomer},
    log_frame::Kind,
    recovery::FrameSource,
};
use crate::state::LeaseNotes;

/// Bytes of frames that are read from the files at a time, beside a frame that is larger.
const PART_BYTES: usize = 4 << 20;

/// Reads for a standby what it lacks from the files of the log.
#[derive(Debug)]
pub(crate) struct CatchUp<'a> {
    journal: &'a Journal,
    source: FrameSource<'a>,
    attached: Option<Attachment>,
}

/// The place of a standby among those that follow the log.
#[derive(Debug, Clone, Copy)]
struct Attachment {
    id: FollowerId,
    /// The first frame that is queued for it.
    end: u64,
    /// The position behind the frames before.
    position: u64,
}

/// The snapshots in the files.
#[derive(Debug)]
pub(crate) struct SnapshotFiles<'a> {
    directory: &'a Directory,
}

/// Frames from the files.
#[derive(Debug)]
pub(crate) struct MissedFrames {
    pub(crate) bytes: Vec<u8>,
    /// The connection of the standby and the position behind the frames, if these are the last ones
    /// before those of [`Followers::next`].
    pub(crate) attached: Option<(FollowerId, u64)>,
}

impl RecoveredJournal {
    /// Takes the time for which standbys are silent from a clock.
    pub(crate) fn set_clock(&mut self, clock: Arc<dyn Clock>) {
        self.journal.followers.set_clock(clock);
    }
}

impl Journal {
    /// Returns the number of the frame that is written next.
    pub(crate) fn end_frame(&self) -> u64 {
        self.with_writer(|writer| writer.next_frame)
    }

    /// Returns the snapshots, for standbys that lack too much.
    pub(crate) fn snapshots(&self) -> SnapshotFiles<'_> {
        SnapshotFiles { directory: &self.directory }
    }

    /// Begins to read the frames from a number on.
    pub(crate) fn catch_up(&self, next_frame: u64) -> CatchUp<'_> {
        CatchUp {
            journal: self,
            source: FrameSource::new(&self.directory, next_frame),
            attached: None,
        }
    }

    /// Returns the standbys that follow the log.
    pub(crate) fn followers(&self) -> &Followers {
        &self.followers
    }

    /// Records what a standby has, where no connection tells it.
    #[cfg(test)]
    pub(crate) fn confirm_standby(&self, id: FollowerId, progress: StandbyProgress) {
        self.followers.confirm(id, progress);
        self.wake_waiters();
    }

    /// Makes changes wait for exactly these members. Called before the lease service is asked to take a
    /// member in, and after it has taken one out.
    pub(crate) fn require_standbys(&self, members: &BTreeSet<String>) {
        self.followers.require(members);
        self.wake_waiters();
    }
}

/// Returns whether standbys are attached, which are to be told of leases.
pub(crate) fn has_standbys(journal: &Journal) -> bool {
    journal.followers.are_any()
}

/// Tells the standbys of leases. Returns whether one has to be told of all leases, earlier ones
/// included.
pub(crate) fn tell_leases(journal: &Journal, notes: &LeaseNotes) -> bool {
    journal.followers.tell_leases(notes)
}

/// Tells the standbys that all memory which must rest is in the log, and waits until that was sent.
pub(crate) fn tell_rest_logged(journal: &Journal, time: Duration) {
    journal.followers.tell_rest_logged();
    journal.followers.wait_sent(time);
}

impl SnapshotFiles<'_> {
    /// Returns the number of the newest snapshot.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub(crate) fn newest(&self) -> Result<Option<u64>> {
        Ok(self.directory.numbers(Kind::Snapshot)?.pop())
    }

    /// Reads a part of a snapshot from an offset on; empty at its end.
    ///
    /// # Errors
    /// The file cannot be read, or a later snapshot has replaced it.
    pub(crate) fn read(&self, number: u64, offset: u64) -> Result<Vec<u8>> {
        let name = file_name(Kind::Snapshot, number);
        self.directory.read_part(&name, offset, PART_BYTES)
    }
}

impl CatchUp<'_> {
    /// Returns whether the files have the first frame that the standby lacks, or the log ends there.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(crate) fn is_possible(&self) -> Result<bool> {
        let (next, end) = (self.source.next(), self.journal.end_frame());
        let found = FrameSource::new(&self.journal.directory, next).read(end.min(next + 1), 1)?;
        Ok(next == end || next < end && found.is_some())
    }

    /// Returns the next frames, a few mebibytes of them. Attaches the member once the files have less
    /// than that which it lacks.
    ///
    /// # Errors
    /// A file cannot be read, or the frames are in no file any more.
    pub(crate) fn next(&mut self, standby: &Newcomer<'_>) -> Result<MissedFrames> {
        let Some(attached) = self.attached else {
            let bytes = self.read(self.journal.end_frame())?;
            if bytes.len() < PART_BYTES {
                self.attached = Some(self.attach(standby));
            }
            let attached = self.attached.filter(|attached| self.source.next() >= attached.end);
            return Ok(MissedFrames { bytes, attached: attached.map(|a| (a.id, a.position)) });
        };
        let bytes = self.read(attached.end)?;
        let is_last = self.source.next() >= attached.end;
        Ok(MissedFrames { bytes, attached: is_last.then_some((attached.id, attached.position)) })
    }

    /// Leaves the standby attached. Without this, dropping ends its connection.
    pub(crate) fn end(mut self) {
        self.attached = None;
    }

    /// Frames that are written from here on are queued; all earlier ones are in the files.
    fn attach(&self, standby: &Newcomer<'_>) -> Attachment {
        let journal = self.journal;
        journal.with_writer(|writer| Attachment {
            id: journal.followers.attach(standby, writer.position),
            end: writer.next_frame,
            position: writer.position,
        })
    }

    fn read(&mut self, end: u64) -> Result<Vec<u8>> {
        self.source.read(end, PART_BYTES)?.ok_or_else(|| {
            let text = "a file of the log was replaced by a snapshot while a standby read it";
            Error::new(ErrorCode::PERSISTENT_FAIL, text).with("frame", self.source.next())
        })
    }
}

impl Drop for CatchUp<'_> {
    fn drop(&mut self) {
        if let Some(attached) = self.attached {
            self.journal.followers.detach(attached.id);
        }
    }
}
