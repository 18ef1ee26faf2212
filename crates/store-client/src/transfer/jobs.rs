//! A batch of transfers, and its groups by peer.

use std::sync::Arc;

use mooncake_base::{EngineMark, Error, ErrorCode, Result};
use mooncake_transfer_engine::TransferEntry;
use rustc_hash::FxHashMap;

use crate::object::SegmentInfo;

/// A batch of replicas, or parts of replicas, to transfer.
#[derive(Debug, Default)]
pub(crate) struct Jobs {
    /// Segments of the remote sides.
    segments: Vec<Arc<SegmentInfo>>,
    /// Index of each segment, by its address.
    segment_indexes: FxHashMap<usize, usize>,
    jobs: Vec<Job>,
    /// The entries to transfer, job after job.
    entries: Vec<TransferEntry>,
}

#[derive(Debug)]
pub(super) struct Job {
    /// Index of the remote segment.
    pub(super) segment: usize,
    /// Number of transfer entries.
    pub(super) entries: usize,
    /// Whether another peer could have served the job as well.
    pub(super) is_chosen: bool,
    /// Whether later jobs move the rest of the same object.
    pub(super) is_part: bool,
    /// Result; `None` until the job has run.
    pub(super) outcome: Option<Result<()>>,
    /// Whether bytes of it may still arrive at the peer after it has succeeded.
    pub(super) may_arrive_late: bool,
}

/// The jobs for one peer.
pub(super) struct PeerGroup<'a> {
    pub(super) jobs: Vec<&'a mut Job>,
    pub(super) entries: Vec<TransferEntry>,
}

impl Jobs {
    /// An empty batch with capacity for `jobs` jobs of one entry each.
    pub(crate) fn with_capacity(jobs: usize) -> Self {
        Self {
            jobs: Vec::with_capacity(jobs),
            entries: Vec::with_capacity(jobs),
            ..Self::default()
        }
    }

    /// Reserves memory for the entries of the next jobs.
    pub(crate) fn reserve(&mut self, entries: usize) {
        self.entries.reserve(entries);
    }

    /// Adds a job. Set `is_chosen` if another peer could have served it as well.
    pub(crate) fn push(
        &mut self,
        segment: &Arc<SegmentInfo>,
        entries: impl IntoIterator<Item = TransferEntry>,
        is_chosen: bool,
    ) {
        self.push_part(segment, entries, is_chosen, false);
    }

    /// Adds a job like [`push`](Self::push). Set `is_part` if later jobs move the rest of its object.
    pub(crate) fn push_part(
        &mut self,
        segment: &Arc<SegmentInfo>,
        entries: impl IntoIterator<Item = TransferEntry>,
        is_chosen: bool,
        is_part: bool,
    ) {
        let segment = self.segment_index(segment);
        let before = self.entries.len();
        self.entries.extend(entries);
        let entries = self.entries.len() - before;
        let (outcome, may_arrive_late) = (None, false);
        self.jobs.push(Job { segment, entries, is_chosen, is_part, outcome, may_arrive_late });
    }

    /// Whether the batch has no jobs.
    pub(crate) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Returns the results in the order of the jobs. A job that never ran has failed.
    pub(crate) fn finish(self) -> impl Iterator<Item = Result<()>> {
        self.jobs.into_iter().map(|job| job.outcome.unwrap_or_else(|| Err(not_transferred())))
    }

    /// Returns the results of writes like [`finish`](Self::finish), each with whether bytes may still
    /// arrive.
    pub(crate) fn finish_writes(self) -> impl Iterator<Item = (Result<()>, bool)> {
        let late: Vec<bool> = self.jobs.iter().map(|job| job.may_arrive_late).collect();
        self.finish().zip(late)
    }

    fn segment_index(&mut self, segment: &Arc<SegmentInfo>) -> usize {
        if let Some(last) = self.jobs.last()
            && Arc::ptr_eq(&self.segments[last.segment], segment)
        {
            return last.segment;
        }
        // The vector keeps the segment alive, so that its address stays unique.
        let next = self.segments.len();
        let number = *self.segment_indexes.entry(Arc::as_ptr(segment).addr()).or_insert(next);
        if number == next {
            self.segments.push(Arc::clone(segment));
        }
        number
    }

