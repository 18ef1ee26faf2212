//! Directories of records, as they lie on the devices of hosts: they outlive the processes that have
//! them open. As in the product, records are appended to extents, the oldest extent is used again, and
//! removed or replaced records stay in their extent until then.

use std::collections::VecDeque;

use mooncake_base::{Moment, SegmentId, TenantId, Version};

use crate::random::Random;

/// The name of a record: the version of an object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RecordName {
    pub(crate) tenant: TenantId,
    pub(crate) key: u64,
    pub(crate) version: Version,
}

/// A directory.
#[derive(Debug, Clone)]
pub(crate) struct Directory {
    pub(crate) id: SegmentId,
    /// Counts how often it was opened.
    pub(crate) incarnation: u64,
    /// The process that has it open.
    pub(crate) open_by: Option<u64>,
    /// The words that its extents may take.
    pub(crate) capacity: u64,
    pub(crate) extent_words: u64,
    /// The file system takes no further extent before this time.
    pub(crate) full_until: Moment,
    /// The oldest one first; records are appended to the last one.
    extents: VecDeque<Extent>,
}

#[derive(Debug, Clone, Default)]
struct Extent {
    words: u64,
    records: Vec<Record>,
}

#[derive(Debug, Clone)]
struct Record {
    name: RecordName,
    words: Vec<u64>,
    checksum: u64,
    is_synced: bool,
    /// Whether it can be found until the directory is opened again.
    is_listed: bool,
}

impl Record {
    fn is_good(&self) -> bool {
        checksum(&self.words) == self.checksum
    }
}

/// What became of the write of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Written {
    Good,
    /// A later version of the object is there.
    Superseded,
    TooLong,
    /// The file system has no space.
    Full,
}

/// What became of the read of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Loaded {
    Good(Vec<u64>),
    Missing,
    Damaged,
}

impl Directory {
    /// Creates an empty directory.
    pub(crate) fn new(id: SegmentId, capacity: u64, extent_words: u64) -> Self {
        Self {
            id,
            incarnation: 0,
            open_by: None,
            capacity,
            extent_words,
            full_until: Moment::default(),
            extents: VecDeque::new(),
        }
    }

    /// Returns a copy of the directory, which nobody has open.
    pub(crate) fn copied(&self) -> Self {
        Self { open_by: None, ..self.clone() }
    }

    /// Opens the directory for a process: finds its good records, removed ones included. With
    /// `trusts_all`, their checksums are not compared. Returns the number of damaged records.
    pub(crate) fn open(&mut self, process: u64, trusts_all: bool) -> u64 {
        self.open_by = Some(process);
        self.incarnation += 1;
        let mut damaged = 0;
        for record in self.extents.iter_mut().flat_map(|extent| &mut extent.records) {
            let is_good = trusts_all || record.is_good();
            damaged += u64::from(!is_good);
            record.is_listed = is_good;
        }
        damaged
    }

    /// Appends a record. Adds those that had to go for it to `evicted`.
    pub(crate) fn write(
        &mut self,
        now: Moment,
        name: RecordName,
        words: Vec<u64>,
        evicted: &mut Vec<RecordName>,
    ) -> Written {
        let length = words.len() as u64;
        if length > self.extent_words {
            return Written::TooLong;
        }
        if self.latest(&name).is_some_and(|found| found.name.version > name.version) {
            return Written::Superseded;
        }
        let has_room = |extent: &Extent| extent.words + length <= self.extent_words;
        if !self.extents.back().is_some_and(has_room) {
            if !self.full_until.has_passed(now) {
                return Written::Full;
            }
            while (self.extents.len() as u64 + 1) * self.extent_words > self.capacity {
                let dropped: Vec<RecordName> =
                    self.extents.front().map(|oldest| self.listed_in(oldest)).unwrap_or_default();
                self.extents.pop_front();
                evicted.extend(dropped);
            }
            self.extents.push_back(Extent::default());
        }
        let checksum = checksum(&words);
        if let Some(extent) = self.extents.back_mut() {
            extent.words += length;
            let record = Record { name, words, checksum, is_synced: false, is_listed: true };
            extent.records.push(record);
        }
        Written::Good
    }

