//! Copies of objects on their way: one transfer per peer, however many objects.

use std::sync::Arc;

use mooncake_base::{Clock, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_transfer_engine::{Opcode, Piece};
use rustc_hash::FxHashMap;

use super::{Shared, pace::is_worth_threads};
use crate::{metrics::Sum, object::SegmentInfo};

/// How many peers are served at the same time, at the most.
const PARALLEL_PEERS_MAX: usize = 8;

/// One copy of one object, or a part of it, to be moved.
#[derive(Debug)]
pub(super) struct Job {
    /// Where the peer's side is.
    pub(super) segment: Arc<SegmentInfo>,
    /// What is to be moved.
    pub(super) pieces: Vec<Piece>,
    /// Whether it could have been done with another peer as well.
    pub(super) is_chosen: bool,
    /// How it went; `None` until it has run.
    outcome: Option<Result<()>>,
}

/// What all groups of one run share.
#[derive(Debug, Clone, Copy)]
struct Call {
    opcode: Opcode,
    deadline: Moment,
    /// Whether there is more than one group.
    is_shared: bool,
}

/// The jobs for one peer.
struct Group<'a> {
    jobs: Vec<&'a mut Job>,
    bytes: u64,
}

impl Job {
    /// A job to be done.
    pub(super) fn new(segment: &Arc<SegmentInfo>, pieces: Vec<Piece>) -> Self {
        Self { segment: Arc::clone(segment), pieces, is_chosen: false, outcome: None }
    }

    /// How it went. A job that never ran has failed.
    pub(super) fn finish(self) -> Result<()> {
        self.outcome.unwrap_or_else(|| Err(unmoved()))
    }

    fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.local.length() as u64).sum()
    }
}

impl Shared {
    /// Runs every job and gives each its outcome.
    pub(super) fn run(&self, opcode: Opcode, jobs: &mut [Job], deadline: Moment) {
        let mut groups = group(jobs);
        let call = Call { opcode, deadline, is_shared: groups.len() > 1 };
        if !call.is_shared || !self.is_worth_threads(opcode, &groups) {
            for group in &mut groups {
                self.run_group(call, group);
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
                    self.paces.note_start(now.since(begin), now);
                    for group in share {
                        self.run_group(call, group);
                    }
                });
                if let Err(error) = spawned {
                    // Its jobs have no outcome and count as failed.
                    tracing::warn!(%error, "no thread for a transfer");
                }
            }
            for group in own.into_iter().flatten() {
                self.run_group(call, group);
            }
        });
    }

    /// Whether the groups are done sooner by a thread each.
    fn is_worth_threads(&self, opcode: Opcode, groups: &[Group<'_>]) -> bool {
        let now = SystemClock.now();
        let expected = groups.iter().map(|group| {
            let endpoint = group.jobs.first().map_or("", |job| &job.segment.endpoint);
            self.expected(endpoint, (opcode, group.bytes), now)
        });
        is_worth_threads(expected, self.paces.expected_start(now))
    }

    fn run_group(&self, call: Call, group: &mut Group<'_>) {
        let Call { opcode, deadline, is_shared } = call;
        let Some(first) = group.jobs.first() else { return };
        let is_measured = is_shared || group.jobs.iter().any(|job| job.is_chosen);
        let segment = Arc::clone(&first.segment);
        let peer = match self.engine.open(&segment.endpoint, deadline) {
            Ok(peer) => peer,
            Err(error) => {
                let error = self.blame(error, &segment);
                for job in &mut group.jobs {
                    job.outcome = Some(Err(error.clone()));
                }
                return;
            }
        };
        let mut pieces: Vec<Piece> = Vec::new();
        let counts: Vec<usize> = group.jobs.iter().map(|job| job.pieces.len()).collect();
        for job in &mut group.jobs {
            pieces.append(&mut job.pieces);
        }
        let begin = is_measured.then(|| SystemClock.now());
        let served = self.engine.transfer(&peer, opcode, &mut pieces, deadline);
        let end = begin.map(|begin| (begin, SystemClock.now()));
        let mut pieces = pieces.into_iter();
        let mut sum = Sum::default();
        for (job, count) in group.jobs.iter_mut().zip(counts) {
            job.pieces.extend(pieces.by_ref().take(count));
            self.settle(job, &mut sum);
        }
        self.metrics.count_copies(served.or_else(|| peer.transport()), opcode, sum);
        if let Some((begin, end)) = end.filter(|_| sum.failed == 0) {
            let what = (opcode, sum.bytes);
            self.paces.note(&segment.endpoint, what, end.since(begin), end);
        }
        if sum.done > 0 {
            self.suspects.clear(&segment.endpoint);
        }
    }

    /// Takes the outcome of a job from that of its pieces.
    fn settle(&self, job: &mut Job, sum: &mut Sum) {
        let failed = job.pieces.iter_mut().find_map(|piece| match piece.outcome.take() {
            Some(Ok(())) => None,
            Some(Err(error)) => Some(error),
            None => Some(unmoved()),
        });
        match failed {
            None => {
                sum.add(Some(job.bytes()));
                job.outcome = Some(Ok(()));
            }
            Some(error) => {
                sum.add(None);
                job.outcome = Some(Err(self.blame(error, &job.segment)));
            }
        }
    }

    /// Notes that a peer failed, and names it.
    fn blame(&self, error: Error, segment: &SegmentInfo) -> Error {
        // Memory of our own that is not there says nothing about the peer, and neither does what
        // fails while we close.
        if error.code() != ErrorCode::INVALID_PARAMS && !self.is_closed() {
            self.metrics.count_peer_error(&segment.endpoint);
            if self.suspects.add(&segment.endpoint, SystemClock.now()) {
                let (peer, segment) = (&segment.endpoint, &segment.name);
                tracing::warn!(peer, segment, %error, "a holder failed; others are asked first");
            }
        }
        error.with("segment", &segment.name).with("peer", &segment.endpoint)
    }
}

fn unmoved() -> Error {
    Error::new(ErrorCode::TRANSFER_FAIL, "the transfer did not happen")
}

/// Sorts the jobs by peer. Peers are told apart by their endpoints: a peer has many segments.
fn group(jobs: &mut [Job]) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    let mut by_endpoint: FxHashMap<String, usize> = FxHashMap::default();
    let mut last = None;
    for job in jobs {
        let bytes = job.bytes();
        let is_same = |at: &usize| groups[*at].jobs[0].segment.endpoint == job.segment.endpoint;
        let at = last.filter(is_same).unwrap_or_else(|| {
            *by_endpoint.entry(job.segment.endpoint.clone()).or_insert(groups.len())
        });
        if at == groups.len() {
            groups.push(Group { jobs: Vec::new(), bytes: 0 });
        }
        groups[at].bytes += bytes;
        groups[at].jobs.push(job);
        last = Some(at);
    }
    groups
}
