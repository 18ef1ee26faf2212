//! Transfers of replicas: one transfer per peer, for any number of objects.

use std::sync::Arc;

use mooncake_base::{Clock, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_transfer_engine::{Opcode, TransferEntry};
use rustc_hash::FxHashMap;

use super::{ClientInner, peer_latency::is_worth_threads};
use crate::{metrics::OutcomeTotals, object::SegmentInfo};

/// Maximum number of peers served in parallel.
const PARALLEL_PEERS_MAX: usize = 8;

/// A batch of replicas, or parts of replicas, to transfer.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    /// Segments of the remote sides.
    segments: Vec<Arc<SegmentInfo>>,
    /// Index of each segment, by its address.
    segment_indexes: FxHashMap<usize, usize>,
    jobs: Vec<Job>,
    /// The entries to transfer, job after job.
    entries: Vec<TransferEntry>,
}

#[derive(Debug)]
struct Job {
    /// Index of the remote segment.
    segment: usize,
    /// Number of transfer entries.
    entries: usize,
    /// Whether another peer could have served the job as well.
    is_chosen: bool,
    /// Result; `None` until the job has run.
    outcome: Option<Result<()>>,
}

/// Options common to all groups of one run.
#[derive(Debug, Clone, Copy)]
struct RunOptions {
    opcode: Opcode,
    deadline: Moment,
    /// Whether there is more than one group.
    is_shared: bool,
}

/// The jobs for one peer.
struct PeerGroup<'a> {
    jobs: Vec<&'a mut Job>,
    entries: Vec<TransferEntry>,
}

impl Jobs {
    /// An empty batch with capacity for `jobs` jobs of one entry each.
    pub(super) fn with_capacity(jobs: usize) -> Self {
        Self {
            jobs: Vec::with_capacity(jobs),
            entries: Vec::with_capacity(jobs),
            ..Self::default()
        }
    }

    /// Adds a job. Set `is_chosen` if another peer could have served it as well.
    pub(super) fn push(
        &mut self,
        segment: &Arc<SegmentInfo>,
        entries: impl IntoIterator<Item = TransferEntry>,
        is_chosen: bool,
    ) {
        let segment = self.segment_index(segment);
        let before = self.entries.len();
        self.entries.extend(entries);
        let entries = self.entries.len() - before;
        self.jobs.push(Job { segment, entries, is_chosen, outcome: None });
    }

    /// Number of jobs.
    pub(super) fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Whether the batch has no jobs.
    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Returns the results in the order of the jobs. A job that never ran has failed.
    pub(super) fn finish(self) -> impl Iterator<Item = Result<()>> {
        self.jobs.into_iter().map(|job| job.outcome.unwrap_or_else(|| Err(not_transferred())))
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

    /// Groups the jobs by peer and returns the groups with the segments. Peers are identified by
    /// endpoint, since a peer has many segments.
    fn group_by_peer(&mut self) -> (&[Arc<SegmentInfo>], Vec<PeerGroup<'_>>) {
        let mut by_endpoint: FxHashMap<&str, usize> = FxHashMap::default();
        let mut peers = Vec::with_capacity(self.segments.len());
        for segment in &self.segments {
            let next = by_endpoint.len();
            peers.push(*by_endpoint.entry(&segment.endpoint).or_insert(next));
        }
        let entries = std::mem::take(&mut self.entries);
        if by_endpoint.len() == 1 {
            let jobs = self.jobs.iter_mut().collect();
            return (&self.segments, vec![PeerGroup { jobs, entries }]);
        }
        let empty = || PeerGroup { jobs: Vec::new(), entries: Vec::new() };
        let mut groups: Vec<_> = std::iter::repeat_with(empty).take(by_endpoint.len()).collect();
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
    fn bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.local.length() as u64).sum()
    }
}

impl ClientInner {
    /// Runs every job and stores its result.
    pub(super) fn run_jobs(&self, opcode: Opcode, jobs: &mut Jobs, deadline: Moment) {
        let (segments, mut groups) = jobs.group_by_peer();
        let options = RunOptions { opcode, deadline, is_shared: groups.len() > 1 };
        if !options.is_shared || !self.is_worth_threads(opcode, segments, &groups) {
            for group in &mut groups {
                self.run_group(options, segments, group);
            }
            return;
        }
        let share = groups.len().div_ceil(PARALLEL_PEERS_MAX);
        std::thread::scope(|scope| {
            let mut shares = groups.chunks_mut(share);
            let own = shares.next();
            for share in shares {
                let begin = SystemClock.now();
                let thread = std::thread::Builder::new().name("mc-transfer".to_owned());
                let spawned = thread.spawn_scoped(scope, move || {
                    let now = SystemClock.now();
                    self.peer_latency.record_thread_start(now.since(begin), now);
                    for group in share {
                        self.run_group(options, segments, group);
                    }
                });
                if let Err(error) = spawned {
                    // The jobs of this thread have no result and count as failed.
                    tracing::warn!(%error, "cannot start a thread for a transfer");
                }
            }
            for group in own.into_iter().flatten() {
                self.run_group(options, segments, group);
            }
        });
    }

