//! The places of the copies of many objects.

use std::ops::Range;

use super::{Checked, Column, ColumnMismatch};
use crate::v1;

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
