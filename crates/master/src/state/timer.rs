//! What is due when, apart from what is ordered by itself (puts under way, resting memory).

use crate::state::ids::ObjectSlot;
use std::{cmp::Reverse, collections::BinaryHeap};

use mooncake_base::{ClientId, Incarnation, JobId, Moment, SegmentId, TaskId};

/// Something to look at. What it is about may have changed or gone meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    /// A client may not have been heard of for too long: id, and which registration of it.
    Client(ClientId, u64),
    /// A soft pin may have run out: object, version.
    SoftPin(ObjectSlot, u64),
    /// The grace of a segment is over.
    Unmount(SegmentId, Incarnation),
    /// Memory that came back into the pool is quiet.
    QuarantineEnd(SegmentId, Incarnation),
    /// A task may have waited or run for too long: which, and which phase of it.
    Task(TaskId, u64),
    /// A drain job looks for more to move.
    Drain(JobId),
    /// A segment of before the restart was not announced.
    Unclaimed(SegmentId, Incarnation),
}

/// Timers in the order in which they are due. One thing has one timer at a time.
#[derive(Debug, Default)]
pub(super) struct Timers(BinaryHeap<Reverse<(Moment, Timer)>>);

impl Timers {
    pub(super) fn push(&mut self, at: Moment, timer: Timer) {
        self.0.push(Reverse((at, timer)));
    }

    /// Takes out one that is due.
    pub(super) fn pop_due(&mut self, now: Moment) -> Option<Timer> {
        let &Reverse((at, timer)) = self.0.peek()?;
        if !at.has_passed(now) {
            return None;
        }
        self.0.pop();
        Some(timer)
    }

    /// When the next is due.
    pub(super) fn next(&self) -> Option<Moment> {
        self.0.peek().map(|Reverse((at, _))| *at)
    }
}
