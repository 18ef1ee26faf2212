//! Objects of one tenant during a replay, stored in insertion order: nearly the order in which a
//! restore reads them, for cache locality.

use std::hash::{DefaultHasher, Hasher};

use hashbrown::HashTable;
use mooncake_base::ObjectKey;

use super::LiveObject;

/// The objects of one tenant.
#[derive(Debug, Clone, Default)]
pub(in crate::state) struct TenantObjects {
    by_key: HashTable<Entry>,
    slots: Vec<Option<(ObjectKey, LiveObject)>>,
    vacant: Vec<u32>,
}

/// An entry of the table, which grows without reading keys.
#[derive(Debug, Clone, Copy)]
struct Entry {
    slot: u32,
    hash: u32,
}

impl TenantObjects {
    /// Inserts the object of a key in place of an earlier one.
    pub(super) fn insert(&mut self, key: ObjectKey, live: LiveObject) {
        let hash = hash_of(key.as_bytes());
        if let Some(slot) = self.find(hash, key.as_bytes()) {
            self.slots[slot as usize] = Some((key, live));
            return;
        }
        let object = Some((key, live));
        let slot = match self.vacant.pop() {
            Some(slot) => {
                self.slots[slot as usize] = object;
                slot
            }
            None => {
                self.slots.push(object);
                u32::try_from(self.slots.len() - 1).expect("a master has fewer objects")
            }
        };
        let entry = Entry { slot, hash };
        self.by_key.insert_unique(spread(hash), entry, |entry| spread(entry.hash));
    }

    /// Removes the object of a key.
    pub(super) fn remove(&mut self, key: &[u8]) {
        let hash = hash_of(key);
        let Some(slot) = self.find(hash, key) else { return };
        if let Ok(found) = self.by_key.find_entry(spread(hash), |entry| entry.slot == slot) {
            found.remove();
        }
        self.slots[slot as usize] = None;
        self.vacant.push(slot);
    }

    pub(in crate::state) fn get_mut(&mut self, key: &[u8]) -> Option<&mut LiveObject> {
        let slot = self.find(hash_of(key), key)?;
        self.slots[slot as usize].as_mut().map(|(_, live)| live)
    }

    /// Returns the number of objects.
    pub(in crate::state) fn len(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }

    /// Returns every object with its slot.
    pub(in crate::state) fn iter(&self) -> impl Iterator<Item = (u32, &ObjectKey, &LiveObject)> {
        let numbered = (0..).zip(&self.slots);
        numbered.filter_map(|(slot, object)| object.as_ref().map(|(key, at)| (slot, key, at)))
    }

    /// Returns the object in a slot.
    pub(in crate::state) fn get(&self, slot: u32) -> Option<&(ObjectKey, LiveObject)> {
        self.slots.get(slot as usize)?.as_ref()
    }

    /// Returns all slots.
    pub(in crate::state) fn into_slots(self) -> Vec<Option<(ObjectKey, LiveObject)>> {
        self.slots
    }

    fn find(&self, hash: u32, key: &[u8]) -> Option<u32> {
        let is_meant = |entry: &Entry| {
            let is_key = |(found, _): &(ObjectKey, LiveObject)| found.as_bytes() == key;
            entry.hash == hash && self.get(entry.slot).is_some_and(is_key)
        };
        self.by_key.find(spread(hash), is_meant).map(|entry| entry.slot)
    }
}

fn hash_of(key: &[u8]) -> u32 {
    let mut hasher = DefaultHasher::new();
    hasher.write(key);
    (hasher.finish() >> u32::BITS) as u32
}

/// Spreads the bits that the table uses.
fn spread(hash: u32) -> u64 {
    u64::from(hash).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
