//! The S3-FIFO policy: a small FIFO queue, a main FIFO queue, and ghosts of evicted keys.

use std::ops::ControlFlow;

use crate::state::{
    catalog::eviction::{EvictionPolicy, IndexLinks, IndexList},
    ids::{KeyHash, ObjectSlot, Slot},
};

/// The small queue is evicted first while it holds more than this share of all objects: one in this
/// many.
const SMALL_SHARE: usize = 10;

/// The maximum use count. Each counted use saves an object from one pass.
const USES_MAX: u8 = 3;

/// Evicts objects of the small queue that were not used again, before any object of the main queue.
///
/// An object used while in the small queue moves to the main queue. A new object whose key is a
/// ghost enters the main queue at once. A scan over many objects only passes through the small
/// queue.
#[derive(Debug, Default)]
pub struct S3Fifo {
    links: IndexLinks<ObjectSlot>,
    small: IndexList<ObjectSlot>,
    main: IndexList<ObjectSlot>,
    entries: Vec<CountedEntry>,
    ghosts: GhostTable,
}

#[derive(Debug, Clone, Copy, Default)]
struct CountedEntry {
    uses: u8,
    is_main: bool,
}

impl S3Fifo {
    fn list_of(
        &mut self,
        object: ObjectSlot,
    ) -> (&mut IndexList<ObjectSlot>, &mut IndexLinks<ObjectSlot>) {
        let is_main = self.entries[object.index()].is_main;
        (if is_main { &mut self.main } else { &mut self.small }, &mut self.links)
    }

    fn push(&mut self, object: ObjectSlot, is_main: bool) {
        self.entries[object.index()].is_main = is_main;
        let (list, links) = self.list_of(object);
        list.push_last(links, object);
    }

    fn pop_small(&mut self) -> Option<ObjectSlot> {
        while let Some(object) = self.small.pop_first(&mut self.links) {
            let entry = &mut self.entries[object.index()];
            if entry.uses == 0 {
                return Some(object);
            }
            entry.uses = 0;
            self.push(object, true);
        }
        None
    }

    fn pop_main(&mut self) -> Option<ObjectSlot> {
        while let Some(object) = self.main.pop_first(&mut self.links) {
            let entry = &mut self.entries[object.index()];
            if entry.uses == 0 {
                return Some(object);
            }
            entry.uses -= 1;
            self.push(object, true);
        }
        None
    }
}

impl EvictionPolicy for S3Fifo {
    fn insert(&mut self, object: ObjectSlot, hash: KeyHash) {
        if self.links.contains(object) {
            return;
        }
        if object.index() >= self.entries.len() {
            self.entries.resize(object.index() + 1, CountedEntry::default());
        }
        self.entries[object.index()] = CountedEntry { uses: 0, is_main: false };
        self.ghosts.make_room(self.main.count());
        let is_main = self.ghosts.recall(hash);
        self.push(object, is_main);
    }

    fn touch(&mut self, object: ObjectSlot) {
        if self.links.contains(object) {
            let entry = &mut self.entries[object.index()];
            entry.uses = USES_MAX.min(entry.uses + 1);
        }
    }

    fn remove(&mut self, object: ObjectSlot) {
        if self.links.contains(object) {
            let (list, links) = self.list_of(object);
            list.remove(links, object);
        }
    }

    fn pop(&mut self) -> Option<ObjectSlot> {
        let all = self.small.count() + self.main.count();
        if self.small.count() * SMALL_SHARE > all {
            self.pop_small().or_else(|| self.pop_main())
        } else {
            self.pop_main().or_else(|| self.pop_small())
        }
    }

    /// Assumes that a new object enters the small queue for each victim, as in a full pool.
    fn visit_next(&self, visit: &mut dyn FnMut(ObjectSlot) -> ControlFlow<()>) {
        let all = self.small.count() + self.main.count();
        let mut small_count = self.small.count();
        let is_unused = |object: &ObjectSlot| self.entries[object.index()].uses == 0;
        let mut small = self.small.iter(&self.links);
        let mut main = self.main.iter(&self.links);
        loop {
            let is_small_first = small_count * SMALL_SHARE > all;
            let mut from_small = || {
                let object = small.find(|object| {
                    let is_victim = is_unused(object);
                    small_count -= usize::from(!is_victim);
                    is_victim
                });
                object.inspect(|_| small_count -= 1)
            };
            let next = if is_small_first {
                from_small().or_else(|| main.find(is_unused))
            } else {
                main.find(is_unused).or_else(from_small)
            };
            let Some(object) = next else { return };
            small_count += 1;
            if visit(object).is_break() {
                return;
            }
        }
    }

    fn put_back(&mut self, object: ObjectSlot) {
        // Put back at the head of the queue that is examined next, so that the object is the next
        // victim.
        let all = self.small.count() + self.main.count() + 1;
        let is_small = (self.small.count() + 1) * SMALL_SHARE > all;
        let entry = &mut self.entries[object.index()];
        (entry.is_main, entry.uses) = (!is_small, 0);
        let (list, links) = self.list_of(object);
        list.push_first(links, object);
    }

    fn on_evicted(&mut self, object: ObjectSlot, hash: KeyHash) {
        let is_small = self.entries.get(object.index()).is_some_and(|entry| !entry.is_main);
        if is_small {
            self.ghosts.remember(hash);
        }
    }
}

/// Keys evicted from the small queue: a hash table in which a newer key overwrites an older one.
#[derive(Debug, Default)]
struct GhostTable(Vec<Option<KeyHash>>);

impl GhostTable {
    /// Grows with the number of objects in the main queue. All keys are forgotten then.
    fn make_room(&mut self, objects: usize) {
        if self.0.len() < objects.max(64) {
            self.0 = vec![None; objects.max(64).next_power_of_two() * 2];
        }
    }

    fn remember(&mut self, hash: KeyHash) {
        if let Some(place) = self.place(hash) {
            self.0[place] = Some(hash);
        }
    }

    /// Returns whether a key is remembered, and forgets the key.
    fn recall(&mut self, hash: KeyHash) -> bool {
        self.place(hash).is_some_and(|place| self.0[place].take_if(|held| *held == hash).is_some())
    }

    fn place(&self, hash: KeyHash) -> Option<usize> {
        let mask = self.0.len().checked_sub(1)?;
        Some(hash.number() as usize & mask)
    }
}
