//! The failures of a response: the items that have one, in ascending order.

use super::{Checked, ColumnMismatch, is_ascending};
use crate::v1;

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

/// Appends the failure of an item to those of a response.
pub fn push_failure(
    failures: &mut Vec<v1::ItemFailure>,
    item: usize,
    failure: impl Into<v1::Failure>,
) {
    let item = u32::try_from(item).expect("a call has fewer items");
    failures.push(v1::ItemFailure { item, failure: Some(failure.into()) });
}
