//! Batches as columns: a few long lists instead of a message per item. Columns are packed here, and
//! checked here when they come from outside.
//!
//! Reading a value through a checked column costs one load. Decoding nested messages was the largest
//! part of the cost of a batch; see decision 14.

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use mooncake_base::Error;

use crate::v1;

/// Inconsistent columns: their lengths differ, or they name items that do not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColumnMismatch;

impl From<ColumnMismatch> for Error {
    fn from(_: ColumnMismatch) -> Self {
        Self::invalid("the columns of the call are inconsistent")
    }
}

/// The result of checking columns.
pub type Checked<T> = Result<T, ColumnMismatch>;

/// Returns the columns of a call.
///
/// # Errors
/// If the call has none, as that of a program with another version of `master.proto`.
pub fn require<T>(columns: Option<&T>) -> Result<&T, Error> {
    columns.ok_or_else(|| Error::invalid("the call has no items; send them in columns"))
}

/// A checked column: a value for each item.
#[derive(Debug)]
pub struct Column<'a, T> {
    values: &'a [T],
    /// 0 if the only value applies to all items, else 1.
    step: usize,
}

impl<T> Clone for Column<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Column<'_, T> {}

impl<'a, T> Column<'a, T> {
    /// Checks a column with one value per item.
    ///
    /// # Errors
    /// If the number of values differs.
    pub fn each(values: &'a [T], items: usize) -> Checked<Self> {
        if values.len() == items { Ok(Self { values, step: 1 }) } else { Err(ColumnMismatch) }
    }

    /// Checks a column with one value per item, or one value for all items.
    ///
    /// # Errors
    /// If the number of values differs.
    pub fn each_or_uniform(values: &'a [T], items: usize) -> Checked<Self> {
        if values.len() == 1 { Ok(Self { values, step: 0 }) } else { Self::each(values, items) }
    }

    /// Returns the value of an item.
    ///
    /// # Panics
    /// If there is no such item.
    pub fn at(&self, item: usize) -> &'a T {
        &self.values[item * self.step]
    }
}

/// Truncates the list to one value if all values are equal.
pub fn collapse_if_uniform<T: PartialEq>(values: &mut Vec<T>) {
    if let Some((first, rest)) = values.split_first()
        && rest.iter().all(|value| value == first)
    {
        values.truncate(1);
    }
}

/// Appends the failure of an item to those of a response.
pub fn push_failure(
    failures: &mut Vec<v1::ItemFailure>,
    item: usize,
    failure: impl Into<v1::Failure>,
) {
    let item = u32::try_from(item).expect("a call has fewer items");
    failures.push(v1::ItemFailure { item, failure: Some(failure.into()) });
}

/// The failures of a response, taken item by item, in ascending order.
#[derive(Debug, Clone)]
pub struct Failures<'a>(&'a [v1::ItemFailure]);

impl<'a> Failures<'a> {
    /// Checks the failures.
    ///
    /// # Errors
    /// If an item does not exist, is repeated or out of order, or has no failure.
    pub fn read(failures: &'a [v1::ItemFailure], items: usize) -> Checked<Self> {
        let is_complete = failures.iter().all(|failure| failure.failure.is_some());
        let numbers = failures.iter().map(|failure| failure.item);
        if is_complete && is_ascending(numbers, items) {
            Ok(Self(failures))
        } else {
            Err(ColumnMismatch)
        }
    }

    /// Returns the failure of an item, if it failed. Must be called for every item in order.
    pub fn take(&mut self, item: usize) -> Option<&'a v1::Failure> {
        let (first, rest) = self.0.split_first()?;
        if first.item as usize != item {
            return None;
        }
        self.0 = rest;
        first.failure.as_ref()
    }
}

impl v1::KeyColumn {
    /// Concatenates keys.
    pub fn pack<K: AsRef<[u8]>>(keys: impl IntoIterator<Item = K, IntoIter: Clone>) -> Self {
        let keys = keys.into_iter();
        let total = keys.clone().map(|key| key.as_ref().len()).sum();
        let mut bytes = BytesMut::with_capacity(total);
        let length = |key: K| {
            bytes.extend_from_slice(key.as_ref());
            u32::try_from(key.as_ref().len()).expect("keys are short")
        };
        let lengths = keys.map(length).collect();
        Self { bytes: bytes.freeze(), lengths }
    }

