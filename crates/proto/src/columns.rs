//! Columns: the form in which a batch of small objects crosses the wire as a few long lists, and not
//! as a message for each item. Packed here, and checked here when they come from outside.
//!
//! What is read through a checked column costs a load, which is the point: the codec of messages
//! within messages was the largest part of a batch. See decision 14.

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use mooncake_base::{Error, KeyRef};

use crate::v1;

/// Columns that do not fit together: of other lengths, or with numbers of items that there are not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColumnMismatch;

impl From<ColumnMismatch> for Error {
    fn from(_: ColumnMismatch) -> Self {
        Self::invalid("the columns of the call do not fit together")
    }
}

/// What a read of columns gives.
pub type Checked<T> = Result<T, ColumnMismatch>;

/// The items of a call, in the one form in which it names them.
#[derive(Debug, Clone, Copy)]
pub enum BatchEncoding<'a, I, C> {
    /// A message each.
    Items(&'a [I]),
    /// Columns.
    Columns(&'a C),
}

impl<'a, I, C> BatchEncoding<'a, I, C> {
    /// Looks which form it is.
    ///
    /// # Errors
    /// It is both.
    pub fn of(items: &'a [I], columns: Option<&'a C>) -> Result<Self, Error> {
        match columns {
            None => Ok(Self::Items(items)),
            Some(columns) if items.is_empty() => Ok(Self::Columns(columns)),
            Some(_) => Err(Error::invalid("the call names items both one by one and in columns")),
        }
    }
}

/// A checked column: a value for each item.
#[derive(Debug)]
pub struct Column<'a, T> {
    values: &'a [T],
    /// 0: its only value stands for all.
    step: usize,
}

impl<T> Clone for Column<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Column<'_, T> {}

impl<'a, T> Column<'a, T> {
    /// One value for each of so many items.
    ///
    /// # Errors
    /// It has another number of values.
    pub fn each(values: &'a [T], items: usize) -> Checked<Self> {
        if values.len() == items { Ok(Self { values, step: 1 }) } else { Err(ColumnMismatch) }
    }

    /// The same, or one value for all.
    ///
    /// # Errors
    /// It has another number of values.
    pub fn each_or_uniform(values: &'a [T], items: usize) -> Checked<Self> {
        if values.len() == 1 { Ok(Self { values, step: 0 }) } else { Self::each(values, items) }
    }

    /// The value of that item.
    ///
    /// # Panics
    /// There is no such item.
    pub fn at(&self, item: usize) -> &'a T {
        &self.values[item * self.step]
    }
}

/// Leaves one value to stand for all if all are the same.
pub fn collapse_if_uniform<T: PartialEq>(values: &mut Vec<T>) {
    if let Some((first, rest)) = values.split_first()
        && rest.iter().all(|value| value == first)
    {
        values.truncate(1);
    }
}

/// One more item's failure, at the end of those of an answer.
pub fn push_failure(failures: &mut Vec<v1::ItemFailure>, item: usize, error: &Error) {
    let item = u32::try_from(item).expect("a call has fewer items");
    failures.push(v1::ItemFailure { item, failure: Some(error.into()) });
}

/// The failures of an answer, taken item by item, in their order.
#[derive(Debug, Clone)]
pub struct Failures<'a>(&'a [v1::ItemFailure]);

impl<'a> Failures<'a> {
    /// Checks them.
    ///
    /// # Errors
    /// There is no such item, or one comes twice or out of order, or does not say what failed.
    pub fn read(failures: &'a [v1::ItemFailure], items: usize) -> Checked<Self> {
        let is_whole = failures.iter().all(|failure| failure.failure.is_some());
        let numbers = failures.iter().map(|failure| failure.item);
        if is_whole && is_ascending(numbers, items) {
            Ok(Self(failures))
        } else {
            Err(ColumnMismatch)
        }
    }

    /// The failure of that item, if it failed. To be asked of every item in turn.
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
    /// Puts keys end to end.
    pub fn pack<'a>(keys: impl Iterator<Item = KeyRef<'a>> + Clone) -> Self {
        let total = keys.clone().map(|key| key.as_bytes().len()).sum();
        let mut bytes = BytesMut::with_capacity(total);
        let length = |key: KeyRef<'_>| {
            bytes.extend_from_slice(key.as_bytes());
            u32::try_from(key.as_bytes().len()).expect("keys are short")
        };
        let lengths = keys.map(length).collect();
        Self { bytes: bytes.freeze(), lengths }
    }

    /// The keys. Whether there can be such a key is not looked at.
    ///
    /// # Errors
    /// There are more or fewer bytes than the lengths say.
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

    /// The first key, as far as it is there.
    pub fn first(&self) -> Bytes {
        let length = self.lengths.first().map_or(0, |&length| length as usize);
        self.bytes.slice(..length.min(self.bytes.len()))
    }
}

impl v1::PlaceColumns {
    /// Adds the places of the next item, which is that one; their lengths are not kept.
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

    /// Checks them, to be taken item by item.
    ///
    /// # Errors
    /// There are more or fewer places than the counts say, or counts than items.
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

/// The places of many items, checked.
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
    /// Those of the next item.
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
    /// As messages, of an object of that length.
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
    /// Adds the checksum of the next item that has one.
    pub fn push(&mut self, item: usize, checksum: u64) {
        self.items.push(u32::try_from(item).expect("a call has fewer items"));
        self.checksums.push(checksum);
    }
}

