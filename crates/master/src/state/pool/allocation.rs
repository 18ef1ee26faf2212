//! Allocation of replicas from free memory, and where replicas lie.

use mooncake_base::ReplicaId;
use smallvec::SmallVec;

use crate::state::{
    ids::SegmentSlot,
    pool::{
        Pool,
        placement::PlacementRequest,
        request::{AllocRequest, SegmentFilter},
    },
    replica::{Replica, Replicas},
};

impl Pool {
    /// Allocates replicas from free memory. Returns the number of segments that it tried.
    pub(in crate::state) fn try_allocate(
        &mut self,
        request: &AllocRequest<'_>,
        copies: usize,
        replicas: &mut Replicas,
    ) -> usize {
        // A full pool is not looked through for each put.
        if !self.segments.may_have_free(request.length) {
            return 0;
        }
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.clear();
        self.preferred_order(request, &mut candidates);
        let mut tried = self.try_segments(&candidates, request, copies, replicas);
        // The other segments, perhaps thousands, are tried after the preferred ones.
        if replicas.len() < copies {
            candidates.clear();
            candidates.extend(self.segments.open());
            let is_all = replicas.is_empty() && matches!(request.filter, SegmentFilter::All);
            tried += self.try_segments(&candidates, request, copies, replicas);
            if is_all && replicas.is_empty() {
                self.segments.record_full(request.length);
            }
        }
        self.candidates = candidates;
        tried
    }

    /// Lists the segments to try first, in order.
    pub(in crate::state) fn preferred_order(
        &mut self,
        request: &AllocRequest<'_>,
        candidates: &mut Vec<SegmentSlot>,
    ) {
        for name in &request.options.preferred_segments {
            candidates.extend(self.segments.named(name));
        }
        if request.options.is_same_node_preferred && !request.host.is_empty() {
            candidates.extend(self.segments.open_on(request.host));
        }
        let placement = PlacementRequest { host: request.host, replicas: request.replicas };
        self.placement.order(&self.segments, &placement, candidates);
    }

    fn try_segments(
        &mut self,
        slots: &[SegmentSlot],
        request: &AllocRequest<'_>,
        copies: usize,
        replicas: &mut Replicas,
    ) -> usize {
        let mut tried = 0;
        for &slot in slots.iter().filter(|&&slot| request.filter.admits(slot)) {
            if replicas.len() == copies {
                break;
            }
            tried += 1;
            self.try_segment(slot, request.length, replicas);
        }
        tried
    }

    fn try_segment(&mut self, slot: SegmentSlot, length: u64, replicas: &mut Replicas) {
        let segment = self.segments.at(slot);
        let is_taken = replicas.iter().any(|replica| replica.segment == slot);
        if is_taken || !segment.accepts_new() || segment.free() < length {
            return;
        }
        let allocated = self
            .take_prepared(slot, length)
            .or_else(|| self.segments.with_allocator(slot, |allocator| allocator.allocate(length)));
        if let Some(block) = allocated {
            replicas.push(Replica { segment: slot, block, ordinal: replicas.len() as u32 });
        }
    }

    /// Returns the locations of replicas.
    pub(in crate::state) fn places<'a>(
        &self,
        version: u64,
        length: u64,
        replicas: impl IntoIterator<Item = &'a Replica>,
    ) -> SmallVec<[Place; 1]> {
        let place = |replica: &Replica| Place {
            segment: replica.segment,
            offset: self.segments.at(replica.segment).allocator.offset(replica.block),
            length,
            replica: replica.id(version),
        };
        replicas.into_iter().map(place).collect()
    }

    /// Returns those of the replicas that readers may be sent to.
    pub(in crate::state) fn readable_copies<'a>(
        &'a self,
        replicas: &'a Replicas,
    ) -> impl Iterator<Item = &'a Replica> {
        replicas.iter().filter(|copy| self.segments.at(copy.segment).is_readable())
    }
}

/// Location of one replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// The segment; call [`State::segment`](crate::state::State::segment) before the state changes.
    pub segment: SegmentSlot,
    /// Offset from the base of the segment.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// Id of the replica.
    pub replica: ReplicaId,
}