    /// Returns the keys, without checking that their lengths are valid for keys.
    ///
    /// # Errors
    /// If the bytes are more or fewer than the sum of the lengths.
    pub fn keys(&self) -> Checked<Vec<&[u8]>> {
        let mut rest = &self.bytes[..];
        let mut keys = Vec::with_capacity(self.lengths.len());
        for &length in &self.lengths {
            let (key, after) = rest.split_at_checked(length as usize).ok_or(ColumnMismatch)?;
            keys.push(key);
            rest = after;
        }
        if rest.is_empty() { Ok(keys) } else { Err(ColumnMismatch) }
    }

    /// Returns the first key, truncated to the bytes present.
    pub fn first(&self) -> Bytes {
        let length = self.lengths.first().map_or(0, |&length| length as usize);
        self.bytes.slice(..length.min(self.bytes.len()))
    }
}

impl v1::PutColumns {
    /// Packs keys and lengths of objects without groups.
    pub fn pack<K: AsRef<[u8]>>(
        items: impl IntoIterator<Item = (K, u64), IntoIter: Clone>,
    ) -> Self {
        let items = items.into_iter();
        let mut lengths: Vec<u64> = items.clone().map(|(_, length)| length).collect();
        collapse_if_uniform(&mut lengths);
        let keys = Some(v1::KeyColumn::pack(items.map(|(key, _)| key)));
        Self { keys, lengths, groups: Vec::new(), if_versions: Vec::new() }
    }
}

impl v1::PlaceColumns {
    /// Appends the places of the next item, which has this number; the lengths are not stored.
    pub fn push(&mut self, item: usize, places: impl ExactSizeIterator<Item = v1::Place>) {
        let count = places.len();
        if count != 1 && self.counts.is_empty() {
            self.counts = vec![1; item];
        }
        if count != 1 || !self.counts.is_empty() {
            self.counts.push(u32::try_from(count).expect("an object has few copies"));
        }
        for place in places {
            self.segments.push(place.segment);
            self.offsets.push(place.offset);
            self.replicas.push(place.replica);
        }
    }

    /// Checks the columns; the result yields the places item by item.
    ///
    /// # Errors
    /// If the number of places differs from the counts, or the number of counts from the items.
    pub fn read(&self, items: usize) -> Checked<Places<'_>> {
        let count = match &self.counts[..] {
            [] => items,
            counts if counts.len() == items => counts.iter().map(|&count| count as usize).sum(),
            _ => return Err(ColumnMismatch),
        };
        Ok(Places {
            counts: &self.counts,
            segments: Column::each_or_uniform(&self.segments, count)?,
            offsets: Column::each(&self.offsets, count)?,
            replicas: Column::each(&self.replicas, count)?,
            item: 0,
            next: 0,
        })
    }
}

/// The checked places of many items.
#[derive(Debug, Clone)]
pub struct Places<'a> {
    counts: &'a [u32],
    segments: Column<'a, u32>,
    offsets: Column<'a, u64>,
    replicas: Column<'a, u64>,
    item: usize,
    next: usize,
}

impl<'a> Places<'a> {
    /// Returns the places of the next item.
    pub fn take(&mut self) -> ItemPlaces<'a> {
        let count = match self.counts {
            [] => 1,
            counts => counts[self.item] as usize,
        };
        let at = self.next..self.next + count;
        (self.item, self.next) = (self.item + 1, at.end);
        let Self { segments, offsets, replicas, .. } = *self;
        ItemPlaces { segments, offsets, replicas, at }
    }
}

/// The places of one item.
#[derive(Debug, Clone)]
pub struct ItemPlaces<'a> {
    segments: Column<'a, u32>,
    offsets: Column<'a, u64>,
    replicas: Column<'a, u64>,
    at: Range<usize>,
}

impl<'a> ItemPlaces<'a> {
    /// Converts the places of an object with this length to messages.
    pub fn to_messages(self, length: u64) -> impl Iterator<Item = v1::Place> + use<'a> {
        let Self { segments, offsets, replicas, at } = self;
        at.map(move |at| v1::Place {
            segment: *segments.at(at),
            offset: *offsets.at(at),
            length,
            replica: *replicas.at(at),
        })
    }
}

impl v1::ChecksumColumn {
    /// Appends the checksum of the next item that has one.
    pub fn push(&mut self, item: usize, checksum: u64) {
        self.items.push(u32::try_from(item).expect("a call has fewer items"));
        self.checksums.push(checksum);
    }
}

/// A version of an object, as a disk has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    /// The tenant.
    pub tenant: &'a str,
    /// The key.
    pub key: &'a [u8],
    /// The version.
    pub version: u64,
    /// The length; 0 where none is known.
    pub length: u64,
}

