//! Least recently used first.

use super::{EvictionPolicy, IndexLinks, IndexList};

/// Evicts what was not used for the longest time.
#[derive(Debug, Default)]
pub struct Lru {
    links: IndexLinks,
    list: IndexList,
}

impl Lru {
    pub(in super::super) fn contains(&self, object: u32) -> bool {
        self.links.contains(object)
    }
}

impl EvictionPolicy for Lru {
    fn insert(&mut self, object: u32, _hash: u32) {
        if !self.links.contains(object) {
            self.list.push_last(&mut self.links, object);
        }
    }

    fn touch(&mut self, object: u32) {
        if self.links.contains(object) {
            self.list.remove(&mut self.links, object);
            self.list.push_last(&mut self.links, object);
        }
    }

    fn remove(&mut self, object: u32) {
        if self.links.contains(object) {
            self.list.remove(&mut self.links, object);
        }
    }

    fn pop(&mut self) -> Option<u32> {
        self.list.pop_first(&mut self.links)
    }

    fn put_back(&mut self, object: u32) {
        self.list.push_first(&mut self.links, object);
    }
}
