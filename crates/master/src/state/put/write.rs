//! Unfinished puts, by version and in the order in which their write windows began.

use std::collections::hash_map::Entry;

use mooncake_base::{ClientId, Moment, Version};
use rustc_hash::FxHashMap;

use crate::state::{
    catalog::object::{NO_WRITE, Replicas},
    ids::{KeyHash, ObjectSlot, SegmentSlot, Slot, TenantIndex, WriteSlot},
    put::options::{RequestedPin, Terms},
    reclaim::eviction::{IndexLinks, IndexList},
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
    by_version: FxHashMap<u64, WriteSlot>,
    /// Number of puts by client.
    by_client: FxHashMap<ClientId, u64>,
    links: IndexLinks<WriteSlot>,
    by_window: IndexList<WriteSlot>,
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
        self.by_version.insert(write.version, number);
        *self.by_client.entry(write.client).or_default() += 1;
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
        if let Entry::Occupied(mut count) = self.by_client.entry(write.client) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        write
    }

    /// Drops the replicas in segments that left the pool. Returns the tenants and the bytes that
    /// they are no longer charged for.
    pub(in crate::state) fn forget_segments(
        &mut self,
        is_gone: impl Fn(SegmentSlot) -> bool,
    ) -> Vec<(TenantIndex, u64)> {
        let mut freed = Vec::new();
        for write in self.slots.iter_mut().flatten() {
            let before = write.replicas.len();
            write.replicas.retain(|replica| !is_gone(replica.segment));
            let lost = (before - write.replicas.len()) as u64;
            if lost > 0 {
                freed.push((write.tenant, write.length * lost));
            }
        }
        freed
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

    /// Returns the number of puts of a client.
    pub(in crate::state) fn count_of(&self, client: ClientId) -> u64 {
        self.by_client.get(&client).copied().unwrap_or_default()
    }

    /// Returns the puts of a client.
    pub(in crate::state) fn of_client(&self, client: ClientId) -> Vec<WriteSlot> {
        self.filtered(|write| write.client == client)
    }

    /// Returns the puts that lost all their replicas with their segments.
    pub(in crate::state) fn without_replicas(&self) -> Vec<WriteSlot> {
        self.filtered(|write| write.replicas.is_empty())
    }

    fn filtered(&self, is_meant: impl Fn(&Write) -> bool) -> Vec<WriteSlot> {
        let numbered = (0..).map(WriteSlot::new).zip(&self.slots);
        numbered
            .filter(|(_, write)| write.as_ref().is_some_and(&is_meant))
            .map(|(number, _)| number)
            .collect()
    }

    /// Returns the puts of an object, newest first.
    pub(in crate::state) fn chain(&self, newest: WriteSlot) -> impl Iterator<Item = WriteSlot> {
        std::iter::successors((newest != NO_WRITE).then_some(newest), |&number| {
            let next = self.at(number).next;
            (next != NO_WRITE).then_some(next)
        })
    }

    /// Returns all puts.
    pub(in crate::state) fn iter(&self) -> impl Iterator<Item = &Write> {
        self.slots.iter().flatten()
    }
}
