//! The number of items of a call and their keys, in either batch encoding.

use bytes::Bytes;
use mooncake_base::Result;

use crate::{
    columns::BatchEncoding,
    v1::{self, request::Call},
};

impl Call {
    /// Returns the number of items; 0 for calls without items.
    pub fn items(&self) -> usize {
        match self {
            Self::Mount(r) => r.segments.len(),
            Self::Unmount(r) => r.segments.len(),
            Self::PutStart(r) => r.count(),
            Self::PutEnd(r) => r.count(),
            Self::PutRevoke(r) => r.count(),
            Self::Locate(r) => r.count(),
            Self::Verify(r) => r.reads.len(),
            Self::Probe(r) => r.keys.len(),
            Self::Remove(r) => r.keys.len(),
            _ => 0,
        }
    }

    /// Returns the first key, truncated to the bytes present; empty if there is none, or if the
    /// call names its items otherwise.
    pub fn first_key(&self) -> Bytes {
        let (item, column) = match self {
            Self::PutStart(r) => (r.items.first().map(|item| &item.key), keys_of_put(r)),
            Self::PutEnd(r) => (r.puts.first().map(|put| &put.key), None),
            Self::PutRevoke(r) => (r.puts.first().map(|put| &put.key), None),
            Self::Locate(r) => (r.keys.first(), r.columns.as_ref()),
            Self::Verify(r) => (r.reads.first().map(|read| &read.key), None),
            Self::Probe(r) => (r.keys.first(), None),
            Self::Remove(r) => (r.keys.first(), None),
            _ => (None, None),
        };
        match (item, column) {
            (Some(key), _) => key.clone(),
            (None, Some(column)) => column.first(),
            (None, None) => Bytes::new(),
        }
    }
}

impl v1::PutStartRequest {
    /// Returns the number of items.
    pub fn count(&self) -> usize {
        self.items.len() + count(keys_of_put(self))
    }

    /// Returns the keys of the items.
    ///
    /// # Errors
    /// If the call uses both encodings, or its columns are inconsistent.
    pub fn keys(&self) -> Result<Vec<&[u8]>> {
        match BatchEncoding::of(&self.items, self.columns.as_ref())? {
            BatchEncoding::Items(items) => Ok(items.iter().map(|item| &item.key[..]).collect()),
            BatchEncoding::Columns(columns) => column_keys(columns.keys.as_ref()),
        }
    }
}

impl v1::PutEndRequest {
    /// Returns the number of items.
    pub fn count(&self) -> usize {
        self.puts.len() + count_refs(self.columns.as_ref())
    }
}

impl v1::PutRevokeRequest {
    /// Returns the number of items.
    pub fn count(&self) -> usize {
        self.puts.len() + count_refs(self.columns.as_ref())
    }
}

impl v1::LocateRequest {
    /// Returns the number of items.
    pub fn count(&self) -> usize {
        self.keys.len() + count(self.columns.as_ref())
    }

    /// Returns the keys.
    ///
    /// # Errors
    /// If the call uses both encodings, or its columns are inconsistent.
    pub fn keys(&self) -> Result<Vec<&[u8]>> {
        match BatchEncoding::of(&self.keys, self.columns.as_ref())? {
            BatchEncoding::Items(keys) => Ok(keys.iter().map(|key| &key[..]).collect()),
            BatchEncoding::Columns(column) => column_keys(Some(column)),
        }
    }
}

/// Returns the keys of a column; no keys if there is no column.
///
/// # Errors
/// If the bytes are more or fewer than the sum of the lengths.
pub fn column_keys(column: Option<&v1::KeyColumn>) -> Result<Vec<&[u8]>> {
    Ok(column.map_or_else(|| Ok(Vec::new()), v1::KeyColumn::keys)?)
}

fn keys_of_put(r: &v1::PutStartRequest) -> Option<&v1::KeyColumn> {
    r.columns.as_ref()?.keys.as_ref()
}

fn count_refs(columns: Option<&v1::PutRefColumns>) -> usize {
    columns.map_or(0, |columns| columns.versions.len())
}