    /// Returns whether the groups finish sooner with a thread each.
    fn is_worth_threads(
        &self,
        opcode: Opcode,
        segments: &[Arc<SegmentInfo>],
        groups: &[PeerGroup<'_>],
    ) -> bool {
        let now = SystemClock.now();
        let expected = groups.iter().map(|group| {
            let endpoint = group.jobs.first().map_or("", |job| &segments[job.segment].endpoint);
            self.expected_latency(endpoint, (opcode, group.bytes()), now)
        });
        is_worth_threads(expected, self.peer_latency.expected_thread_start(now))
    }

    fn run_group(
        &self,
        options: RunOptions,
        segments: &[Arc<SegmentInfo>],
        group: &mut PeerGroup<'_>,
    ) {
        let RunOptions { opcode, deadline, is_shared } = options;
        let Some(first) = group.jobs.first() else { return };
        let is_measured = is_shared || group.jobs.iter().any(|job| job.is_chosen);
        let segment = &segments[first.segment];
        let peer = match self.engine.open(&segment.endpoint, deadline) {
            Ok(peer) => peer,
            Err(error) => {
                let error = self.record_peer_failure(error, segment);
                for job in &mut group.jobs {
                    job.outcome = Some(Err(error.clone()));
                }
                return;
            }
        };
        let begin = is_measured.then(|| SystemClock.now());
        let served = self.engine.transfer(&peer, opcode, &mut group.entries, deadline);
        let end = begin.map(|begin| (begin, SystemClock.now()));
        let mut entries = std::mem::take(&mut group.entries).into_iter();
        let mut totals = OutcomeTotals::default();
        for job in &mut group.jobs {
            let own = entries.by_ref().take(job.entries);
            job.outcome = Some(self.job_outcome(own, &segments[job.segment], &mut totals));
        }
        self.metrics.count_copies(served.or_else(|| peer.transport()), opcode, totals);
        if let Some((begin, end)) = end.filter(|_| totals.failed == 0) {
            let what = (opcode, totals.bytes);
            self.peer_latency.record(&segment.endpoint, what, end.since(begin), end);
        }
        if totals.done > 0 {
            self.suspected_peers.clear(&segment.endpoint);
        }
    }

    /// Combines the results of a job's entries.
    fn job_outcome(
        &self,
        entries: impl Iterator<Item = TransferEntry>,
        segment: &SegmentInfo,
        totals: &mut OutcomeTotals,
    ) -> Result<()> {
        let mut bytes = 0;
        let mut failed = None;
        for entry in entries {
            bytes += entry.local.length() as u64;
            match entry.outcome {
                Some(Ok(())) => {}
                Some(Err(error)) => failed = failed.or(Some(error)),
                None => failed = failed.or_else(|| Some(not_transferred())),
            }
        }
        totals.add(failed.is_none().then_some(bytes));
        failed.map_or(Ok(()), |error| Err(self.record_peer_failure(error, segment)))
    }

    /// Records the failure of a peer and adds its name to the error.
    fn record_peer_failure(&self, error: Error, segment: &SegmentInfo) -> Error {
        // Invalid local memory is no fault of the peer. Neither is a failure while the client is
        // closing.
        if error.code() != ErrorCode::INVALID_PARAMS && !self.is_closed() {
            self.metrics.count_peer_error(&segment.endpoint);
            if self.suspected_peers.add(&segment.endpoint, SystemClock.now()) {
                let (peer, segment) = (&segment.endpoint, &segment.name);
                tracing::warn!(peer, segment, %error, "a transfer failed; trying the peer last for a while");
            }
        }
        error.with("segment", &segment.name).with("peer", &segment.endpoint)
    }
}

fn not_transferred() -> Error {
    Error::new(ErrorCode::TRANSFER_FAIL, "the transfer did not happen")
}

#[cfg(test)]
mod tests {
    use mooncake_base::SegmentId;

    use super::{super::bytes::dangling_range, *};

    fn segment(endpoint: &str) -> Arc<SegmentInfo> {
        Arc::new(SegmentInfo {
            id: SegmentId::random(),
            name: "name".to_owned(),
            endpoint: endpoint.to_owned(),
            base: 0,
            length: 1 << 20,
            protocol: "tcp".to_owned(),
        })
    }

    #[test]
    fn groups_jobs_and_entries_by_peer() {
        let (a, b, more_of_a) = (segment("a"), segment("b"), segment("a"));
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
        let (a, more_of_a) = (segment("a"), segment("a"));
        let entry = |remote| TransferEntry::new(dangling_range(1), remote);
        let mut jobs = Jobs::default();
        jobs.push(&a, [entry(1)], true);
        jobs.push(&more_of_a, [entry(2)], false);
        let (_, groups) = jobs.group_by_peer();
        assert_eq!(groups.len(), 1);
        assert_eq!((groups[0].jobs.len(), groups[0].entries.len()), (2, 2));
        assert!(groups[0].jobs[0].is_chosen);
    }
}
