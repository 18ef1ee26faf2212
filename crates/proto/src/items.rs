//! The number of items of a call, and their keys.

use bytes::Bytes;
use mooncake_base::Result;

use crate::{
    columns,
    v1::{self, request::Call},
};

impl Call {
    /// Returns the number of items; 0 for calls without items.
    pub fn items(&self) -> usize {
        match self {
            Self::Mount(r) => r.segments.len(),
            Self::Unmount(r) => r.segments.len(),
            Self::PutStart(r) => r.count(),
            Self::PutEnd(r) => count_refs(r.columns.as_ref()),
            Self::PutRevoke(r) => count_refs(r.columns.as_ref()),
            Self::PutRenew(r) => r.versions.len(),
            Self::Locate(r) => r.count(),
            Self::Verify(r) => r.reads.len(),
            Self::Probe(r) => r.keys.len().saturating_mul(1 + r.suffixes.len()),
            Self::Remove(r) => r.keys.len(),
            Self::Describe(r) => r.keys.len(),
            Self::SetExpiry(r) => r.keys.len(),
            _ => 0,
        }
    }

    /// Returns the first key, truncated to the bytes present; empty if there is none, or if the
    /// call names its items otherwise.
    pub fn first_key(&self) -> Bytes {
        let first = match self {
            Self::PutStart(r) => return first_of_column(r.key_column()),
            Self::Locate(r) => return first_of_column(r.keys.as_ref()),
            Self::Verify(r) => r.reads.first().map(|read| &read.key),
            Self::Probe(r) => r.keys.first(),
            Self::Remove(r) => r.keys.first(),
            Self::Describe(r) => r.keys.first(),
            Self::SetExpiry(r) => r.keys.first(),
            _ => None,
        };
        first.cloned().unwrap_or_default()
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

    fn key_column(&self) -> Option<&v1::KeyColumn> {
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

fn first_of_column(keys: Option<&v1::KeyColumn>) -> Bytes {
    keys.map(v1::KeyColumn::first).unwrap_or_default()
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
    fn call_tells_its_items_and_first_key() {
        let keys = ["a", "bc"];
        let locate =
            v1::LocateRequest { keys: Some(v1::KeyColumn::pack(keys)), ..Default::default() };
        assert_eq!(locate.keys().unwrap(), [&b"a"[..], b"bc"]);
        let put = Some(v1::PutColumns::pack(keys.map(|key| (key, 1))));
        let start = v1::PutStartRequest { columns: put, ..Default::default() };
        assert_eq!(start.keys().unwrap(), [&b"a"[..], b"bc"]);
        for call in [Call::Locate(locate), Call::PutStart(start)] {
            assert_eq!((call.items(), &call.first_key()[..]), (2, &b"a"[..]), "{call:?}");
        }
        let columns = Some(v1::PutRefColumns { versions: vec![3, 4], ..Default::default() });
        for call in [
            Call::PutEnd(v1::PutEndRequest { caller: None, columns: columns.clone() }),
            Call::PutRevoke(v1::PutRevokeRequest { caller: None, columns }),
        ] {
            assert_eq!((call.items(), call.first_key().len()), (2, 0), "{call:?}");
        }
    }

    #[test]
    fn call_without_columns_has_no_keys() {
        for call in [
            Call::Locate(v1::LocateRequest::default()),
            Call::PutStart(v1::PutStartRequest::default()),
        ] {
            assert_eq!((call.items(), call.first_key().len()), (0, 0), "{call:?}");
        }
        let refused = v1::LocateRequest::default().keys().unwrap_err();
        assert!(refused.to_string().contains("columns"), "{refused}");
        assert!(v1::PutStartRequest::default().keys().is_err());
    }

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
