//! Unfinished puts, by version, client and segment, and in the order in which their write windows began.

use std::collections::BTreeSet;

use mooncake_base::{ClientId, Moment, Version};

use crate::state::{
    calls::put::client_lists::ClientLists,
    catalog::{
        eviction::{IndexLinks, IndexList},
        object::NO_WRITE,
        split_map::SplitMap,
    },
    ids::{KeyHash, ObjectSlot, SegmentSlot, Slot, TenantIndex, WriteSlot},
    options::{RequestedPin, Terms},
    replica::Replicas,
};

/// A put that started and has not ended.
#[derive(Debug)]
pub(in crate::state) struct Write {
    /// Object of the put; `None` once the put is displaced and only its memory counts.
    pub(in crate::state) object: Option<ObjectSlot>,
    /// Hash of the key.
    pub(in crate::state) hash: KeyHash,
    /// Tenant that is charged.
    pub(in crate::state) tenant: TenantIndex,
    /// Next put of the same object, or [`NO_WRITE`].
    pub(in crate::state) next: WriteSlot,
    pub(in crate::state) version: u64,
    pub(in crate::state) client: ClientId,
    /// Request id of the client; 0: unknown.
    pub(in crate::state) request: u64,
    /// When the write window began: at the start of the put, or when it was renewed last.
    pub(in crate::state) window_began: Moment,
    pub(in crate::state) length: u64,
    pub(in crate::state) replicas: Replicas,
    pub(in crate::state) soft_pin: RequestedPin,
    pub(in crate::state) is_hard_pinned: bool,
    pub(in crate::state) is_replacing: bool,
    pub(in crate::state) data_type: u8,
    pub(in crate::state) group: Box<[u8]>,
    /// `None` for most puts.
    pub(in crate::state) terms: Option<Box<Terms>>,
}

/// All unfinished puts, including displaced ones until their memory is freed.
#[derive(Debug, Default)]
pub(in crate::state) struct Writes {
    slots: Vec<Option<Write>>,
    vacant: Vec<WriteSlot>,
    by_version: SplitMap<u64, WriteSlot>,
    by_client: ClientLists,
    links: IndexLinks<WriteSlot>,
    by_window: IndexList<WriteSlot>,
    /// Puts by the segment of their first replica, at the index of the segment.
    by_segment: Vec<IndexList<WriteSlot>>,
    segment_links: IndexLinks<WriteSlot>,
    /// Puts by the segments of their other replicas, which most do not have.
    by_other_segment: BTreeSet<(SegmentSlot, WriteSlot)>,
    /// Puts that had no replica left when they were added here.
    emptied: Vec<WriteSlot>,
}

impl Writes {
    /// Adds the put that started last.
    pub(in crate::state) fn insert(&mut self, write: Write) -> WriteSlot {
        let number = match self.vacant.pop() {
            Some(number) => number,
            None => {
                self.slots.push(None);
                WriteSlot::from_index(self.slots.len() - 1)
            }
        };
        debug_assert_eq!(self.find(Version(write.version)), None, "a version belongs to one put");
        self.by_version.insert_new(write.version, number);
        self.by_client.push(write.client, number);
        self.link_segments(&write.replicas, number);
        self.slots[number.index()] = Some(write);
        self.by_window.push_last(&mut self.links, number);
        number
    }

    /// Begins a new write window.
    pub(in crate::state) fn renew(&mut self, number: WriteSlot, now: Moment) {
        self.at_mut(number).window_began = now;
        self.by_window.remove(&mut self.links, number);
        self.by_window.push_last(&mut self.links, number);
    }

    pub(in crate::state) fn remove(&mut self, number: WriteSlot) -> Write {
        self.by_window.remove(&mut self.links, number);
        self.vacant.push(number);
        let write = self.slots[number.index()].take().expect("the caller has just found it");
        self.by_version.remove(&write.version);
        self.by_client.remove(write.client, number);
        self.unlink_segments(&write.replicas, number);
        write
    }

