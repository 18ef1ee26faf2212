//! Transfers of replicas: one transfer per peer, for any number of objects.

use std::sync::Arc;

use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, EngineMark, Error, ErrorCode, ErrorKind, Result, SystemClock};
use mooncake_os::{
    call_limit::{self, Helpers},
    threads::start_scoped,
};
use mooncake_transfer_engine::{Engine, Opcode, TimeLimits, TransferEntry};
use rustc_hash::FxHashMap;

use crate::{
    lifetime::Lifetime,
    metrics::{Metrics, OutcomeTotals},
    object::SegmentInfo,
    replica::{ReplicaSelector, peer_latency::is_worth_threads},
};

/// Maximum number of peers served in parallel.
const PARALLEL_PEERS_MAX: usize = 8;

/// Maximum number of peers waited for in parallel without a stall limit. The threads only wait.
const PARALLEL_WAITS_MAX: usize = 64;

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
struct Job {
    /// Index of the remote segment.
    segment: usize,
    /// Number of transfer entries.
    entries: usize,
    /// Whether another peer could have served the job as well.
    is_chosen: bool,
    /// Whether later jobs move the rest of the same object.
    is_part: bool,
    /// Result; `None` until the job has run.
    outcome: Option<Result<()>>,
    /// Whether bytes of it may still arrive at the peer after it has succeeded.
    may_arrive_late: bool,
}

/// Options common to all groups of one run.
#[derive(Debug, Clone, Copy)]
struct RunOptions {
    opcode: Opcode,
    limits: TimeLimits,
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
    fn group_by_peer(&mut self) -> (&[Arc<SegmentInfo>], Vec<PeerGroup<'_>>) {
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
    fn bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.local.length() as u64).sum()
    }

    /// Sets the error as the outcome of every job. Returns false: the group has failed.
    fn fail(&mut self, error: &Error) -> bool {
        for job in &mut self.jobs {
            job.outcome = Some(Err(error.clone()));
        }
        false
    }
}

/// The transfers of one client.
pub(crate) struct Transfers {
    engine: Engine,
    replicas: ReplicaSelector,
    lifetime: Arc<Lifetime>,
    metrics: Arc<Metrics>,
}

impl Transfers {
    pub(crate) fn new(
        engine: Engine,
        replicas: ReplicaSelector,
        lifetime: &Arc<Lifetime>,
        metrics: &Arc<Metrics>,
    ) -> Self {
        Self { engine, replicas, lifetime: Arc::clone(lifetime), metrics: Arc::clone(metrics) }
    }

    /// Returns what is known of the peers.
    pub(crate) fn replicas(&self) -> &ReplicaSelector {
        &self.replicas
    }

    /// Runs every job and stores its result. A peer that is silent or gone delays no other peer for
    /// longer than the stall limit.
    pub(crate) fn run(&self, opcode: Opcode, jobs: &mut Jobs, limits: impl Into<TimeLimits>) {
        let limits = limits.into();
        let (segments, mut groups) = jobs.group_by_peer();
        let options = RunOptions { opcode, limits, is_shared: groups.len() > 1 };
        let mut rest = &mut groups[..];
        if !options.is_shared || !self.is_worth_threads(options, segments, rest) {
            while let Some((group, others)) = std::mem::take(&mut rest).split_first_mut() {
                rest = others;
                if !self.run_group(options, segments, group) {
                    break;
                }
            }
        }
        self.run_in_parallel(options, segments, rest);
    }

