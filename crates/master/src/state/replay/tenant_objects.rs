//! What stands under each key of a tenant, side by side in the order in which it came: that is
//! nearly the order in which it is taken up again, and going through it leaves no cache behind.

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

/// A key in the table, which grows without a look at the key.
#[derive(Debug, Clone, Copy)]
struct Entry {
    slot: u32,
    hash: u32,
}

impl TenantObjects {
    /// That stands under the key from now on, and nothing else.
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

    /// Nothing stands under the key any more.
    pub(super) fn remove(&mut self, key: &[u8]) {
        let hash = hash_of(key);
        let Some(slot) = self.find(hash, key) else { return };
        if let Ok(found) = self.by_key.find_entry(spread(hash), |entry| entry.slot == slot) {
            found.remove();
        }
        self.slots[slot as usize] = None;
        self.vacant.push(slot);
    }

    pub(super) fn get_mut(&mut self, key: &[u8]) -> Option<&mut LiveObject> {
        let slot = self.find(hash_of(key), key)?;
        self.slots[slot as usize].as_mut().map(|(_, live)| live)
    }

    /// How many keys there are.
    pub(in crate::state) fn len(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }

    /// Every object, with the number that it has here.
    pub(in crate::state) fn iter(&self) -> impl Iterator<Item = (u32, &ObjectKey, &LiveObject)> {
        let numbered = (0..).zip(&self.slots);
        numbered.filter_map(|(slot, object)| object.as_ref().map(|(key, at)| (slot, key, at)))
    }

    /// The object of that number, if there is one.
    pub(in crate::state) fn get(&self, slot: u32) -> Option<&(ObjectKey, LiveObject)> {
        self.slots.get(slot as usize)?.as_ref()
    }

    /// All objects, each under its number.
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

/// What the table goes by.
fn spread(hash: u32) -> u64 {
    u64::from(hash).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