    /// Reads a record: the version that is asked for, and no other. With `trusts_all`, its checksum is
    /// not compared.
    pub(crate) fn read(&self, name: &RecordName, trusts_all: bool) -> Loaded {
        match self.latest(name).filter(|found| found.name.version == name.version) {
            Some(record) if trusts_all || record.is_good() => Loaded::Good(record.words.clone()),
            Some(_) => Loaded::Damaged,
            None => Loaded::Missing,
        }
    }

    /// Lets a record be found no longer. Its words stay until its extent is used again.
    pub(crate) fn remove(&mut self, name: &RecordName) {
        let records = self.extents.iter_mut().flat_map(|extent| &mut extent.records);
        for record in records.filter(|record| is_of(record, name)) {
            record.is_listed &= record.name.version > name.version;
        }
    }

    /// Brings all records to the device.
    pub(crate) fn sync(&mut self) {
        let records = self.extents.iter_mut().flat_map(|extent| &mut extent.records);
        records.for_each(|record| record.is_synced = true);
    }

    /// Loses some of the records that are not synced, and tears others.
    pub(crate) fn lose_power(&mut self, random: &mut Random) {
        for extent in &mut self.extents {
            extent.records.retain_mut(|record| {
                if record.is_synced {
                    return true;
                }
                match random.below(3) {
                    0 => return false,
                    1 => {
                        let first = random.below(record.words.len() as u64) as usize;
                        record.words[first..].iter_mut().for_each(|word| *word = random.next());
                    }
                    _ => {}
                }
                record.is_synced = true;
                true
            });
        }
    }

    /// Changes a word of some record.
    pub(crate) fn damage(&mut self, random: &mut Random) {
        let count: usize = self.extents.iter().map(|extent| extent.records.len()).sum();
        let at = random.below(count as u64) as usize;
        let found = self.extents.iter_mut().flat_map(|extent| &mut extent.records).nth(at);
        if let Some(word) = found.and_then(|record| record.words.first_mut()) {
            *word ^= 1;
        }
    }

    /// Returns the records that can be found, with their lengths.
    pub(crate) fn records(&self) -> Vec<(RecordName, u64)> {
        let listed = self.extents.iter().flat_map(|extent| self.listed_in(extent));
        let mut found: Vec<_> = listed
            .map(|name| {
                let length = self.latest(&name).map_or(0, |record| record.words.len() as u64);
                (name, length)
            })
            .collect();
        found.sort();
        found.dedup();
        found
    }

    /// Returns the words that all extents take.
    pub(crate) fn used(&self) -> u64 {
        self.extents.len() as u64 * self.extent_words
    }

    /// Returns the records of an extent that can be found.
    fn listed_in(&self, extent: &Extent) -> Vec<RecordName> {
        let is_latest = |record: &&Record| {
            let latest = self.latest(&record.name);
            latest.is_some_and(|latest| std::ptr::eq(latest, *record))
        };
        extent.records.iter().filter(is_latest).map(|record| record.name.clone()).collect()
    }

    /// Returns the record of the latest version of an object.
    fn latest(&self, name: &RecordName) -> Option<&Record> {
        let records = self.extents.iter().flat_map(|extent| &extent.records);
        let listed = records.filter(|record| record.is_listed && is_of(record, name));
        listed.max_by_key(|record| record.name.version)
    }
}

fn is_of(record: &Record, name: &RecordName) -> bool {
    record.name.key == name.key && record.name.tenant == name.tenant
}

/// Returns a checksum of the words.
fn checksum(words: &[u64]) -> u64 {
    words.iter().fold(0x5eed, |sum: u64, &word| {
        (sum.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    })
}
