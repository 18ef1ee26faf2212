//! A connected queue pair with the requests that are in flight on it.
//!
//! A connection is reliable and ordered: requests complete in the order in which they were posted, and the
//! completion of one tells that all before it succeeded. Therefore only the last request of a posting is
//! signaled, and what is in flight is a queue of *runs*, one per posting.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use mooncake_base::Moment;
use mooncake_base::sync::Mutex;
use mooncake_verbs::{ConnectedQueuePair, Request, Status};

use crate::{
    load::Load,
    nic::Nic,
    round::{Progress, Reason, Round},
    slices::Slice,
};

/// Bytes of a posting, if it has more than one slice: only its last request reports progress.
const RUN_BYTES_MAX: u64 = 8 << 20;

/// How long a peer may take to answer whether it is there. The devices give up sooner.
const PROBE_TIMEOUT: Duration = Duration::from_secs(20);

/// A connected queue pair with the requests that are in flight on it.
#[derive(Debug)]
pub(crate) struct SendQueue {
    number: u32,
    /// The place in the table of its device, which is part of the id of each request.
    slot: u32,
    /// Locked while a thread posts; None once the queue pair is destroyed.
    poster: Mutex<Option<Poster>>,
    /// Oldest first.
    in_flight: Mutex<VecDeque<Run>>,
    /// Places in the queue pair.
    free: AtomicU32,
    is_failed: AtomicBool,
    /// The queue was failed to end the requests of a transfer that ran out of time.
    is_interrupted: AtomicBool,
    load: Arc<Load>,
}

#[derive(Debug)]
struct Poster {
    queue_pair: ConnectedQueuePair,
    next_sequence: u32,
}

/// Neighbouring slices of a round that were posted together, or one request that asks whether the peer is
/// there.
#[derive(Debug)]
struct Run {
    round: Option<Arc<Round>>,
    /// Index of the slice whose request has the sequence number `next`.
    slice: u32,
    /// Sequence numbers of the requests without outcome.
    next: u32,
    end: u32,
    posted: Moment,
    /// Bytes that the connection had in flight after the posting.
    queued: u64,
}

/// The result of [`SendQueue::post`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Posted {
    /// The number of slices that were posted, or have failed.
    Slices(u32),
    /// The queue or its device has no place, or another thread is posting.
    Busy,
    /// The queue pair has failed.
    Failed,
}

impl SendQueue {
    pub(crate) fn new(queue_pair: ConnectedQueuePair, slot: u32, load: Arc<Load>) -> Self {
        let limits = queue_pair.limits();
        Self {
            number: queue_pair.number(),
            slot,
            free: AtomicU32::new(limits.requests),
            poster: Mutex::new(Some(Poster { queue_pair, next_sequence: 0 })),
            in_flight: Mutex::default(),
            is_failed: AtomicBool::new(false),
            is_interrupted: AtomicBool::new(false),
            load,
        }
    }

    /// Posts slices of a round, from an index on, as many as fit into one posting.
    pub(crate) fn post(&self, nic: &Nic, remote: usize, round: &Arc<Round>, from: u32) -> Posted {
        if self.is_failed() {
            return Posted::Failed;
        }
        let Some(mut guard) = self.poster.try_lock() else { return Posted::Busy };
        let Some(poster) = guard.as_mut() else { return Posted::Failed };
        let batch = poster.queue_pair.limits().batch;
        // Only posters take places, one at a time.
        let most = batch.min(self.free.load(Ordering::Acquire));
        let count = run_length(&round.slices[from as usize..], most);
        let count = if count == 0 { 0 } else { nic.take_places(count) };
        if count == 0 {
            return Posted::Busy;
        }
        let slices = &round.slices[from as usize..][..count as usize];
        let bytes: u64 = slices.iter().map(|slice| u64::from(slice.length)).sum();
        let first = poster.next_sequence;
        let end = first.wrapping_add(count);
        poster.next_sequence = end;
        self.free.fetch_sub(count, Ordering::AcqRel);
        round.progress.begin(count);
        let now = nic.now();
        let queued = self.load.add(bytes, now);
        // Before the device can complete a request.
        self.in_flight.lock().push_back(Run {
            round: Some(Arc::clone(round)),
            slice: from,
            next: first,
            end,
            posted: now,
            queued,
        });
        let mut posting = poster.queue_pair.post();
        for (sequence, slice) in (0..count).map(|index| first.wrapping_add(index)).zip(slices) {
            let ranges = (round.local.range(slice, nic.index()), round.remote.range(slice, remote));
            let (Some(local), Some(remote)) = ranges else { break };
            posting.push(&Request {
                id: u64::from(self.slot) << 32 | u64::from(sequence),
                operation: round.operation,
                local,
                remote,
                is_signaled: sequence.wrapping_add(1) == end,
            });
        }
        let is_whole = posting.len() == count as usize;
        if !is_whole {
            posting.signal_last();
        }
        // SAFETY: the caller of `PeerLink::transfer` vouches for the local ranges until that call returns,
        // which waits for every run of its rounds. The round keeps the registrations.
        let submitted = unsafe { posting.submit() };
        match submitted {
            Ok(_) if is_whole => {}
            Ok(posted) => self.drop_unposted(nic, first.wrapping_add(posted as u32), end),
            Err(error) => {
                tracing::debug!(device = nic.name(), %error, "posting failed");
                self.drop_unposted(nic, first.wrapping_add(error.posted as u32), end);
                self.is_failed.store(true, Ordering::Release);
                // The requests before are flushed.
                let _ = poster.queue_pair.fail();
            }
        }
        Posted::Slices(count)
    }