    /// Groups the jobs by peer and returns the groups with the segments. Peers are identified by the
    /// endpoint and the mark of the engine: a peer has many segments, and another engine may have taken
    /// the endpoint of one that has left.
    pub(super) fn group_by_peer(&mut self) -> (&[Arc<SegmentInfo>], Vec<PeerGroup<'_>>) {
        let mut by_peer: FxHashMap<(&str, EngineMark), usize> = FxHashMap::default();
        let mut peers = Vec::with_capacity(self.segments.len());
        for segment in &self.segments {
            let next = by_peer.len();
            let peer = (segment.endpoint.as_str(), segment.id.engine_mark());
            peers.push(*by_peer.entry(peer).or_insert(next));
        }
        let entries = std::mem::take(&mut self.entries);
        if by_peer.len() == 1 {
            let jobs = self.jobs.iter_mut().collect();
            return (&self.segments, vec![PeerGroup { jobs, entries }]);
        }
        let empty = || PeerGroup { jobs: Vec::new(), entries: Vec::new() };
        let mut groups: Vec<_> = std::iter::repeat_with(empty).take(by_peer.len()).collect();
        let mut entries = entries.into_iter();
        for job in &mut self.jobs {
            let group = &mut groups[peers[job.segment]];
            group.entries.extend(entries.by_ref().take(job.entries));
            group.jobs.push(job);
        }
        (&self.segments, groups)
    }
}

impl PeerGroup<'_> {
    pub(super) fn bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.local.length() as u64).sum()
    }

    /// Sets the error as the outcome of every job. Returns false: the group has failed.
    pub(super) fn fail(&mut self, error: &Error) -> bool {
        for job in &mut self.jobs {
            job.outcome = Some(Err(error.clone()));
        }
        false
    }
}

pub(super) fn not_transferred() -> Error {
    Error::new(ErrorCode::TRANSFER_FAIL, "the transfer did not happen")
}

#[cfg(test)]
mod tests {
    use mooncake_base::{EngineId, SegmentId};

    use super::*;
    use crate::client::dangling_range;

    fn segment(endpoint: &str, engine: EngineId) -> Arc<SegmentInfo> {
        Arc::new(SegmentInfo {
            id: SegmentId::of_engine(engine),
            name: "name".to_owned(),
            endpoint: endpoint.to_owned(),
            base: 0,
            length: 1 << 20,
            protocol: "tcp".to_owned(),
            is_disk: false,
        })
    }

    #[test]
    fn groups_jobs_and_entries_by_peer() {
        let of_a = EngineId::random();
        let (a, b, more_of_a) =
            (segment("a", of_a), segment("b", EngineId::random()), segment("a", of_a));
        let entry = |remote| TransferEntry::new(dangling_range(1), remote);
        let mut jobs = Jobs::default();
        jobs.push(&a, [entry(1), entry(2)], false);
        jobs.push(&b, [entry(3)], false);
        jobs.push(&more_of_a, [], false);
        jobs.push(&a, [entry(4)], false);
        let (segments, groups) = jobs.group_by_peer();
        assert_eq!(segments.len(), 3, "each segment is stored once");
        let remotes = |group: &PeerGroup<'_>| {
            let counts = group.jobs.iter().map(|job| job.entries).collect::<Vec<_>>();
            (counts, group.entries.iter().map(|entry| entry.remote).collect::<Vec<_>>())
        };
        let found: Vec<_> = groups.iter().map(remotes).collect();
        assert_eq!(found, [(vec![2, 0, 1], vec![1, 2, 4]), (vec![1], vec![3])]);
        assert_eq!(jobs.finish().filter(Result::is_err).count(), 4, "none of them has run");
    }

    #[test]
    fn jobs_of_one_peer_form_one_group() {
        let engine = EngineId::random();
        let (a, more_of_a) = (segment("a", engine), segment("a", engine));
        let entry = |remote| TransferEntry::new(dangling_range(1), remote);
        let mut jobs = Jobs::default();
        jobs.push(&a, [entry(1)], true);
        jobs.push(&more_of_a, [entry(2)], false);
        let (_, groups) = jobs.group_by_peer();
        assert_eq!(groups.len(), 1);
        assert_eq!((groups[0].jobs.len(), groups[0].entries.len()), (2, 2));
        assert!(groups[0].jobs[0].is_chosen);
    }

    #[test]
    fn engines_that_had_one_endpoint_form_two_groups() {
        let [left, is_there] = [(); 2].map(|()| segment("a", EngineId::random()));
        let mut jobs = Jobs::default();
        for segment in [&left, &is_there, &left] {
            jobs.push(segment, [TransferEntry::new(dangling_range(1), 1)], false);
        }
        let (_, groups) = jobs.group_by_peer();
        assert_eq!(groups.iter().map(|group| group.jobs.len()).collect::<Vec<_>>(), [2, 1]);
    }
}
