//! A hash map of many tables, so that the growth of one is quick while all other calls wait for the
//! state.

use std::{
    borrow::Borrow,
    fmt,
    hash::{BuildHasher, Hash},
};

use hashbrown::{HashTable, hash_table::Entry};
use rustc_hash::FxBuildHasher;

pub(in crate::state) use rustc_hash::FxSeededState as SeededState;

/// Tables of a map. A table of some ten thousand entries doubles within a millisecond.
const TABLES: usize = 1024;

/// Bits of a hash below those that choose the table: a table uses the lowest and the highest bits.
const TABLE_SHIFT: u32 = 40;

/// A map that may have tens of millions of entries.
pub(in crate::state) struct SplitMap<K, V, S = FxBuildHasher> {
    /// Empty until the first entry: most pools have no groups, pins or tags.
    tables: Vec<HashTable<(K, V)>>,
    hasher: S,
    count: usize,
}

impl<K: fmt::Debug, V: fmt::Debug, S> fmt::Debug for SplitMap<K, V, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entries = self.tables.iter().flatten();
        f.debug_map().entries(entries.map(|(key, value)| (key, value))).finish()
    }
}

impl<K, V, S: Default> Default for SplitMap<K, V, S> {
    fn default() -> Self {
        Self { tables: Vec::new(), hasher: S::default(), count: 0 }
    }
}

impl<K: Hash + Eq, V, S: BuildHasher> SplitMap<K, V, S> {
    /// Creates an empty map.
    pub(in crate::state) fn with_hasher(hasher: S) -> Self {
        Self { tables: Vec::new(), hasher, count: 0 }
    }

    /// Sets the value of a key. Returns the earlier one.
    pub(in crate::state) fn insert(&mut self, key: K, value: V) -> Option<V> {
        if self.tables.is_empty() {
            self.tables.resize_with(TABLES, HashTable::new);
        }
        let hash = self.hasher.hash_one(&key);
        let hasher = &self.hasher;
        let table = &mut self.tables[table_of(hash)];
        match table.entry(hash, |(other, _)| *other == key, |(other, _)| hasher.hash_one(other)) {
            Entry::Occupied(mut found) => Some(std::mem::replace(&mut found.get_mut().1, value)),
            Entry::Vacant(free) => {
                free.insert((key, value));
                self.count += 1;
                None
            }
        }
    }

    /// Adds a key that is not in the map.
    pub(in crate::state) fn insert_new(&mut self, key: K, value: V) {
        if self.tables.is_empty() {
            self.tables.resize_with(TABLES, HashTable::new);
        }
        let hash = self.hasher.hash_one(&key);
        let hasher = &self.hasher;
        let table = &mut self.tables[table_of(hash)];
        table.insert_unique(hash, (key, value), |(other, _)| hasher.hash_one(other));
        self.count += 1;
    }

    /// Removes a key. Returns its value.
    pub(in crate::state) fn remove<Q>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        if self.count == 0 {
            return None;
        }
        let hash = self.hasher.hash_one(key);
        let table = &mut self.tables[table_of(hash)];
        let found = table.find_entry(hash, |(other, _)| other.borrow() == key).ok()?;
        self.count -= 1;
        Some(found.remove().0.1)
    }

    /// Returns the value of a key.
    pub(in crate::state) fn get<Q>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        if self.count == 0 {
            return None;
        }
        let hash = self.hasher.hash_one(key);
        let found = self.tables[table_of(hash)].find(hash, |(other, _)| other.borrow() == key);
        found.map(|(_, value)| value)
    }

    /// Returns whether the map has the key.
    pub(in crate::state) fn contains_key<Q>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.get(key).is_some()
    }

    /// Returns the number of entries.
    pub(in crate::state) fn len(&self) -> usize {
        self.count
    }

    /// Returns whether there are no entries.
    pub(in crate::state) fn is_empty(&self) -> bool {
        self.count == 0
    }
}

fn table_of(hash: u64) -> usize {
    (hash >> TABLE_SHIFT) as usize % TABLES
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::state::ids::ObjectSlot;

    #[test]
    fn agrees_with_a_plain_map() {
        let mut split: SplitMap<ObjectSlot, u32> = SplitMap::default();
        let mut plain = HashMap::new();
        assert_eq!(split.get(&ObjectSlot::new(1)), None);
        assert_eq!(split.remove(&ObjectSlot::new(1)), None);
        for step in 0..200_000_u32 {
            let number = step.wrapping_mul(0x9e37_79b9) >> 17;
            let key = ObjectSlot::new(number);
            match step % 3 {
                0 => assert_eq!(split.remove(&key), plain.remove(&number)),
                _ => assert_eq!(split.insert(key, step), plain.insert(number, step)),
            }
        }
        assert_eq!((split.len(), split.is_empty()), (plain.len(), false));
        for number in 0..1 << 15 {
            assert_eq!(split.get(&ObjectSlot::new(number)), plain.get(&number));
        }
    }

    #[test]
    fn no_table_has_more_than_its_share() {
        // The growth of a table moves all its entries while every call waits.
        const ENTRIES: u32 = 1 << 20;
        let mut split: SplitMap<ObjectSlot, ()> = SplitMap::default();
        (0..ENTRIES)
            .for_each(|number| assert!(split.insert(ObjectSlot::new(number), ()).is_none()));
        let largest = split.tables.iter().map(HashTable::capacity).max().unwrap();
        assert!(largest <= 8 * ENTRIES as usize / TABLES, "a table for {largest} entries");
    }
}
