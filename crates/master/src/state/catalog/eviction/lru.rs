//! The LRU policy: least recently used first.

use std::ops::ControlFlow;

use crate::state::{
    catalog::eviction::{EvictionPolicy, IndexLinks, IndexList},
    ids::{KeyHash, ObjectSlot},
};

/// Evicts the least recently used object.
#[derive(Debug, Default)]
pub struct Lru {
    links: IndexLinks<ObjectSlot>,
    list: IndexList<ObjectSlot>,
}

impl Lru {
    pub(in crate::state) fn contains(&self, object: ObjectSlot) -> bool {
        self.links.contains(object)
    }
}

impl EvictionPolicy for Lru {
    fn insert(&mut self, object: ObjectSlot, _hash: KeyHash) {
        if !self.links.contains(object) {
            self.list.push_last(&mut self.links, object);
        }
    }

    fn touch(&mut self, object: ObjectSlot) {
        if self.links.contains(object) {
            self.list.remove(&mut self.links, object);
            self.list.push_last(&mut self.links, object);
        }
    }

    fn remove(&mut self, object: ObjectSlot) {
        if self.links.contains(object) {
            self.list.remove(&mut self.links, object);
        }
    }

    fn pop(&mut self) -> Option<ObjectSlot> {
        self.list.pop_first(&mut self.links)
    }

    fn visit_next(&self, visit: &mut dyn FnMut(ObjectSlot) -> ControlFlow<()>) {
        let _ = self.list.iter(&self.links).try_for_each(visit);
    }

    fn put_back(&mut self, object: ObjectSlot) {
        self.list.push_first(&mut self.links, object);
    }
}
