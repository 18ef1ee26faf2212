//! Lends memory to the pool: announces segments, replaces lost ones, takes them back.

use std::{path::Path, sync::mpsc, time::Duration};

use mooncake_base::{Clock, Error, ErrorCode, Moment, Result, SegmentId, SystemClock};
use mooncake_os::{memory::memory_limit, threads};
use mooncake_proto::v1;

use super::{
    ClientSession,
    segments::{FilePart, Memory, MountedSegment},
};
use crate::{
    protocol::{Announcement, MountVerdict, check_all_known},
    rpc::response,
};

/// Time that closing waits until the memory is unmapped.
const FREE_TIMEOUT: Duration = Duration::from_millis(100);

impl ClientSession {
    /// Announces segments and returns the master's result for each.
    pub(crate) fn announce(
        &self,
        segments: &[v1::Segment],
        kind: Announcement,
        deadline: Moment,
    ) -> Result<Vec<Result<()>>> {
        let request = v1::MountRequest {
            caller: self.rpc.caller(),
            segments: segments.to_vec(),
            resume: kind == Announcement::Resume,
            sequence: self.next_announcement_number(),
            is_all: kind == Announcement::All,
        };
        let response = self.rpc.call_until(request, deadline)?;
        response::check_count(response.results.len(), segments.len())?;
        Ok(response.results.iter().map(Result::from).collect())
    }

    /// Replaces the lost segments by fresh memory under new ids; segments that are being unmounted
    /// are dropped. Returns the replaced segments.
    pub(crate) fn replace_segments(&self, lost: &[v1::Segment]) -> Result<Vec<MountedSegment>> {
        let is_lost =
            |mounted: &MountedSegment| lost.iter().any(|lost| lost.id == mounted.segment.id);
        let fresh = self.segments.backings(&is_lost).into_iter().map(|(bytes, part)| match part {
            None => self.allocate(bytes),
            Some(part) => self.map_file(part, bytes),
        });
        Ok(self.segments.swap_matching(&is_lost, fresh.collect::<Result<_>>()?))
    }

    /// Frees the segments whose grace period is over.
    pub(crate) fn free_expired(&self) {
        let expired = self.segments.take_expired(SystemClock.now());
        if !expired.is_empty() {
            // A master that was restarted may have lost the record of the unmount.
            self.mark_segments_uncertain();
        }
        free_in_background(expired);
    }

    /// Lends a part of a file to the pool.
    pub(crate) fn mount_file(
        &self,
        path: &Path,
        offset: u64,
        bytes: u64,
        location: &str,
    ) -> Result<SegmentId> {
        let part = FilePart { path: path.to_owned(), offset, location: location.to_owned() };
        self.lifetime.check_open()?;
        let mounted = self.map_file(part, bytes)?;
        let id = SegmentId::from_bytes(&mounted.segment.id);
        let id = id.ok_or_else(|| Error::internal("a segment was made without an id"))?;
        self.mount_all(vec![mounted]).map(|()| id)
    }

    /// Lends memory to the pool, as segments of limited size.
    pub(crate) fn mount(&self, bytes: u64) -> Result<Vec<SegmentId>> {
        self.lifetime.check_open()?;
        if bytes == 0 {
            return Err(Error::invalid("a segment of no bytes cannot be mounted"));
        }
        check_lent(self.segments.own_bytes(), bytes, memory_limit())?;
        let mut mounted = Vec::new();
        let mut left = bytes;
        while left > 0 {
            let length = left.min(self.config.segment_bytes_max.max(1));
            mounted.push(self.allocate(length)?);
            left -= length;
        }
        let id = |mounted: &MountedSegment| SegmentId::from_bytes(&mounted.segment.id);
        let ids = mounted.iter().filter_map(id).collect();
        self.mount_all(mounted).map(|()| ids)
    }

    fn mount_all(&self, mut mounted: Vec<MountedSegment>) -> Result<()> {
        let deadline = self.rpc.deadline();
        let segments: Vec<_> = mounted.iter().map(|mounted| mounted.segment.clone()).collect();
        for is_repeated in [false, true] {
            let registrations = self.registrations();
            let outcome = self.mount_now(&segments, &mut mounted, deadline);
            match MountVerdict::of(&outcome, is_repeated) {
                MountVerdict::Mounted => break,
                MountVerdict::RegisterAgain => self.register_again(registrations, deadline)?,
                MountVerdict::Uncertain => {
                    self.mark_segments_uncertain();
                    return outcome;
                }
            }
        }
        Ok(())
    }

    /// Announces the segments and, on success, stores them, all under the announcement lock: a
    /// concurrent registration either comes before or includes them.
    fn mount_now(
        &self,
        segments: &[v1::Segment],
        mounted: &mut Vec<MountedSegment>,
        deadline: Moment,
    ) -> Result<()> {
        let _announcing = self.lock_announcements(deadline)?;
        check_all_known(self.announce(segments, Announcement::Mount, deadline)?)?;
        let mut all = self.segments.0.lock();
        if self.lifetime.is_closed() {
            return Err(Error::closed("the client was closed while it was mounting memory"));
        }
        all.append(mounted);
        Ok(())
    }

