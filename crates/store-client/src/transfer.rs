//! Transfers of replicas: one transfer per peer, for any number of objects.

pub(crate) mod jobs;

use std::sync::Arc;

use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, Error, ErrorCode, ErrorKind, Result, SystemClock};
use mooncake_os::{
    call_limit::{self, Helpers},
    threads::start_scoped,
};
use mooncake_transfer_engine::{Engine, Opcode, TimeLimits, TransferEntry};

use self::jobs::{Jobs, PeerGroup, not_transferred};
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

/// Options common to all groups of one run.
#[derive(Debug, Clone, Copy)]
struct RunOptions {
    opcode: Opcode,
    limits: TimeLimits,
    /// Whether there is more than one group.
    is_shared: bool,
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