    /// Ends the requests of the newest run from a sequence number on, which the device did not take.
    fn drop_unposted(&self, nic: &Nic, from: u32, end: u32) {
        let mut in_flight = self.in_flight.lock();
        let Some(run) = in_flight.back_mut() else { return };
        let first_slice = run.slice.wrapping_add(from.wrapping_sub(run.next));
        run.end = from;
        let round = run.round.clone();
        if run.next == run.end {
            in_flight.pop_back();
        }
        drop(in_flight);
        let failed = end.wrapping_sub(from);
        self.end(nic, round.as_deref(), first_slice, 0, failed, Reason::NotPosted, nic.now());
    }

    /// Records the completion of a request.
    pub(crate) fn complete(&self, nic: &Nic, sequence: u32, status: Status) {
        let now = nic.now();
        let mut in_flight = self.in_flight.lock();
        loop {
            let Some(run) = in_flight.front_mut() else { return };
            let ahead = sequence.wrapping_sub(run.next);
            let length = run.end.wrapping_sub(run.next);
            // The request is of a later run, so that the whole run has succeeded.
            let is_later = ahead >= length;
            if is_later && ahead > u32::MAX / 2 {
                return; // an old completion
            }
            let is_failed = !is_later && status != Status::Success;
            let succeeded = if is_later { length } else { ahead + u32::from(!is_failed) };
            let count = succeeded + u32::from(is_failed);
            let (round, slice) = (run.round.clone(), run.slice);
            run.next = run.next.wrapping_add(count);
            run.slice += count;
            if run.next == run.end {
                if !is_failed && run.queued > 0 {
                    self.load.measure(run.queued, now.since(run.posted), now);
                }
                in_flight.pop_front();
            }
            if is_failed {
                self.is_failed.store(true, Ordering::Release);
            }
            let (failed, reason) = (u32::from(is_failed), self.reason(Reason::Status(status)));
            self.end(nic, round.as_deref(), slice, succeeded, failed, reason, now);
            if !is_later {
                return;
            }
        }
    }

    /// Gives the places of slices back, counts them, and tells their round: first those that succeeded,
    /// then those that failed.
    fn end(
        &self,
        nic: &Nic,
        round: Option<&Round>,
        slice: u32,
        succeeded: u32,
        failed: u32,
        reason: Reason,
        now: Moment,
    ) {
        let Some(round) = round else {
            self.load.record_progress(now);
            self.free.fetch_add(succeeded + failed, Ordering::AcqRel);
            nic.return_places(succeeded + failed);
            return;
        };
        let bytes = |from: u32, count: u32| -> u64 {
            let slices = &round.slices[from as usize..][..count as usize];
            slices.iter().map(|slice| u64::from(slice.length)).sum()
        };
        let moved = bytes(slice, succeeded);
        let end = slice + succeeded + failed;
        self.load.remove(moved + bytes(slice + succeeded, failed), now);
        self.free.fetch_add(succeeded + failed, Ordering::AcqRel);
        nic.return_places(succeeded + failed);
        if succeeded > 0 {
            self.load.record_moved();
            nic.counters().count_moved(round.operation, succeeded, moved);
        }
        if failed > 0 {
            nic.counters().count_failed(reason, failed);
        }
        round.end(succeeded, slice + succeeded..end, reason);
    }

