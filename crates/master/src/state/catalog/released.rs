//! Objects that are released ahead of need: the log has the record of their release, so that their
//! memory needs no wait for the log when it is given away. Until then they are objects like others:
//! readable, and at their place in the order of eviction.

use crate::state::{catalog::split_map::SplitMap, ids::ObjectSlot};

/// Objects whose release is recorded, but that were not evicted.
#[derive(Debug, Default)]
pub(in crate::state) struct ReleasedObjects {
    by_object: SplitMap<ObjectSlot, Release>,
    bytes: u64,
}

#[derive(Debug, Clone, Copy)]
struct Release {
    /// Log position behind the record of the release.
    position: u64,
    /// Bytes of the object's replicas at that time.
    bytes: u64,
}

impl ReleasedObjects {
    pub(in crate::state) fn is_empty(&self) -> bool {
        self.by_object.is_empty()
    }

    pub(in crate::state) fn contains(&self, object: ObjectSlot) -> bool {
        !self.is_empty() && self.by_object.contains_key(&object)
    }

    /// Returns the log position behind the record of an object's release.
    pub(in crate::state) fn position(&self, object: ObjectSlot) -> Option<u64> {
        if self.is_empty() {
            return None;
        }
        self.by_object.get(&object).map(|release| release.position)
    }

    /// Adds an object whose release was recorded below the position.
    pub(in crate::state) fn insert(&mut self, object: ObjectSlot, position: u64, bytes: u64) {
        let before = self.by_object.insert(object, Release { position, bytes });
        debug_assert!(before.is_none(), "an object is released once");
        self.bytes += bytes;
    }

    /// Forgets an object: it was evicted or removed, or is recorded as live again. Returns whether
    /// it was released.
    pub(in crate::state) fn remove(&mut self, object: ObjectSlot) -> bool {
        if self.is_empty() {
            return false;
        }
        let Some(release) = self.by_object.remove(&object) else { return false };
        self.bytes -= release.bytes;
        true
    }

    /// Returns the number of objects.
    pub(in crate::state) fn count(&self) -> usize {
        self.by_object.len()
    }

    /// Returns the bytes of their replicas.
    pub(in crate::state) fn bytes(&self) -> u64 {
        self.bytes
    }
}
