//! Batches as columns: a few long lists instead of a message per item. Columns are packed here, and
//! checked here when they come from outside.
//!
//! Reading a value through a checked column costs one load. Decoding nested messages was the largest
//! part of the cost of a batch; see decision 14.

mod checksums;
mod failures;
mod keys;
mod places;
mod put_refs;
mod record_columns;
mod results;

use mooncake_base::Error;

pub use self::{
    checksums::Checksums,
    failures::{Failures, push_failure},
    places::{ItemPlaces, Places},
    put_refs::{PutRef, PutRefs},
    record_columns::Record,
    results::{Located, Outcome},
};

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