/// Checksums, taken item by item, in their order.
#[derive(Debug, Clone)]
pub struct Checksums<'a> {
    items: &'a [u32],
    checksums: &'a [u64],
}

impl<'a> Checksums<'a> {
    /// Checks them; none: no item has one.
    ///
    /// # Errors
    /// There is no such item, or one comes twice or out of order.
    pub fn read(column: Option<&'a v1::ChecksumColumn>, items: usize) -> Checked<Self> {
        let Some(column) = column else { return Ok(Self { items: &[], checksums: &[] }) };
        let numbers = column.items.iter().copied();
        if column.items.len() != column.checksums.len() || !is_ascending(numbers, items) {
            return Err(ColumnMismatch);
        }
        Ok(Self { items: &column.items, checksums: &column.checksums })
    }

    /// The checksum of that item, if it has one. To be asked of every item in turn.
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

/// An item of an answer: what it is, or why it failed.
pub type Outcome<'a, T> = Result<T, &'a v1::Failure>;

impl v1::StartedColumns {
    /// The answer for each of so many items: version and places of a put that may be written.
    ///
    /// # Errors
    /// They do not fit together, or are of another number of items.
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
    /// The answer for each of so many items.
    ///
    /// # Errors
    /// They do not fit together, or are of another number of items.
    pub fn read(&self, items: usize) -> Checked<impl Iterator<Item = Outcome<'_, ()>>> {
        if self.items as usize != items {
            return Err(ColumnMismatch);
        }
        let mut failures = Failures::read(&self.failures, items)?;
        Ok((0..items).map(move |item| failures.take(item).map_or(Ok(()), Err)))
    }
}

/// Where an object lies, as columns say.
#[derive(Debug, Clone)]
pub struct Located<'a> {
    /// As in `LocateResult`.
    pub version: u64,
    /// As in `LocateResult`.
    pub length: u64,
    /// As in `LocateResult`.
    pub checksum: Option<u64>,
    /// Its copies.
    pub places: ItemPlaces<'a>,
}

impl v1::LocatedColumns {
    /// The answer for each of so many items.
    ///
    /// # Errors
    /// They do not fit together, or are of another number of items.
    pub fn read(&self, items: usize) -> Checked<impl Iterator<Item = Outcome<'_, Located<'_>>>> {
        let versions = Column::each(&self.versions, items)?;
        let lengths = Column::each_or_uniform(&self.lengths, items)?;
        let mut places =
            self.places.as_ref().map_or(Err(ColumnMismatch), |places| places.read(items))?;
        let mut checksums = Checksums::read(self.checksums.as_ref(), items)?;
        let mut failures = Failures::read(&self.failures, items)?;
        Ok((0..items).map(move |item| {
            let (places, checksum) = (places.take(), checksums.take(item));
            match failures.take(item) {
                None => {
                    let (version, length) = (*versions.at(item), *lengths.at(item));
                    Ok(Located { version, length, checksum, places })
                }
                Some(failure) => Err(failure),
            }
        }))
    }
}

/// What is said of one of many puts that end.
#[derive(Debug, Clone, Copy)]
pub struct PutRef<'a> {
    /// As in the message of that name.
    pub version: u64,
    /// As in the message of that name.
    pub checksum: Option<u64>,
    /// As in the message of that name.
    pub failed_replicas: &'a [u64],
}

/// The puts of a call in columns, item after item.
#[derive(Debug, Clone)]
pub struct PutRefs<'a> {
    versions: std::slice::Iter<'a, u64>,
    item: usize,
    checksums: Checksums<'a>,
    failed_items: &'a [u32],
    failed_replicas: &'a [u64],
}

impl<'a> PutRefs<'a> {
    /// Checks them.
    ///
    /// # Errors
    /// They do not fit together.
    pub fn read(columns: &'a v1::PutRefColumns) -> Checked<Self> {
        let v1::PutRefColumns { versions, failed_items, failed_replicas, .. } = columns;
        let items = versions.len();
        let last = failed_items.last().map_or(0, |&item| item as usize + 1);
        let is_even = failed_items.len() == failed_replicas.len()
            && failed_items.is_sorted()
            && last <= items;
        if !is_even {
            return Err(ColumnMismatch);
        }
        let checksums = Checksums::read(columns.checksums.as_ref(), items)?;
        Ok(Self { versions: versions.iter(), item: 0, checksums, failed_items, failed_replicas })
    }
}

impl<'a> Iterator for PutRefs<'a> {
    type Item = PutRef<'a>;

    fn next(&mut self) -> Option<PutRef<'a>> {
        let version = *self.versions.next()?;
        let item = self.item;
        self.item += 1;
        let count = self.failed_items.iter().take_while(|&&failed| failed as usize == item).count();
        let (failed_replicas, others) = self.failed_replicas.split_at(count);
        self.failed_items = &self.failed_items[count..];
        self.failed_replicas = others;
        Some(PutRef { version, checksum: self.checksums.take(item), failed_replicas })
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
