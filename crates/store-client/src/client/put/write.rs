//! Moves the bytes of puts to their replicas.

use std::time::Duration;

use mooncake_base::{Clock, Moment, ReplicaId, Result, SystemClock};
use mooncake_os::call_limit;
use mooncake_transfer_engine::{Opcode, TimeLimits, TransferEntry};

use super::upload::UploadWrite;
use crate::{
    client::{
        ClientInner,
        rounds::{RoundCursor, RoundSize},
    },
    transfer::jobs::Jobs,
};

/// The result of a write.
pub(in crate::client) struct Written {
    pub(in crate::client) outcomes: Vec<Result<()>>,
    /// When the last round of it began.
    pub(in crate::client) last_round: Moment,
}

/// The transfers of one round, and the put and the replica of each.
struct Round {
    jobs: Jobs,
    owners: Vec<(usize, ReplicaId)>,
    deadline: Moment,
}

impl ClientInner {
    /// Writes into every healthy replica, side by side. Leaves a holder that stays silent for longer
    /// than `stall`. Failures are also recorded in the upload. Large objects and batches are written in
    /// rounds, each with a time limit of its own, and the write windows are renewed.
    pub(in crate::client) fn write_once(
        &self,
        puts: &mut [UploadWrite<'_>],
        stall: Option<Duration>,
        now: Moment,
    ) -> Written {
        let begin = now;
        let now = self.renew_windows(puts, now);
        let open = self.lifetime.check_open();
        let mut outcomes: Vec<Result<()>> =
            puts.iter_mut().map(|put| open.clone().and_then(|()| put.check(now))).collect();
        let round_size = RoundSize::new(self.config.round_bytes);
        let last_round = if round_size.is_exceeded_by(puts.iter().map(|put| put.upload.length())) {
            self.write_in_rounds(puts, &mut outcomes, round_size, stall, now)
        } else {
            let mut round = self.begin_round(puts.len(), now);
            for (at, put) in puts.iter().enumerate().filter(|&(at, _)| outcomes[at].is_ok()) {
                round.add(at, put, false, |address| put.transfers_to(address));
            }
            self.run_round(round, puts, &mut outcomes, stall);
            now
        };
        let took = SystemClock.now().since(begin);
        self.metrics.count_transfer(Opcode::Write, puts.len(), took);
        Written { outcomes, last_round }
    }

    /// Writes puts that are large, or large together. Returns when the last round began.
    fn write_in_rounds(
        &self,
        puts: &mut [UploadWrite<'_>],
        outcomes: &mut [Result<()>],
        round_size: RoundSize,
        stall: Option<Duration>,
        mut now: Moment,
    ) -> Moment {
        let mut cursors: Vec<_> =
            puts.iter().map(|put| RoundCursor::new(put.layout.ranges())).collect();
        loop {
            let mut round = self.begin_round(puts.len(), now);
            let mut budget = round_size.begin();
            for (at, cursor) in cursors.iter_mut().enumerate() {
                if budget.is_spent() {
                    break;
                }
                let put = &puts[at];
                if outcomes[at].is_ok() && !put.upload.has_no_replica() && !cursor.is_at_end() {
                    let ranges = budget.take(cursor);
                    round.add(at, put, !cursor.is_at_end(), |address| {
                        let entry =
                            move |&(offset, range): &_| TransferEntry::new(range, address + offset);
                        ranges.iter().map(entry)
                    });
                }
            }
            self.run_round(round, puts, outcomes, stall);
            let is_open = |at: usize| outcomes[at].is_ok() && !cursors[at].is_at_end();
            if !(0..puts.len()).any(is_open) {
                return now;
            }
            now = self.renew_windows(puts, SystemClock.now());
            let open = self.lifetime.check_open();
            for (put, outcome) in puts.iter_mut().zip(&mut *outcomes).filter(|(_, o)| o.is_ok()) {
                *outcome = open.clone().and_then(|()| put.check_window(now));
            }
        }
    }

    fn begin_round(&self, puts: usize, now: Moment) -> Round {
        Round {
            jobs: Jobs::with_capacity(puts),
            owners: Vec::with_capacity(puts),
            deadline: call_limit::capped(now + self.config.transfer_timeout),
        }
    }

    /// Runs the transfers of a round and records their failures.
    fn run_round(
        &self,
        round: Round,
        puts: &mut [UploadWrite<'_>],
        outcomes: &mut [Result<()>],
        stall: Option<Duration>,
    ) {
        let Round { mut jobs, owners, deadline } = round;
        if !jobs.is_empty() {
            self.transfers.run(Opcode::Write, &mut jobs, TimeLimits { deadline, stall });
        }
        for ((outcome, may_arrive_late), (at, replica)) in jobs.finish_writes().zip(owners) {
            let UploadWrite { key, upload, .. } = &mut puts[at];
            if may_arrive_late {
                upload.add_late(replica);
            }
            if let Err(error) = outcome {
                self.metrics.replicas.lost_copies.increment();
                upload.fail_write(*key, replica, error, stall.is_some());
                if upload.has_no_replica() {
                    outcomes[at] = Err(upload.no_replica_error(*key));
                }
            }
        }
    }
}

impl Round {
    /// Adds the transfers of a put to all of its replicas. `transfers` makes them for the address of
    /// one; `is_part`: more follow in later rounds.
    fn add<I: Iterator<Item = TransferEntry>>(
        &mut self,
        at: usize,
        put: &UploadWrite<'_>,
        is_part: bool,
        transfers: impl Fn(u64) -> I,
    ) {
        self.deadline = self.deadline.min(put.upload.write_until());
        for place in put.upload.healthy() {
            self.jobs.push_part(&place.segment, transfers(place.address()), false, is_part);
            self.owners.push((at, place.replica));
        }
    }
}