    /// Fails the queue pair: all that is in flight completes with a failure soon.
    pub(crate) fn fail(&self) {
        self.is_failed.store(true, Ordering::Release);
        if let Some(poster) = &*self.poster.lock()
            && let Err(error) = poster.queue_pair.fail()
        {
            tracing::debug!(queue_pair = self.number, %error, "a queue pair cannot be failed");
        }
    }

    /// Returns why a request failed: if the queue was failed on purpose, that is no fault of the path.
    fn reason(&self, reason: Reason) -> Reason {
        if self.is_interrupted() { Reason::Interrupted } else { reason }
    }

    /// Returns whether requests of a transfer are in flight.
    pub(crate) fn carries(&self, progress: &Arc<Progress>) -> bool {
        let is_of = |run: &Run| {
            run.round.as_ref().is_some_and(|round| Arc::ptr_eq(&round.progress, progress))
        };
        self.in_flight.lock().iter().any(is_of)
    }

    /// Fails the queue pair, to end the requests of a transfer that ran out of time.
    pub(crate) fn interrupt(&self) {
        self.is_interrupted.store(true, Ordering::Release);
        self.fail();
    }

    pub(crate) fn is_interrupted(&self) -> bool {
        self.is_interrupted.load(Ordering::Acquire)
    }

    /// Asks the peer whether it is there, by a write of no bytes, if nothing is in flight. The queue fails
    /// if there is no answer.
    pub(crate) fn probe(&self, nic: &Nic) {
        let now = nic.now();
        if let Some(oldest) = self.in_flight.lock().front() {
            let is_late = oldest.round.is_none() && now.since(oldest.posted) >= PROBE_TIMEOUT;
            if is_late {
                self.is_failed.store(true, Ordering::Release);
            }
            return;
        }
        let Some(mut guard) = self.poster.try_lock() else { return };
        let Some(poster) = guard.as_mut() else { return };
        if self.is_failed() || self.free.load(Ordering::Acquire) == 0 || nic.take_places(1) == 0 {
            return;
        }
        let next = poster.next_sequence;
        let end = next.wrapping_add(1);
        poster.next_sequence = end;
        self.free.fetch_sub(1, Ordering::AcqRel);
        let run = Run { round: None, slice: 0, next, end, posted: now, queued: 0 };
        self.in_flight.lock().push_back(run);
        let mut posting = poster.queue_pair.post();
        posting.push_probe(u64::from(self.slot) << 32 | u64::from(next));
        // SAFETY: the request names no memory.
        if let Err(error) = unsafe { posting.submit() } {
            tracing::debug!(device = nic.name(), %error, "posting failed");
            self.drop_unposted(nic, next, end);
            self.is_failed.store(true, Ordering::Release);
        }
    }

    /// Destroys the queue pair and ends what is in flight, for a device that does not flush.
    pub(crate) fn destroy(&self, nic: &Nic) {
        self.is_failed.store(true, Ordering::Release);
        // From here on the device does not touch the memory.
        drop(self.poster.lock().take());
        let runs = std::mem::take(&mut *self.in_flight.lock());
        for run in runs {
            let (failed, reason) = (run.end.wrapping_sub(run.next), self.reason(Reason::Abandoned));
            self.end(nic, run.round.as_deref(), run.slice, 0, failed, reason, nic.now());
        }
    }

    pub(crate) fn is_failed(&self) -> bool {
        self.is_failed.load(Ordering::Acquire)
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    pub(crate) fn slot(&self) -> u32 {
        self.slot
    }
}

/// Returns how many slices are posted together: at most so many, and not too many bytes.
fn run_length(slices: &[Slice], most: u32) -> u32 {
    let mut bytes = 0;
    let fits = |slice: &&Slice| {
        let is_first = bytes == 0;
        bytes += u64::from(slice.length);
        is_first || bytes <= RUN_BYTES_MAX
    };
    let count = slices.iter().take(most as usize).take_while(fits).count();
    u32::try_from(count).unwrap_or(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn posting_of_long_slices_reports_progress_often() {
        let slice = |length| Slice {
            entry: 0,
            length,
            local: 0,
            remote: 0,
            local_range: 0,
            remote_range: 0,
            tries: 1,
        };
        assert_eq!(run_length(&[slice(64 << 10); 100], 32), 32, "2 MiB");
        assert_eq!(run_length(&[slice(1 << 30); 100], 32), 1);
        assert_eq!(run_length(&[slice(3 << 20); 100], 32), 2);
        assert_eq!(run_length(&[slice(1); 3], 32), 3);
        assert_eq!(run_length(&[slice(1); 3], 0), 0);
    }
}
