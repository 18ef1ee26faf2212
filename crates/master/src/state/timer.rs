//! Timers, apart from things that are ordered by time anyway (puts, quarantined memory).

use std::{cmp::Reverse, collections::BinaryHeap};

use mooncake_base::{ClientId, Incarnation, JobId, Moment, ReplicaId, SegmentId, TaskId};

use crate::state::ids::ObjectSlot;

/// A due check. Its subject may have changed or gone meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::state) enum Timer {
    /// A client may have missed its heartbeats: id and registration.
    Client(ClientId, u64),
    /// A soft pin may have expired: object, version.
    SoftPin(ObjectSlot, u64),
    /// The grace of a segment is over.
    Unmount(SegmentId, Incarnation),
    /// The quarantine of a segment is over.
    QuarantineEnd(SegmentId, Incarnation),
    /// A task may have waited or run for too long: id and phase.
    Task(TaskId, u64),
    /// The bytes of a promotion may still be missing: the replica.
    Promotion(ReplicaId),
    /// A drain job continues.
    Drain(JobId),
    /// A segment from before the restart may still be unclaimed.
    Unclaimed(SegmentId, Incarnation),
    /// A disk may have been away for too long.
    DiskAway(SegmentId),
}

/// Timers in the order in which they are due. A subject has one timer at a time.
#[derive(Debug, Default)]
pub(in crate::state) struct Timers(BinaryHeap<Reverse<(Moment, Timer)>>);

impl Timers {
    pub(in crate::state) fn push(&mut self, at: Moment, timer: Timer) {
        self.0.push(Reverse((at, timer)));
    }

    /// Takes out a timer that is due.
    pub(in crate::state) fn pop_due(&mut self, now: Moment) -> Option<Timer> {
        let &Reverse((at, timer)) = self.0.peek()?;
        if !at.has_passed(now) {
            return None;
        }
        self.0.pop();
        Some(timer)
    }

    /// Returns when the next timer is due.
    pub(in crate::state) fn next(&self) -> Option<Moment> {
        self.0.peek().map(|Reverse((at, _))| *at)
    }
}
