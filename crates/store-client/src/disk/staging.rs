//! Registered memory that records are loaded into, so that engines can read them.

use std::{collections::BTreeMap, ptr::NonNull, sync::Arc};

use mooncake_base::{
    Clock, Moment, Result, SegmentId, SystemClock,
    sync::{Condvar, Mutex},
};
use mooncake_os::call_limit;
use mooncake_transfer_engine::{Engine, SharedMemory};

use crate::metrics::Metrics;

/// The alignment of every part.
const ALIGNMENT: u64 = 4096;

/// The memory of one client, of a fixed size. It is taken from the system by the first load.
pub(crate) struct Staging {
    engine: Engine,
    bytes: u64,
    state: Mutex<StagingState>,
    freed: Condvar,
    metrics: Arc<Metrics>,
}

#[derive(Debug, Default)]
struct StagingState {
    memory: Option<StagingMemory>,
    free: FreeRanges,
}

/// The memory, and the id by which readers recognize its engine.
#[derive(Debug, Clone)]
struct StagingMemory {
    segment: SegmentId,
    memory: Arc<SharedMemory>,
}

/// The free ranges: where each begins, and its length. No two of them touch.
#[derive(Debug, Default, PartialEq, Eq)]
struct FreeRanges(BTreeMap<u64, u64>);

/// A part of the memory, until it is dropped.
#[derive(Debug)]
pub(crate) struct StagingRange {
    staging: Arc<Staging>,
    of: StagingMemory,
    begin: u64,
    length: u64,
}

impl Staging {
    pub(crate) fn new(engine: Engine, bytes: u64, metrics: &Arc<Metrics>) -> Self {
        let bytes = bytes / ALIGNMENT * ALIGNMENT;
        let metrics = Arc::clone(metrics);
        Self { engine, bytes, state: Mutex::default(), freed: Condvar::new(), metrics }
    }

    /// Returns how many bytes one load may take, unless its first range is longer: other readers find
    /// room beside it.
    pub(crate) const fn share(&self) -> u64 {
        self.bytes / 4
    }

    /// Takes a part of the memory; `None` if none is long enough until the given time.
    ///
    /// # Errors
    /// The system has no memory, or the engine is closed.
    pub(crate) fn reserve(
        self: &Arc<Self>,
        length: u64,
        until: Moment,
    ) -> Result<Option<StagingRange>> {
        let Some(length) = length.max(1).checked_next_multiple_of(ALIGNMENT) else {
            return Ok(None);
        };
        if length > self.bytes {
            return Ok(None);
        }
        let mut state = self.state.lock();
        let of = match &state.memory {
            Some(of) => of.clone(),
            None => {
                // The id first, so that no peer sees the memory without it.
                let segment = self.engine.new_segment_id();
                let memory = Arc::new(self.engine.allocate(self.bytes)?);
                state.free = FreeRanges::new(self.bytes);
                state.memory.insert(StagingMemory { segment, memory }).clone()
            }
        };
        loop {
            if let Some(begin) = state.free.take(length) {
                drop(state);
                self.metrics.disk.staged_bytes.add(length);
                let staging = Arc::clone(self);
                return Ok(Some(StagingRange { staging, of, begin, length }));
            }
            let left = call_limit::next_wait(until);
            if left.is_zero() || until.has_passed(SystemClock.now()) {
                self.metrics.disk.staging_full.increment();
                return Ok(None);
            }
            self.freed.wait_for(&mut state, left);
        }
    }
}

impl std::fmt::Debug for Staging {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Staging").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl StagingRange {
    /// Returns the address of a byte of the part.
    pub(crate) fn address(&self, at: u64) -> u64 {
        self.of.memory.base() + self.begin + at
    }

    /// Returns the id by which readers recognize the engine that has the memory.
    pub(crate) const fn segment(&self) -> SegmentId {
        self.of.segment
    }

    /// Returns the address and length of a range of the part, if it lies inside.
    pub(super) fn range(&self, at: u64, length: u64) -> Option<(NonNull<u8>, usize)> {
        if at.checked_add(length)? > self.length {
            return None;
        }
        let address = NonNull::new(self.address(at) as *mut u8)?;
        Some((address, usize::try_from(length).ok()?))
    }
}

impl Drop for StagingRange {
    fn drop(&mut self) {
        self.staging.state.lock().free.give_back(self.begin, self.length);
        self.staging.metrics.disk.staged_bytes.subtract(self.length);
        self.staging.freed.notify_all();
    }
}

impl FreeRanges {
    fn new(bytes: u64) -> Self {
        Self(BTreeMap::from([(0, bytes)]))
    }

    /// Takes a range of the length, from the first one that is long enough.
    fn take(&mut self, length: u64) -> Option<u64> {
        let (begin, free) =
            self.0.iter().map(|(&begin, &free)| (begin, free)).find(|&(_, free)| free >= length)?;
        self.0.remove(&begin);
        if free > length {
            self.0.insert(begin + length, free - length);
        }
        Some(begin)
    }

    /// Gives a range back.
    fn give_back(&mut self, mut begin: u64, mut length: u64) {
        if let Some(after) = self.0.remove(&(begin + length)) {
            length += after;
        }
        if let Some((&before, &free)) = self.0.range(..begin).next_back()
            && before + free == begin
        {
            (begin, length) = (before, free + length);
        }
        self.0.insert(begin, length);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn range_that_is_given_back_joins_its_neighbours() {
        let mut free = FreeRanges::new(100);
        let taken = [10, 20, 30].map(|length| (free.take(length).unwrap(), length));
        assert_eq!(taken, [(0, 10), (10, 20), (30, 30)]);
        assert_eq!(free.take(41), None);
        assert_eq!(free.take(40), Some(60));
        for (begin, length) in [taken[0], taken[2], (60, 40), taken[1]] {
            free.give_back(begin, length);
        }
        assert_eq!(free, FreeRanges::new(100));
    }

    proptest! {
        #[test]
        fn ranges_never_overlap_and_all_come_back(steps in prop::collection::vec((any::<bool>(), 1_u64..40), 0..60)) {
            let mut free = FreeRanges::new(128);
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (takes, length) in steps {
                if takes {
                    if let Some(begin) = free.take(length) {
                        prop_assert!(begin + length <= 128);
                        prop_assert!(held.iter().all(|&(other, of)| begin + length <= other || other + of <= begin));
                        held.push((begin, length));
                    }
                } else if !held.is_empty() {
                    let (begin, length) = held.swap_remove(length as usize % held.len());
                    free.give_back(begin, length);
                }
            }
            for (begin, length) in held {
                free.give_back(begin, length);
            }
            prop_assert_eq!(free, FreeRanges::new(128));
        }
    }
}