fn count(column: Option<&v1::KeyColumn>) -> usize {
    column.map_or(0, |column| column.lengths.len())
}

impl v1::LocateResponse {
    /// Returns the granted fences that the reader must release: fence, version and object number.
    /// Returns none if the columns are inconsistent.
    pub fn fences(&self) -> impl Iterator<Item = (u64, u64, u32)> {
        let one = |result: &v1::LocateResult| (result.fence, result.version, result.object);
        let items = self.results.iter().map(one);
        let columns = self.columns.iter().flat_map(v1::LocatedColumns::fences);
        items.chain(columns).filter(|(fence, ..)| *fence != 0)
    }
}

impl v1::LocatedColumns {
    fn fences(&self) -> impl Iterator<Item = (u64, u64, u32)> {
        let items = self.versions.len();
        let fences = crate::columns::Column::each_or_uniform(&self.fences, items).ok();
        let pairs = self.versions.iter().zip(&self.objects).enumerate();
        fences.into_iter().flat_map(move |fences| {
            let pairs = pairs.clone();
            pairs.map(move |(item, (&version, &object))| (*fences.at(item), version, object))
        })
    }
}

#[cfg(test)]
mod tests {
    use mooncake_base::KeyRef;

    use super::*;

    fn columns(keys: &[&str]) -> v1::KeyColumn {
        let keys: Vec<_> = keys.iter().map(|key| KeyRef::new(key.as_bytes()).unwrap()).collect();
        v1::KeyColumn::pack(keys.into_iter())
    }

    #[test]
    fn both_encodings_have_the_same_items() {
        let one_by_one = v1::LocateRequest {
            keys: vec![Bytes::from_static(b"a"), Bytes::from_static(b"bc")],
            ..Default::default()
        };
        let in_columns =
            v1::LocateRequest { columns: Some(columns(&["a", "bc"])), ..Default::default() };
        assert_eq!(in_columns.keys().unwrap(), [&b"a"[..], b"bc"]);
        assert_eq!(in_columns.keys().unwrap(), one_by_one.keys().unwrap());
        let put = v1::PutColumns { keys: Some(columns(&["a", "bc"])), ..Default::default() };
        for call in [
            Call::Locate(one_by_one),
            Call::Locate(in_columns),
            Call::PutStart(v1::PutStartRequest { columns: Some(put), ..Default::default() }),
        ] {
            assert_eq!((call.items(), &call.first_key()[..]), (2, &b"a"[..]), "{call:?}");
        }
        let refs = || Some(v1::PutRefColumns { versions: vec![3, 4], ..Default::default() });
        for call in [
            Call::PutEnd(v1::PutEndRequest { columns: refs(), ..Default::default() }),
            Call::PutRevoke(v1::PutRevokeRequest { columns: refs(), ..Default::default() }),
        ] {
            assert_eq!((call.items(), call.first_key().len()), (2, 0), "{call:?}");
        }
    }

    #[test]
    fn rejects_a_call_in_both_encodings() {
        let both = v1::LocateRequest {
            keys: vec![Bytes::from_static(b"a")],
            columns: Some(columns(&["b"])),
            ..Default::default()
        };
        assert!(both.keys().is_err());
        assert_eq!(Call::Locate(both).items(), 2);
    }

    #[test]
    fn both_encodings_have_the_same_fences() {
        let result =
            |fence, object| v1::LocateResult { fence, version: 9, object, ..Default::default() };
        let results = vec![result(7, 1), result(0, 0), result(7, 2)];
        let items = v1::LocateResponse { results, ..Default::default() };
        let located = v1::LocatedColumns {
            versions: vec![9, 0, 9],
            fences: vec![7, 0, 7],
            objects: vec![1, 0, 2],
            ..Default::default()
        };
        let columns = v1::LocateResponse { columns: Some(located), ..Default::default() };
        assert_eq!(items.fences().collect::<Vec<_>>(), [(7, 9, 1), (7, 9, 2)]);
        assert_eq!(columns.fences().collect::<Vec<_>>(), [(7, 9, 1), (7, 9, 2)]);
    }
}
