//! The items of calls, and their keys.

use bytes::Bytes;
use mooncake_base::Result;

use crate::{columns, v1};

/// The keys of a call, as its message has them.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Keys<'a> {
    /// The call names its items otherwise, or has none.
    None,
    /// One after the other.
    List(&'a [Bytes]),
    /// Of reads.
    Reads(&'a [v1::ReadRef]),
    /// Packed into a column, which may be missing.
    Column(Option<&'a v1::KeyColumn>),
}

impl<'a> Keys<'a> {
    /// Returns the first key, truncated to the bytes present; empty if there is none.
    pub(crate) fn first(self) -> Bytes {
        match self {
            Self::None => Bytes::new(),
            Self::List(keys) => keys.first().cloned().unwrap_or_default(),
            Self::Reads(reads) => reads.first().map(|read| read.key.clone()).unwrap_or_default(),
            Self::Column(keys) => keys.map(v1::KeyColumn::first).unwrap_or_default(),
        }
    }

    /// Returns the keys; `None` if there is no place for any.
    ///
    /// # Errors
    /// If the column is missing or inconsistent.
    pub(crate) fn unpack(self) -> Result<Option<Vec<&'a [u8]>>> {
        Ok(Some(match self {
            Self::None => return Ok(None),
            Self::List(keys) => keys.iter().map(|key| &key[..]).collect(),
            Self::Reads(reads) => reads.iter().map(|read| &read.key[..]).collect(),
            Self::Column(keys) => columns::require(keys)?.keys()?,
        }))
    }
}

impl v1::PutStartRequest {
    /// Returns the number of items.
    pub fn count(&self) -> usize {
        count_keys(self.key_column())
    }

    /// Returns the keys of the items.
    ///
    /// # Errors
    /// If the call has no keys, or their column is inconsistent.
    pub fn keys(&self) -> Result<Vec<&[u8]>> {
        Ok(columns::require(self.key_column())?.keys()?)
    }

    pub(crate) fn key_column(&self) -> Option<&v1::KeyColumn> {
        self.columns.as_ref()?.keys.as_ref()
    }
}

impl v1::LocateRequest {
    /// Returns the number of items.
    pub fn count(&self) -> usize {
        count_keys(self.keys.as_ref())
    }

    /// Returns the keys.
    ///
    /// # Errors
    /// If the call has no keys, or their column is inconsistent.
    pub fn keys(&self) -> Result<Vec<&[u8]>> {
        Ok(columns::require(self.keys.as_ref())?.keys()?)
    }
}

/// Returns the number of records that a call reports.
pub(crate) fn count_records(r: &v1::ReportRecordsRequest) -> usize {
    let columns = [&r.added, &r.dropped, &r.refused].into_iter().flatten();
    columns.map(|records| count_keys(records.keys.as_ref())).fold(0, usize::saturating_add)
}

/// Returns the number of puts that a call ends or revokes.
pub fn count_refs(columns: Option<&v1::PutRefColumns>) -> usize {
    columns.map_or(0, |columns| columns.versions.len())
}

fn count_keys(column: Option<&v1::KeyColumn>) -> usize {
    column.map_or(0, |column| column.lengths.len())
}

impl v1::LocateResponse {
    /// Returns the granted fences that the reader must release: fence, version and object number.
    /// Returns none if the columns are inconsistent.
    pub fn fences(&self) -> impl Iterator<Item = (u64, u64, u32)> {
        let granted = self.columns.iter().flat_map(v1::LocatedColumns::fences);
        granted.filter(|(fence, ..)| *fence != 0)
    }
}

impl v1::FenceRelease {
    /// Groups fences, each given as fence, version and object number. The objects of one locate
    /// usually share one fence.
    pub fn group(fences: impl Iterator<Item = (u64, u64, u32)>) -> Vec<Self> {
        let mut releases: Vec<Self> = Vec::new();
        for (fence, version, object) in fences {
            match releases.last_mut().filter(|last| last.fence == fence) {
                Some(last) => {
                    last.versions.push(version);
                    last.objects.push(object);
                }
                None => {
                    let (versions, objects) = (vec![version], vec![object]);
                    releases.push(Self { fence, versions, objects });
                }
            }
        }
        releases
    }
}

impl v1::LocatedColumns {
    fn fences(&self) -> impl Iterator<Item = (u64, u64, u32)> {
        let items = self.versions.len();
        let fences = columns::Column::each_or_uniform(&self.fences, items).ok();
        let pairs = self.versions.iter().zip(&self.objects).enumerate();
        fences.into_iter().flat_map(move |fences| {
            let pairs = pairs.clone();
            pairs.map(move |(item, (&version, &object))| (*fences.at(item), version, object))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_granted_fences_are_released() {
        let columns = v1::LocatedColumns {
            versions: vec![9, 0, 9],
            fences: vec![7, 0, 7],
            objects: vec![1, 0, 2],
            ..Default::default()
        };
        let response = v1::LocateResponse { columns: Some(columns), ..Default::default() };
        assert_eq!(response.fences().collect::<Vec<_>>(), [(7, 9, 1), (7, 9, 2)]);
    }
}
