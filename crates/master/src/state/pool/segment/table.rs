//! The table of segments: slots, and indices by id, name, client and host.

use std::collections::{BTreeMap, BTreeSet};

use mooncake_base::{ClientId, Incarnation, Moment, SegmentId};
use rustc_hash::FxHashMap;

use crate::state::{
    ids::{BlockId, SegmentSlot, Slot},
    pool::{
        allocator::Allocator,
        reserved::ReservedBytes,
        segment::{Segment, SegmentNumber, SegmentSet, SegmentStatus},
    },
};

/// Segments that left are looked through for outdated ones when there are more than this, and twice
/// as many as were kept the last time.
const GONE_KEPT: usize = 64;

/// All segments, each in a slot that stays taken until no replica refers to it.
#[derive(Debug, Default)]
pub struct Segments {
    slots: Vec<Option<Segment>>,
    free_slots: Vec<SegmentSlot>,
    by_id: FxHashMap<SegmentId, SegmentSlot>,
    by_name: FxHashMap<Box<str>, Vec<SegmentSlot>>,
    by_endpoint: FxHashMap<Box<str>, Vec<SegmentSlot>>,
    /// Mounted segments of each client by their base; they do not overlap.
    by_client: FxHashMap<ClientId, BTreeSet<(u64, SegmentSlot)>>,
    /// Segments that accept new objects, in no order; each knows its index.
    open: Vec<SegmentSlot>,
    open_by_host: BTreeMap<Box<str>, Vec<SegmentSlot>>,
    /// Bytes of all mounted segments.
    pub(in crate::state) mounted_bytes: u64,
    /// No free range in a segment that accepts new objects is longer than this.
    free_range_max: u64,
    /// With evictions no segment that accepts new objects could offer this many bytes, as a look at all
    /// of them has shown. `None` after each change of a segment.
    unreclaimable: Option<u64>,
    /// Allocated bytes in all mounted segments.
    pub(in crate::state) used_bytes: u64,
    next_number: u32,
    gone: FxHashMap<SegmentId, GoneSegment>,
    /// Number of `gone` after outdated ones were removed.
    gone_kept: usize,
}

/// A segment that left the pool.
#[derive(Debug, Clone, Copy)]
pub(in crate::state) struct GoneSegment {
    /// Latest incarnation.
    incarnation: Incarnation,
    /// When the last grant in its memory ends.
    pub(in crate::state) busy_until: Moment,
    /// Log position behind the record that it left.
    pub(in crate::state) position: u64,
}

impl Segments {
    /// Returns the segments that accept new objects.
    pub fn open(&self) -> &[SegmentSlot] {
        &self.open
    }

    /// Returns the segments of a host that accept new objects.
    pub fn open_on(&self, host: &str) -> &[SegmentSlot] {
        self.open_by_host.get(host).map_or(&[], Vec::as_slice)
    }