    /// Runs groups on several threads. Each thread takes the next group when it is done with one.
    fn run_in_parallel(
        &self,
        options: RunOptions,
        segments: &[Arc<SegmentInfo>],
        groups: &mut [PeerGroup<'_>],
    ) {
        let threads_max = match options.limits.stall {
            Some(_) => PARALLEL_PEERS_MAX,
            None => PARALLEL_WAITS_MAX,
        };
        let threads = groups.len().min(threads_max);
        let queue = Mutex::new(groups.iter_mut());
        let run = &|| {
            loop {
                let next = queue.lock().next();
                let Some(group) = next else { return };
                self.run_group(options, segments, group);
            }
        };
        let helpers = Helpers::new();
        std::thread::scope(|scope| {
            for _ in 1..threads {
                let begin = SystemClock.now();
                let (limit, helper) = (call_limit::current(), helpers.add());
                let spawned = start_scoped(scope, "mc-transfer", move || {
                    let _helper = helper;
                    let now = SystemClock.now();
                    self.replicas.latency().record_thread_start(now.since(begin), now);
                    call_limit::run_under(limit, run);
                });
                if let Err(error) = spawned {
                    // The other threads take the groups.
                    tracing::warn!(%error, "cannot start a thread for a transfer");
                }
            }
            run();
            helpers.wait();
        });
    }

    /// Returns whether the groups finish sooner with a thread each: by their expected durations, or
    /// because a peer may stay silent.
    fn is_worth_threads(
        &self,
        options: RunOptions,
        segments: &[Arc<SegmentInfo>],
        groups: &[PeerGroup<'_>],
    ) -> bool {
        let now = SystemClock.now();
        let endpoint = |group: &PeerGroup<'_>| match group.jobs.first() {
            Some(job) => segments[job.segment].endpoint.as_str(),
            None => "",
        };
        let may_wait = |group| self.replicas.suspected().is_suspected(endpoint(group), now);
        if options.limits.stall.is_none() || groups.iter().any(may_wait) {
            return true;
        }
        let expected = groups.iter().map(|group| {
            self.replicas.expected_latency(endpoint(group), options.opcode, group.bytes(), now)
        });
        is_worth_threads(expected, self.replicas.latency().expected_thread_start(now))
    }

    /// Runs the jobs of one peer. Returns false if the peer could not be reached, or failed.
    fn run_group(
        &self,
        options: RunOptions,
        segments: &[Arc<SegmentInfo>],
        group: &mut PeerGroup<'_>,
    ) -> bool {
        let RunOptions { opcode, limits, is_shared } = options;
        let Some(first) = group.jobs.first() else { return true };
        let is_measured = is_shared || group.jobs.iter().any(|job| job.is_chosen);
        let segment = &segments[first.segment];
        let begin = is_measured.then(|| SystemClock.now());
        if begin.is_some_and(|begin| limits.deadline.has_passed(begin)) {
            // Another peer has taken the time; this one is not to blame.
            let error =
                Error::new(ErrorCode::RPC_TIMEOUT, "the deadline passed before the transfer began");
            return group.fail(&error.with("peer", &segment.endpoint));
        }
        if let Err(error) = self.replicas.suspected().check(&segment.endpoint, limits.stall) {
            return group.fail(&error.with("segment", &segment.name));
        }
        let peer = match self.engine.open(&segment.endpoint, limits.give_up_at()) {
            Ok(peer) => peer,
            Err(error) => return group.fail(&self.record_peer_failure(error, segment, limits)),
        };
        let (owner, entries) = (segment.id.engine_mark(), &mut group.entries);
        let served = self.engine.transfer_to_owner(&peer, owner, opcode, entries, limits);
        let end = begin.map(|begin| (begin, SystemClock.now()));
        let mut entries = std::mem::take(&mut group.entries).into_iter();
        let mut totals = OutcomeTotals::default();
        for job in &mut group.jobs {
            let of_job = entries.by_ref().take(job.entries);
            let of_job = of_job.inspect(|entry| job.may_arrive_late |= entry.may_arrive_late);
            let outcome = job_outcome(of_job, job.is_part, &mut totals);
            let blame = |error| self.record_peer_failure(error, &segments[job.segment], limits);
            job.outcome = Some(outcome.map_err(blame));
        }
        self.metrics.count_copies(served.or_else(|| peer.transport()), opcode, totals);
        if totals.failed == 0
            && let Some((begin, end)) = end
        {
            let (latency, took) = (self.replicas.latency(), end.since(begin));
            latency.record(&segment.endpoint, opcode, totals.bytes, took, end);
        }
        if totals.done > 0 {
            self.replicas.suspected().clear(&segment.endpoint);
        }
        totals.failed == 0
    }

    /// Records the failure of a peer and adds its name to the error.
    fn record_peer_failure(
        &self,
        error: Error,
        segment: &SegmentInfo,
        limits: TimeLimits,
    ) -> Error {
        // Invalid local memory is no fault of the peer. Neither is a failure while the client is
        // closing, or after the caller has stopped waiting.
        let is_own_limit = self.lifetime.is_closed() || call_limit::is_over();
        if error.code() != ErrorCode::INVALID_PARAMS && !is_own_limit {
            let now = SystemClock.now();
            self.metrics.count_peer_error(&segment.endpoint);
            if error.kind() == ErrorKind::Timeout && !limits.deadline.has_passed(now) {
                self.replicas.suspected().add_silence(&segment.endpoint, &error, limits.stall, now);
            }
            if self.replicas.suspected().add(&segment.endpoint, now) {
                let (peer, segment) = (&segment.endpoint, &segment.name);
                tracing::warn!(peer, segment, %error, "a transfer failed; trying the peer last for a while");
            }
        }
        error.with("segment", &segment.name).with("peer", &segment.endpoint)
    }
}

/// Combines the results of a job's entries.
fn job_outcome(
    entries: impl Iterator<Item = TransferEntry>,
    is_part: bool,
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
    let moved = failed.is_none().then_some(bytes);
    if is_part {
        totals.add_part(moved);
    } else {
        totals.add(moved);
    }
    failed.map_or(Ok(()), Err)
}

fn not_transferred() -> Error {
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
