//! Memory that eviction cannot free, by the reason that holds it: unfinished writes, hard pins, fences,
//! searches for memory, and the log.
//!
//! Only this file and its neighbours in the pool change these bytes, so that they agree with the
//! blocks that they count.

use mooncake_base::Moment;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::state::{
    ids::{BlockId, ObjectSlot, SegmentSlot},
    lease::Timestamp,
    pool::{Pool, quarantine::QuarantinedBlock},
    replica::Replica,
};

/// Bytes of a segment that eviction cannot free.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::state) struct ReservedBytes {
    /// Freed bytes that wait for the end of a fence or of a late write.
    pub(in crate::state) fenced: u64,
    /// Bytes of unfinished puts and of attempts of tasks.
    pub(in crate::state) writing: u64,
    /// Bytes of objects that are never evicted.
    pub(in crate::state) hard_pinned: u64,
    /// Freed bytes that wait for the log, and bytes that searches for memory hold.
    pub(in crate::state) withheld: u64,
    /// Free bytes that are prepared for puts.
    pub(in crate::state) prepared: u64,
}

impl ReservedBytes {
    pub(in crate::state) fn sum(self) -> u64 {
        self.fenced + self.writing + self.hard_pinned + self.withheld + self.prepared
    }
}

/// The reason for which memory without an object stays allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum WaitReason {
    Fence,
    Log,
    Put,
}

impl Pool {
    /// Begins a write of replicas: their blocks get the object as their owner, and late bytes may
    /// arrive until then.
    pub(in crate::state) fn begin_write(
        &mut self,
        object: Option<ObjectSlot>,
        replicas: &[Replica],
        until: Moment,
    ) {
        for replica in replicas {
            let segment = self.segments.at_mut(replica.segment);
            if let Some(object) = object {
                segment.allocator.set_owner(replica.block, object.number());
            }
            segment.reserved.writing += segment.allocator.size(replica.block);
            segment.extend_busy(until);
        }
    }

    /// Records that bytes of an unfinished write may arrive until then.
    pub(in crate::state) fn extend_write(&mut self, replicas: &[Replica], until: Moment) {
        for replica in replicas {
            self.segments.at_mut(replica.segment).extend_busy(until);
        }
    }

    /// Ends the write of a replica.
    pub(in crate::state) fn end_write(&mut self, replica: &Replica) {
        let segment = self.segments.at_mut(replica.segment);
        segment.reserved.writing -= segment.allocator.size(replica.block);
    }

    /// Counts the replica of an object that is never evicted.
    pub(in crate::state) fn add_hard_pin(&mut self, replica: &Replica) {
        let segment = self.segments.at_mut(replica.segment);
        segment.reserved.hard_pinned += segment.allocator.size(replica.block);
    }

    /// Uncounts the replica of an object that was never evicted.
    pub(in crate::state) fn remove_hard_pin(&mut self, replica: &Replica) {
        let segment = self.segments.at_mut(replica.segment);
        // A segment that left has no bytes any more.
        if segment.is_mounted() {
            segment.reserved.hard_pinned -= segment.allocator.size(replica.block);
        }
    }

    /// Quarantines a block until the given time, or until the readers of `version` release their
    /// fence; 0: there are none. `position` is the log position behind the record of its release.
    pub(in crate::state) fn quarantine_block(
        &mut self,
        until: Timestamp,
        version: u64,
        segment: SegmentSlot,
        block: BlockId,
        position: u64,
    ) {
        let found = self.segments.at_mut(segment);
        debug_assert!(!found.allocator.is_block_free(block), "quarantined memory is allocated");
        found.reserved.fenced += found.allocator.size(block);
        self.quarantine.push(until, version, segment, block, position);
    }

    /// Frees a block whose quarantine is over. Returns whether there was one.
    pub(in crate::state) fn free_due_quarantine(&mut self, now: Moment) -> bool {
        let Some(freed) = self.quarantine.pop_due(now) else { return false };
        self.end_quarantine(freed);
        true
    }

    /// Returns when the next quarantine ends.
    pub(in crate::state) fn next_quarantine_end(&self) -> Option<Moment> {
        self.quarantine.next()
    }

    /// Returns the quarantined blocks and the ends of their quarantine.
    pub(in crate::state) fn quarantined(
        &self,
    ) -> impl Iterator<Item = (Timestamp, SegmentSlot, BlockId)> {
        self.quarantine.blocks()
    }

    /// Frees a block that was taken out of the quarantine.
    pub(in crate::state) fn end_quarantine(&mut self, freed: QuarantinedBlock) {
        let QuarantinedBlock { segment, block, position } = freed;
        let found = self.segments.at_mut(segment);
        found.reserved.fenced -= found.allocator.size(block);
        self.free_block(segment, block, position);
    }

    /// Returns whether the memory that waits or is prepared lies in mounted segments, each block for one
    /// reason, and adds up to the bytes that are counted. Takes time in the number of these blocks; to be
    /// asserted where that matters little.
    pub(in crate::state) fn is_counted(&self) -> bool {
        let fenced = self.quarantined().map(|(_, slot, block)| (slot, block, WaitReason::Fence));
        let unsynced = self.unsynced.blocks().map(|(slot, block)| (slot, block, WaitReason::Log));
        let prepared = self.prepared().map(|(slot, block)| (slot, block, WaitReason::Put));
        let mut blocks = FxHashSet::default();
        let mut sums: FxHashMap<(SegmentSlot, WaitReason), u64> = FxHashMap::default();
        for (slot, block, reason) in fenced.chain(unsynced).chain(prepared) {
            let segment = self.segments.at(slot);
            if !segment.is_mounted() || !blocks.insert((slot, block)) {
                return false;
            }
            *sums.entry((slot, reason)).or_default() += segment.allocator.size(block);
        }
        self.segments.mounted().all(|(slot, segment)| {
            let sum = |reason| sums.get(&(slot, reason)).copied().unwrap_or_default();
            segment.reserved.fenced == sum(WaitReason::Fence)
                // Searches hold some, too.
                && segment.reserved.withheld >= sum(WaitReason::Log)
                && segment.reserved.prepared == sum(WaitReason::Put)
        })
    }

    /// Counts bytes that a search for memory holds between two calls.
    pub(in crate::state) fn withhold(&mut self, segment: SegmentSlot, bytes: u64) {
        self.segments.at_mut(segment).reserved.withheld += bytes;
    }

    /// Uncounts bytes that a search for memory holds.
    pub(in crate::state) fn end_withholding(&mut self, segment: SegmentSlot, bytes: u64) {
        self.segments.at_mut(segment).reserved.withheld -= bytes;
    }
}