    /// Returns the segments that accept new objects in the order of their hosts, from this host on
    /// around the circle.
    pub(in crate::state) fn open_from<'a>(
        &'a self,
        host: &'a str,
    ) -> impl Iterator<Item = SegmentSlot> + 'a {
        use std::ops::Bound::{Excluded, Included, Unbounded};
        let from = self.open_by_host.range::<str, _>((Included(host), Unbounded));
        let before = self.open_by_host.range::<str, _>((Unbounded, Excluded(host)));
        from.chain(before).flat_map(|(_, slots)| slots).copied()
    }

    /// Returns the number of mounted segments of a client.
    pub(in crate::state) fn count_of(&self, client: ClientId) -> usize {
        self.by_client.get(&client).map_or(0, BTreeSet::len)
    }

    /// Returns the mounted segments of a client, by address.
    pub(in crate::state) fn of_client(&self, client: ClientId) -> Vec<SegmentSlot> {
        let slots = self.by_client.get(&client).into_iter().flatten();
        slots.map(|&(_, slot)| slot).collect()
    }

    /// Returns the mounted segments of a client that overlap a range of its addresses.
    pub(in crate::state) fn overlapping(
        &self,
        client: ClientId,
        base: u64,
        end: u64,
    ) -> Vec<SegmentSlot> {
        let Some(ranges) = self.by_client.get(&client) else { return Vec::new() };
        // From the last one that starts below the end downwards: no segment overlaps another, so
        // that none further down reaches further up.
        let below = ranges.range(..(end, SegmentSlot::new(0))).rev().map(|&(_, slot)| slot);
        let reaches = |slot: &SegmentSlot| {
            let spec = &self.at(*slot).spec;
            spec.base + spec.length > base
        };
        below.take_while(reaches).collect()
    }

    /// Calls `change` with the allocator of a segment.
    pub(in crate::state) fn with_allocator<R>(
        &mut self,
        slot: SegmentSlot,
        change: impl FnOnce(&mut Allocator) -> R,
    ) -> R {
        let allocator = &mut self.at_mut(slot).allocator;
        let before = allocator.used();
        let result = change(allocator);
        let after = allocator.used();
        self.used_bytes = self.used_bytes + after - before;
        result
    }

    /// Frees a block.
    pub(in crate::state) fn free(&mut self, slot: SegmentSlot, block: BlockId) {
        debug_assert!(self.at(slot).is_mounted(), "memory is freed in mounted segments");
        let range = self.with_allocator(slot, |allocator| allocator.free(block));
        self.free_range_max = self.free_range_max.max(range);
    }

    /// Returns whether a free range of that length is possible in a segment that accepts new
    /// objects.
    pub(in crate::state) fn may_have_free(&self, length: u64) -> bool {
        length <= self.free_range_max
    }

    /// Records that no segment that accepts new objects could allocate that length.
    pub(in crate::state) fn record_full(&mut self, length: u64) {
        self.free_range_max = self.free_range_max.min(length.saturating_sub(1));
    }

    /// Returns whether a segment that accepts new objects may offer this many bytes with evictions.
    pub(in crate::state) fn may_have_reclaimable(&self, bytes: u64) -> bool {
        self.unreclaimable.is_none_or(|too_many| bytes < too_many)
    }

    /// Records that no segment that accepts new objects could offer this many bytes.
    pub(in crate::state) fn record_unreclaimable(&mut self, bytes: u64) {
        self.unreclaimable = Some(self.unreclaimable.map_or(bytes, |known| known.min(bytes)));
    }

    /// Returns the number for the next segment.
    pub(in crate::state) fn next_number(&self) -> SegmentNumber {
        SegmentNumber(self.next_number)
    }

    /// Raises the number for the next segment.
    pub(in crate::state) fn set_next_number(&mut self, number: u32) {
        self.next_number = number;
    }

    /// Returns the segments of that name.
    pub(in crate::state) fn named(&self, name: &str) -> &[SegmentSlot] {
        self.by_name.get(name).map_or(&[], Vec::as_slice)
    }

    /// Returns the set of the segments at these endpoints, in time proportional to their number.
    pub(in crate::state) fn at_endpoints(&self, endpoints: &[String]) -> SegmentSet {
        let slots = endpoints.iter().filter_map(|endpoint| self.by_endpoint.get(endpoint.as_str()));
        let mut set = SegmentSet::default();
        slots.flatten().for_each(|&slot| set.insert(slot));
        set
    }

    pub(in crate::state) fn by_id(&self, id: SegmentId) -> Option<SegmentSlot> {
        self.by_id.get(&id).copied()
    }

    pub(in crate::state) fn at(&self, slot: SegmentSlot) -> &Segment {
        self.slots[slot.index()].as_ref().expect("a copy names only segments that are kept")
    }

    pub(in crate::state) fn at_mut(&mut self, slot: SegmentSlot) -> &mut Segment {
        self.unreclaimable = None;
        self.slots[slot.index()].as_mut().expect("a copy names only segments that are kept")
    }

    pub(in crate::state) fn get_mut(&mut self, slot: SegmentSlot) -> Option<&mut Segment> {
        self.unreclaimable = None;
        self.slots.get_mut(slot.index())?.as_mut()
    }

    /// Returns the earliest end of quarantine among the segments of at least this length.
    pub(in crate::state) fn quarantine_end(&self, length: u64) -> Option<Moment> {
        let quarantined = self.mounted().filter(|(_, segment)| segment.is_only_quarantined());
        let fitting = quarantined.filter(|(_, segment)| segment.allocator.length() >= length);
        fitting.filter_map(|(_, segment)| segment.quarantined_until).min()
    }

    /// Returns the bound of all slot numbers.
    #[cfg(test)]
    pub(in crate::state) fn slot_count(&self) -> usize {
        self.slots.len()
    }

    /// Returns the mounted segments without unclaimed ones.
    pub(in crate::state) fn claimed(&self) -> impl Iterator<Item = (SegmentSlot, &Segment)> {
        self.mounted().filter(|(_, segment)| segment.is_claimed())
    }

    /// Returns the mounted segments without unclaimed ones in so many slots from one on, and whether
    /// there are more slots.
    pub(in crate::state) fn claimed_in(
        &self,
        from: usize,
        slots: usize,
    ) -> (impl Iterator<Item = &Segment>, bool) {
        let rest = self.slots.get(from..).unwrap_or_default();
        let slice = &rest[..rest.len().min(slots)];
        (slice.iter().flatten().filter(|it| it.is_mounted() && it.is_claimed()), rest.len() > slots)
    }

    /// Returns the mounted segments.
    pub(in crate::state) fn mounted(&self) -> impl Iterator<Item = (SegmentSlot, &Segment)> {
        let numbered = self.slots.iter().enumerate();
        numbered
            .filter_map(|(slot, segment)| Some((SegmentSlot::from_index(slot), segment.as_ref()?)))
            .filter(|(_, segment)| segment.is_mounted())
    }

    /// Adds a segment and returns its slot.
    pub(in crate::state) fn insert(&mut self, segment: Segment) -> SegmentSlot {
        self.next_number = self.next_number.max(segment.number.0 + 1);
        let slot = match self.free_slots.pop() {
            Some(slot) => slot,
            None => {
                self.slots.push(None);
                SegmentSlot::from_index(self.slots.len() - 1)
            }
        };
        debug_assert!(!self.by_id.contains_key(&segment.spec.id), "a segment is mounted once");
        self.mounted_bytes += segment.spec.length;
        self.used_bytes += segment.allocator.used();
        self.by_client.entry(segment.client).or_default().insert((segment.spec.base, slot));
        self.by_id.insert(segment.spec.id, slot);
        self.by_name.entry(segment.spec.name.as_str().into()).or_default().push(slot);
        self.by_endpoint.entry(segment.spec.endpoint.as_str().into()).or_default().push(slot);
        self.slots[slot.index()] = Some(segment);
        self.refresh(slot);
        slot
    }

    /// Returns what is known of this memory from before it left the pool, if it may matter.
    pub(in crate::state) fn before(
        &mut self,
        now: Moment,
        id: SegmentId,
        incarnation: Incarnation,
        is_synced: impl Fn(u64) -> bool,
    ) -> Option<GoneSegment> {
        let is_outdated =
            |gone: &GoneSegment| gone.busy_until.has_passed(now) && is_synced(gone.position);
        if self.gone.len() > GONE_KEPT.max(2 * self.gone_kept) {
            self.gone.retain(|_, gone| !is_outdated(gone));
            self.gone_kept = self.gone.len();
        }
        let gone = self.gone.get(&id).filter(|gone| !is_outdated(gone))?;
        // An owner that returns to an earlier incarnation has the same quarantine.
        (incarnation <= gone.incarnation).then_some(*gone)
    }

    /// Removes the segment from the indices; the slot stays taken until
    /// [`free_slot`](Self::free_slot). `position` is the log position behind the record of this.
    pub(in crate::state) fn close(&mut self, slot: SegmentSlot, position: u64) {
        let segment = self.at_mut(slot);
        debug_assert!(segment.is_mounted(), "a segment leaves once");
        debug_assert!(segment.prepared.is_empty(), "prepared memory is freed before");
        segment.status = SegmentStatus::Unmounting;
        segment.reserved = ReservedBytes::default();
        let (id, name) = (segment.spec.id, segment.spec.name.clone());
        let endpoint = segment.spec.endpoint.clone();
        let (client, base, length) = (segment.client, segment.spec.base, segment.spec.length);
        let (incarnation, busy_until) = (segment.spec.incarnation, segment.busy_until);
        // The allocator is no longer needed, and may be large.
        let allocator = std::mem::replace(&mut segment.allocator, Allocator::new(0));
        self.mounted_bytes -= length;
        self.used_bytes -= allocator.used();
        let left = GoneSegment { incarnation, busy_until, position };
        let gone = self.gone.entry(id).or_insert(left);
        gone.incarnation = gone.incarnation.max(incarnation);
        gone.busy_until = gone.busy_until.max(busy_until);
        gone.position = position;
        self.by_id.remove(&id);
        for (index, text) in [(&mut self.by_name, name), (&mut self.by_endpoint, endpoint)] {
            if let Some(slots) = index.get_mut(text.as_str()) {
                slots.retain(|&other| other != slot);
                if slots.is_empty() {
                    index.remove(text.as_str());
                }
            }
        }
        if let Some(ranges) = self.by_client.get_mut(&client) {
            ranges.remove(&(base, slot));
            if ranges.is_empty() {
                self.by_client.remove(&client);
            }
        }
        self.refresh(slot);
    }

    /// Frees the slot of a segment that no replica refers to.
    pub(in crate::state) fn free_slot(&mut self, slot: SegmentSlot) {
        if let Some(left) = self.slots[slot.index()].take() {
            debug_assert!(!left.is_mounted(), "a mounted segment keeps its slot");
            self.free_slots.push(slot);
        }
    }

    /// Ends quarantines of segments that are over, if no segment accepts objects.
    pub(in crate::state) fn open_due(&mut self, now: Moment) {
        if !self.open.is_empty() {
            return;
        }
        for slot in SegmentSlot::range(0, self.slots.len() as u32) {
            let Some(segment) = self.get_mut(slot) else { continue };
            if segment.quarantined_until.is_some_and(|end| end.has_passed(now)) {
                segment.quarantined_until = None;
                self.refresh(slot);
            }
        }
    }

    /// Updates whether the segment accepts new objects. Call it after each change that may matter.
    pub(in crate::state) fn refresh(&mut self, slot: SegmentSlot) {
        let open = self.open.len();
        let segment = self.at_mut(slot);
        let (accepts, host) = (segment.accepts_new(), segment.host.clone());
        let free = segment.free();
        match (accepts, segment.open_index) {
            (true, None) => {
                debug_assert!(segment.is_claimed(), "an open segment is mounted and claimed");
                segment.open_index = Some(open);
                self.free_range_max = self.free_range_max.max(free);
                self.open.push(slot);
                self.open_by_host.entry(host).or_default().push(slot);
            }
            (false, Some(index)) => {
                segment.open_index = None;
                let removed = self.open.swap_remove(index);
                debug_assert_eq!(removed, slot, "an open segment knows its place");
                if let Some(&moved) = self.open.get(index) {
                    self.at_mut(moved).open_index = Some(index);
                }
                if let Some(slots) = self.open_by_host.get_mut(&host) {
                    slots.retain(|&other| other != slot);
                    if slots.is_empty() {
                        self.open_by_host.remove(&host);
                    }
                }
            }
            _ => {}
        }
    }
}
