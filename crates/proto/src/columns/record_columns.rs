//! Records of disks.

use mooncake_base::Error;

use super::{Column, collapse_if_uniform, require};
use crate::v1;

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
