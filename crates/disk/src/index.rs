//! What lies where: 32 bytes a record, and a table of record numbers.

use std::hash::BuildHasher;

use hashbrown::{HashTable, hash_table};

use crate::format::{Name, RECORD_ALIGNMENT};

/// Records that are allocated at once; memory grows by this, not by doubling.
const CHUNK: usize = 4096;

/// Where a record lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) extent: u32,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) version: u64,
}

#[derive(Debug, Clone, Copy)]
struct IndexRecord {
    hash: u64,
    version: u64,
    /// In units of 8 bytes; the extent is below 4 GiB.
    offset: u32,
    length: u32,
    extent: u32,
    /// Whether it was read since it was written; of a free record, the number of the next one.
    touched_or_next: u32,
}

/// The records of a directory by tenant and key. Two names with the same 64-bit hash share an entry:
/// the later one replaces the earlier, and a read finds out which it is.
#[derive(Debug)]
pub(crate) struct Index {
    table: HashTable<u32>,
    chunks: Vec<Vec<IndexRecord>>,
    free: Option<u32>,
    hasher: std::hash::RandomState,
}

impl Index {
    pub(crate) fn new() -> Self {
        Self {
            table: HashTable::new(),
            chunks: Vec::new(),
            free: None,
            hasher: std::hash::RandomState::new(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    /// Returns where the record of this tenant and key lies, whatever its version is.
    pub(crate) fn get(&self, name: Name<'_>) -> Option<Place> {
        let hash = self.hash(name);
        let found = self.table.find(hash, |number| self.record(*number).hash == hash)?;
        Some(place(self.record(*found)))
    }

    /// Remembers that the record of this name was read.
    pub(crate) fn touch(&mut self, name: Name<'_>) {
        let hash = self.hash(name);
        let found = self.table.find(hash, |number| self.record(*number).hash == hash).copied();
        if let Some(number) = found {
            self.record_mut(number).touched_or_next = 1;
        }
    }

    /// Inserts or replaces the record of a tenant and key.
    pub(crate) fn insert(&mut self, name: Name<'_>, at: Place) {
        let hash = self.hash(name);
        let new = IndexRecord {
            hash,
            version: at.version,
            offset: (at.offset / RECORD_ALIGNMENT) as u32,
            length: at.length as u32,
            extent: at.extent,
            touched_or_next: 0,
        };
        let found = self.table.find(hash, |number| self.record(*number).hash == hash).copied();
        if let Some(number) = found {
            *self.record_mut(number) = new;
            return;
        }
        let number = self.allocate(new);
        let chunks = &self.chunks;
        self.table.insert_unique(hash, number, |number| record(chunks, *number).hash);
    }

    /// Removes the record of a tenant and key if it lies at this place.
    pub(crate) fn remove(&mut self, name: Name<'_>, at: Place) -> bool {
        let hash = self.hash(name);
        let chunks = &self.chunks;
        let found = self.table.find_entry(hash, |number| {
            let record = record(chunks, *number);
            record.hash == hash && place(record) == at
        });
        let Ok(entry) = found else { return false };
        let (number, _): (u32, hash_table::VacantEntry<'_, u32>) = entry.remove();
        self.release(number);
        true
    }

    /// Removes all records of an extent, whatever they are called; returns their number.
    pub(crate) fn remove_extent(&mut self, extent: u32) -> u64 {
        let chunks = &self.chunks;
        let is_there = |number: &mut u32| record(chunks, *number).extent == extent;
        let removed: Vec<_> = self.table.extract_if(is_there).collect();
        removed.iter().for_each(|number| self.release(*number));
        removed.len() as u64
    }

    fn release(&mut self, number: u32) {
        let next = self.free.replace(number).unwrap_or(u32::MAX);
        self.record_mut(number).touched_or_next = next;
    }

    /// Tells whether the record of this name was read since it was written.
    pub(crate) fn is_touched(&self, name: Name<'_>) -> bool {
        let hash = self.hash(name);
        let found = self.table.find(hash, |number| self.record(*number).hash == hash);
        found.is_some_and(|number| self.record(*number).touched_or_next != 0)
    }

    /// Calls `visit` with the extent and the length of each record that was read.
    pub(crate) fn for_each_touched(&self, mut visit: impl FnMut(u32, u64)) {
        for number in &self.table {
            let record = self.record(*number);
            if record.touched_or_next != 0 {
                visit(record.extent, u64::from(record.length));
            }
        }
    }

    fn hash(&self, name: Name<'_>) -> u64 {
        self.hasher.hash_one((name.tenant, name.key))
    }

    fn allocate(&mut self, new: IndexRecord) -> u32 {
        if let Some(number) = self.free {
            let next = self.record(number).touched_or_next;
            self.free = (next != u32::MAX).then_some(next);
            *self.record_mut(number) = new;
            return number;
        }
        if self.chunks.last().is_none_or(|chunk| chunk.len() == CHUNK) {
            self.chunks.push(Vec::with_capacity(CHUNK));
        }
        let full = self.chunks.len() - 1;
        let last = &mut self.chunks[full];
        last.push(new);
        (full * CHUNK + last.len() - 1) as u32
    }

    fn record(&self, number: u32) -> &IndexRecord {
        record(&self.chunks, number)
    }

    fn record_mut(&mut self, number: u32) -> &mut IndexRecord {
        &mut self.chunks[number as usize / CHUNK][number as usize % CHUNK]
    }

    /// Returns the bytes of memory that the index holds.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.chunks.len() * CHUNK * size_of::<IndexRecord>() + self.table.allocation_size()
    }
}

fn record(chunks: &[Vec<IndexRecord>], number: u32) -> &IndexRecord {
    &chunks[number as usize / CHUNK][number as usize % CHUNK]
}

fn place(record: &IndexRecord) -> Place {
    Place {
        extent: record.extent,
        offset: u64::from(record.offset) * RECORD_ALIGNMENT,
        length: u64::from(record.length),
        version: record.version,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(key: &[u8]) -> Name<'_> {
        Name { tenant: "default", key, version: 1 }
    }

    #[test]
    fn a_record_takes_at_most_48_bytes_of_memory() {
        let mut index = Index::new();
        let at = Place { extent: 1, offset: 4096, length: 5, version: 1 };
        for number in 0..500_000_u32 {
            index.insert(name(&number.to_le_bytes()), at);
            let records = index.len();
            if records >= 50_000 && records.is_multiple_of(1000) {
                let bytes = index.memory_bytes();
                assert!(bytes <= 48 * records, "{bytes} bytes for {records}");
            }
        }
    }

    #[test]
    fn removed_entries_are_used_again_and_other_places_stay() {
        let mut index = Index::new();
        let at = Place { extent: 1, offset: 4096, length: 5, version: 1 };
        index.insert(name(b"a"), at);
        assert!(!index.remove(name(b"a"), Place { extent: 2, ..at }));
        assert!(!index.is_touched(name(b"a")));
        index.touch(name(b"a"));
        assert!(index.is_touched(name(b"a")));
        assert!(index.remove(name(b"a"), at));
        assert_eq!((index.get(name(b"a")), index.len()), (None, 0));
        index.insert(name(b"b"), at);
        assert_eq!((index.get(name(b"b")), index.chunks[0].len()), (Some(at), 1));
        assert!(!index.is_touched(name(b"b")));
        index.insert(name(b"c"), Place { extent: 2, ..at });
        assert_eq!((index.remove_extent(2), index.len()), (1, 1));
        assert_eq!((index.get(name(b"b")), index.get(name(b"c"))), (Some(at), None));
    }
}