    /// Unmounts a segment, after a grace period.
    pub(crate) fn unmount(&self, id: SegmentId, grace: Duration) -> Result<()> {
        let deadline = self.rpc.deadline();
        let _announcing = self.lock_announcements(deadline)?;
        if !self.segments.ids().contains(&id) {
            let text = "the client has no segment with this id";
            return Err(Error::new(ErrorCode::SEGMENT_NOT_FOUND, text).with("segment", id));
        }
        let request = v1::UnmountRequest {
            caller: self.rpc.caller(),
            segments: vec![id.to_bytes().to_vec().into()],
            grace_period_ms: u64::try_from(grace.as_millis()).unwrap_or(u64::MAX),
            sequence: self.next_announcement_number(),
        };
        let answer = self.rpc.call_until(request, deadline).map(|response| response.results);
        let answer = answer.and_then(|results| {
            response::check_count(results.len(), 1)?;
            Ok(results)
        });
        // Without an answer, the master may drop the segment nevertheless: at once, which the next
        // registration mends, or at the end of the grace.
        let results = answer.inspect_err(|_| {
            self.mark_segments_uncertain();
            if !grace.is_zero() {
                self.segments.set_expiry(id, SystemClock.now() + grace);
            }
        })?;
        match Result::from(&results[0]) {
            Err(error) if !is_already_gone(&error) => Err(error.with("segment", id)),
            Ok(()) if !grace.is_zero() => {
                self.segments.set_expiry(id, SystemClock.now() + grace);
                Ok(())
            }
            // The master has dropped the segment already, so the client drops it, too.
            _ => {
                drop(self.segments.take(id));
                Ok(())
            }
        }
    }

    fn allocate(&self, length: u64) -> Result<MountedSegment> {
        let id = self.engine.new_segment_id();
        let memory = self.engine.allocate(length)?;
        let segment = self.new_segment(id, memory.base(), length);
        Ok(MountedSegment { segment, memory: Memory::Own(memory), expires_at: None })
    }

    fn map_file(&self, part: FilePart, length: u64) -> Result<MountedSegment> {
        let id = self.engine.new_segment_id();
        let memory = self.engine.map_file(&part.path, part.offset, length, &part.location)?;
        let segment = self.new_segment(id, memory.base(), length);
        Ok(MountedSegment { segment, memory: Memory::File(memory, part), expires_at: None })
    }

    /// Describes a new segment.
    fn new_segment(&self, id: SegmentId, base: u64, length: u64) -> v1::Segment {
        v1::Segment {
            id: id.to_bytes().to_vec().into(),
            incarnation: 1,
            name: self.lifetime.name().to_owned(),
            endpoint: self.engine.segment_name().to_owned(),
            base,
            length,
            protocol: "tcp".to_owned(),
            kind: v1::SegmentKind::Memory.into(),
        }
    }
}

/// Frees memory on a background thread and waits for it only briefly. Unmapping may have to wait
/// for a hung peer until that peer counts as dead; closing must not.
pub(crate) fn free_in_background(segments: Vec<MountedSegment>) {
    if segments.is_empty() {
        return;
    }
    let (sender, receiver) = mpsc::sync_channel(1);
    let free = move || {
        drop(segments);
        // Fails if the receiver has given up waiting.
        let _ = sender.send(());
    };
    match threads::start_detached("mc-unmap", free) {
        Ok(()) => drop(receiver.recv_timeout(FREE_TIMEOUT)),
        // Without a thread, the closure was dropped here and the memory with it.
        Err(error) => {
            tracing::debug!(%error, "cannot start a thread to free memory, freed it in the caller")
        }
    }
}

/// Refuses to lend more memory than there is: the pool would place objects in it until the system
/// ends processes.
fn check_lent(lent: u64, bytes: u64, limit: Option<u64>) -> Result<()> {
    match limit {
        Some(limit) if lent.saturating_add(bytes) > limit => Err(Error::invalid(
            "this machine or its control group has less memory than is to be lent",
        )
        .with("bytes", bytes)
        .with("lent", lent)
        .with("limit", limit)
        .with_remedy("Lend less; `mooncake doctor` says how much is sensible.")),
        _ => Ok(()),
    }
}

fn is_already_gone(error: &Error) -> bool {
    [ErrorCode::SEGMENT_NOT_FOUND, ErrorCode::CLIENT_NOT_FOUND].contains(&error.code())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_not_there_cannot_be_lent() {
        assert!(check_lent(0, 100, Some(100)).is_ok());
        assert!(check_lent(u64::MAX, u64::MAX, None).is_ok());
        for (lent, bytes) in [(0, 101), (1, 100), (u64::MAX, 1)] {
            let error = check_lent(lent, bytes, Some(100)).unwrap_err();
            let context: Vec<_> = error.context().map(|(_, value)| value.to_owned()).collect();
            assert_eq!(context[..3], [bytes.to_string(), lent.to_string(), "100".to_owned()]);
        }
    }
}