impl v1::RecordColumns {
    /// Packs records.
    pub fn pack<'a>(records: impl IntoIterator<Item = Record<'a>, IntoIter: Clone>) -> Self {
        let records = records.into_iter();
        let keys = Some(v1::KeyColumn::pack(records.clone().map(|record| record.key)));
        let mut columns = Self { keys, ..Self::default() };
        for record in records {
            columns.tenants.push(record.tenant.to_owned());
            columns.versions.push(record.version);
            columns.lengths.push(record.length);
        }
        collapse_if_uniform(&mut columns.tenants);
        collapse_if_uniform(&mut columns.lengths);
        columns
    }

    /// Checks the columns; the result yields the records.
    ///
    /// # Errors
    /// If there are no keys, or the columns differ in their lengths.
    pub fn read(&self) -> Result<impl ExactSizeIterator<Item = Record<'_>>, Error> {
        let keys = require(self.keys.as_ref())?.keys()?;
        let tenants = Column::each_or_uniform(&self.tenants, keys.len())?;
        let versions = Column::each(&self.versions, keys.len())?;
        let lengths = match &self.lengths[..] {
            [] => None,
            lengths => Some(Column::each_or_uniform(lengths, keys.len())?),
        };
        let record = move |(at, key)| Record {
            tenant: tenants.at(at).as_str(),
            key,
            version: *versions.at(at),
            length: lengths.map_or(0, |lengths| *lengths.at(at)),
        };
        Ok(keys.into_iter().enumerate().map(record))
    }
}

/// Checksums, taken item by item, in ascending order.
#[derive(Debug, Clone)]
pub struct Checksums<'a> {
    items: &'a [u32],
    checksums: &'a [u64],
}

impl<'a> Checksums<'a> {
    /// Checks a column of checksums; no column means that no item has a checksum.
    ///
    /// # Errors
    /// If an item does not exist, or is repeated or out of order.
    pub fn read(column: Option<&'a v1::ChecksumColumn>, items: usize) -> Checked<Self> {
        let Some(column) = column else { return Ok(Self { items: &[], checksums: &[] }) };
        let numbers = column.items.iter().copied();
        if column.items.len() != column.checksums.len() || !is_ascending(numbers, items) {
            return Err(ColumnMismatch);
        }
        Ok(Self { items: &column.items, checksums: &column.checksums })
    }

    /// Returns the checksum of an item, if it has one. Must be called for every item in order.
    pub fn take(&mut self, item: usize) -> Option<u64> {
        let (&first, items) = self.items.split_first()?;
        if first as usize != item {
            return None;
        }
        let (&checksum, checksums) = self.checksums.split_first()?;
        *self = Self { items, checksums };
        Some(checksum)
    }
}

/// The result of one item of a response.
pub type Outcome<'a, T> = Result<T, &'a v1::Failure>;

impl v1::StartedColumns {
    /// Returns the result of each item: version and places of the started put.
    ///
    /// # Errors
    /// If the columns are inconsistent, or the number of items differs.
    pub fn read(
        &self,
        items: usize,
    ) -> Checked<impl Iterator<Item = Outcome<'_, (u64, ItemPlaces<'_>)>>> {
        let versions = Column::each(&self.versions, items)?;
        let mut places =
            self.places.as_ref().map_or(Err(ColumnMismatch), |places| places.read(items))?;
        let mut failures = Failures::read(&self.failures, items)?;
        Ok((0..items).map(move |item| {
            let places = places.take();
            match failures.take(item) {
                None => Ok((*versions.at(item), places)),
                Some(failure) => Err(failure),
            }
        }))
    }
}

impl v1::DoneColumns {
    /// Returns the result of each item.
    ///
    /// # Errors
    /// If the columns are inconsistent, or the number of items differs.
    pub fn read(&self, items: usize) -> Checked<impl Iterator<Item = Outcome<'_, ()>>> {
        if self.items as usize != items {
            return Err(ColumnMismatch);
        }
        let mut failures = Failures::read(&self.failures, items)?;
        Ok((0..items).map(move |item| failures.take(item).map_or(Ok(()), Err)))
    }
}

/// The location of an object, read from columns.
#[derive(Debug, Clone)]
pub struct Located<'a> {
    /// The version.
    pub version: u64,
    /// The length in bytes.
    pub length: u64,
    /// The checksum of the whole object, if it has one.
    pub checksum: Option<u64>,
    /// The value of the tag that the call named; empty if the object does not have it.
    pub tag: &'a str,
    /// The places of the object's copies.
    pub places: ItemPlaces<'a>,
}

