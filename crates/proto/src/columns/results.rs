//! The results of the items of a response: what was started, done or located, and what failed.

use super::{
    Checked, Column, ColumnMismatch, checksums::Checksums, failures::Failures, places::ItemPlaces,
};
use crate::v1;

/// The result of one item of a response.
pub type Outcome<'a, T> = Result<T, &'a v1::Failure>;

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
