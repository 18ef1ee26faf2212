//! The checksums of those items that have one, in ascending order.

use super::{Checked, ColumnMismatch, is_ascending};
use crate::v1;

impl v1::ChecksumColumn {
    /// Appends the checksum of the next item that has one.
    pub fn push(&mut self, item: usize, checksum: u64) {
        self.items.push(u32::try_from(item).expect("a call has fewer items"));
        self.checksums.push(checksum);
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