impl v1::LocatedColumns {
    /// Returns the result of each item.
    ///
    /// # Errors
    /// If the columns are inconsistent, or the number of items differs.
    pub fn read(&self, items: usize) -> Checked<impl Iterator<Item = Outcome<'_, Located<'_>>>> {
        let versions = Column::each(&self.versions, items)?;
        let lengths = Column::each_or_uniform(&self.lengths, items)?;
        let mut places =
            self.places.as_ref().map_or(Err(ColumnMismatch), |places| places.read(items))?;
        let mut checksums = Checksums::read(self.checksums.as_ref(), items)?;
        let tags = match &self.tags[..] {
            [] => None,
            tags => Some(Column::each_or_uniform(tags, items)?),
        };
        let mut failures = Failures::read(&self.failures, items)?;
        Ok((0..items).map(move |item| {
            let (places, checksum) = (places.take(), checksums.take(item));
            let tag = tags.map_or("", |tags: Column<'_, String>| tags.at(item).as_str());
            match failures.take(item) {
                None => {
                    let (version, length) = (*versions.at(item), *lengths.at(item));
                    Ok(Located { version, length, checksum, tag, places })
                }
                Some(failure) => Err(failure),
            }
        }))
    }
}

/// The end of one put, read from columns.
#[derive(Debug, Clone, Copy)]
pub struct PutRef<'a> {
    /// The key; empty if the call does not contain it.
    pub key: &'a [u8],
    /// The version, which no other put has.
    pub version: u64,
    /// The checksum of the whole object, if the writer computed one.
    pub checksum: Option<u64>,
    /// The copies that were not written.
    pub failed_replicas: &'a [u64],
    /// The copies that were written, and at which bytes of an earlier attempt may still arrive.
    pub late_replicas: &'a [u64],
}

/// Replicas of some items, by the number of the item.
#[derive(Debug, Clone, Copy)]
struct ReplicasByItem<'a> {
    items: &'a [u32],
    replicas: &'a [u64],
}

impl<'a> ReplicasByItem<'a> {
    fn read(items: &'a [u32], replicas: &'a [u64], count: usize) -> Checked<Self> {
        let last = items.last().map_or(0, |&item| item as usize + 1);
        let is_consistent = items.len() == replicas.len() && items.is_sorted() && last <= count;
        if is_consistent { Ok(Self { items, replicas }) } else { Err(ColumnMismatch) }
    }

    /// Takes the replicas of an item; the items before it were taken.
    fn take(&mut self, item: usize) -> &'a [u64] {
        let count = self.items.iter().take_while(|&&other| other as usize == item).count();
        let (taken, others) = self.replicas.split_at(count);
        (self.items, self.replicas) = (&self.items[count..], others);
        taken
    }
}

/// An iterator over the puts that a call ends.
#[derive(Debug, Clone)]
pub struct PutRefs<'a> {
    versions: std::slice::Iter<'a, u64>,
    item: usize,
    /// Empty if the call contains no keys.
    keys: std::vec::IntoIter<&'a [u8]>,
    checksums: Checksums<'a>,
    failed: ReplicasByItem<'a>,
    late: ReplicasByItem<'a>,
}

impl<'a> PutRefs<'a> {
    /// Checks the columns.
    ///
    /// # Errors
    /// If the columns are inconsistent.
    pub fn read(columns: &'a v1::PutRefColumns) -> Checked<Self> {
        let versions = &columns.versions;
        let items = versions.len();
        let failed = ReplicasByItem::read(&columns.failed_items, &columns.failed_replicas, items)?;
        let late = ReplicasByItem::read(&columns.late_items, &columns.late_replicas, items)?;
        let keys = match &columns.keys {
            None => Vec::new(),
            Some(keys) if keys.lengths.len() == items => keys.keys()?,
            Some(_) => return Err(ColumnMismatch),
        };
        let checksums = Checksums::read(columns.checksums.as_ref(), items)?;
        Ok(Self {
            versions: versions.iter(),
            item: 0,
            keys: keys.into_iter(),
            checksums,
            failed,
            late,
        })
    }
}

impl<'a> Iterator for PutRefs<'a> {
    type Item = PutRef<'a>;

    fn next(&mut self) -> Option<PutRef<'a>> {
        let version = *self.versions.next()?;
        let item = self.item;
        self.item += 1;
        let key = self.keys.next().unwrap_or_default();
        let checksum = self.checksums.take(item);
        let (failed_replicas, late_replicas) = (self.failed.take(item), self.late.take(item));
        Some(PutRef { key, version, checksum, failed_replicas, late_replicas })
    }
}

fn is_ascending(numbers: impl Iterator<Item = u32>, items: usize) -> bool {
    let mut least = 0;
    let mut numbers = numbers.map(|number| number as usize);
    numbers.all(|number| {
        let is_next = number >= least && number < items;
        least = number + 1;
        is_next
    })
}

#[cfg(test)]
mod tests;