    /// Drops the replicas in a segment that left the pool. Returns the tenants and the bytes that
    /// they are no longer charged for.
    pub(in crate::state) fn forget_segment(
        &mut self,
        segment: SegmentSlot,
    ) -> Vec<(TenantIndex, u64)> {
        let mut numbers = Vec::new();
        if let Some(list) = self.by_segment.get_mut(segment.index()) {
            while let Some(number) = list.pop_first(&mut self.segment_links) {
                numbers.push(number);
            }
        }
        for number in self.in_other_segment(segment).collect::<Vec<_>>() {
            self.by_other_segment.remove(&(segment, number));
            numbers.push(number);
        }
        let mut freed = Vec::with_capacity(numbers.len());
        for number in numbers {
            let write = self.at_mut(number);
            write.replicas.retain(|replica| replica.segment != segment);
            freed.push((write.tenant, write.length));
            if write.replicas.is_empty() {
                self.emptied.push(number);
            }
        }
        freed
    }

    fn link_segments(&mut self, replicas: &Replicas, number: WriteSlot) {
        let Some((first, others)) = replicas.split_first() else {
            self.emptied.push(number);
            return;
        };
        let index = first.segment.index();
        if index >= self.by_segment.len() {
            self.by_segment.resize_with(index + 1, IndexList::default);
        }
        self.by_segment[index].push_last(&mut self.segment_links, number);
        for other in others {
            self.by_other_segment.insert((other.segment, number));
        }
    }

    fn unlink_segments(&mut self, replicas: &Replicas, number: WriteSlot) {
        let mut others = &replicas[..];
        if self.segment_links.contains(number)
            && let Some((first, rest)) = replicas.split_first()
        {
            self.by_segment[first.segment.index()].remove(&mut self.segment_links, number);
            others = rest;
        }
        for other in others {
            self.by_other_segment.remove(&(other.segment, number));
        }
    }

    fn in_other_segment(&self, segment: SegmentSlot) -> impl Iterator<Item = WriteSlot> {
        let all = (segment, WriteSlot::new(0))..=(segment, WriteSlot::NONE);
        self.by_other_segment.range(all).map(|&(_, number)| number)
    }

    /// Returns the number of replicas of puts in a segment.
    pub(in crate::state) fn count_in(&self, segment: SegmentSlot) -> usize {
        let first = self.by_segment.get(segment.index()).map_or(0, IndexList::count);
        first + self.in_other_segment(segment).count()
    }

    pub(in crate::state) fn at_mut(&mut self, number: WriteSlot) -> &mut Write {
        self.slots[number.index()].as_mut().expect("the caller has just found it")
    }

    pub(in crate::state) fn at(&self, number: WriteSlot) -> &Write {
        self.slots[number.index()].as_ref().expect("the caller has just found it")
    }

    /// Finds a put by its version, which is unique.
    pub(in crate::state) fn find(&self, version: Version) -> Option<WriteSlot> {
        self.by_version.get(&version.0).copied()
    }

    /// Returns the put whose write window began first.
    pub(in crate::state) fn oldest(&self) -> Option<WriteSlot> {
        self.by_window.first()
    }

    /// Returns the number of puts.
    pub(in crate::state) fn len(&self) -> usize {
        self.by_version.len()
    }

    /// Returns the number of puts of a client.
    pub(in crate::state) fn count_of(&self, client: ClientId) -> u64 {
        self.by_client.count_of(client)
    }

    /// Returns the puts of a client.
    pub(in crate::state) fn of_client(&self, client: ClientId) -> Vec<WriteSlot> {
        self.by_client.of_client(client).collect()
    }

    /// Returns the puts that lost all their replicas with their segments.
    pub(in crate::state) fn take_emptied(&mut self) -> Vec<WriteSlot> {
        let mut emptied = std::mem::take(&mut self.emptied);
        emptied.sort_unstable();
        emptied.dedup();
        // A put that ended meanwhile may have left its place to another one.
        let is_empty = |number: &WriteSlot| {
            let write = self.slots[number.index()].as_ref();
            write.is_some_and(|write| write.replicas.is_empty())
        };
        emptied.retain(is_empty);
        emptied
    }

    /// Returns the puts of an object, newest first.
    pub(in crate::state) fn chain(&self, newest: WriteSlot) -> impl Iterator<Item = WriteSlot> {
        std::iter::successors((newest != NO_WRITE).then_some(newest), |&number| {
            let next = self.at(number).next;
            (next != NO_WRITE).then_some(next)
        })
    }

    /// Returns all puts in the order in which their write windows began.
    pub(in crate::state) fn iter(&self) -> impl Iterator<Item = &Write> {
        self.by_window.iter(&self.links).map(|number| self.at(number))
    }
}
