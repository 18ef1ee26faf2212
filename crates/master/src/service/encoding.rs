//! The columns of the calls about objects: requests are read as items, replies are built item by
//! item.

use mooncake_base::{Error, Result, Version};
use mooncake_proto::{
    columns::{self, Column, PutRef, PutRefs, collapse_if_uniform, push_failure},
    v1,
};
use smallvec::SmallVec;

use super::wire::SegmentTable;
use crate::state::{LocatedObject, Started, State};

/// One object of a put-start request.
#[derive(Debug, Clone, Copy)]
pub(super) struct PutItem<'a> {
    pub(super) key: &'a [u8],
    pub(super) length: u64,
    /// The group name; empty for none.
    pub(super) group: &'a [u8],
    /// The version to replace, if the put names one.
    pub(super) if_version: Option<Version>,
}

/// Returns the items of a put-start request.
///
/// # Errors
/// The request has no columns, or columns that do not match.
pub(super) fn put_items(r: &v1::PutStartRequest) -> Result<Vec<PutItem<'_>>> {
    let columns = columns::require(r.columns.as_ref())?;
    let keys = r.keys()?;
    let lengths = Column::each_or_uniform(&columns.lengths, keys.len())?;
    let groups = match &columns.groups[..] {
        [] => None,
        groups => Some(Column::each(groups, keys.len())?),
    };
    let versions = versions(&columns.if_versions, keys.len())?;
    let item = |(at, key)| PutItem {
        key,
        length: *lengths.at(at),
        group: groups.map_or(&[], |groups| groups.at(at).as_bytes()),
        if_version: version_at(versions, at),
    };
    Ok(keys.into_iter().enumerate().map(item).collect())
}

/// Checks a column of expected versions; `None`: no item has a condition.
pub(super) fn versions(versions: &[u64], items: usize) -> Result<Option<Column<'_, u64>>> {
    match versions {
        [] => Ok(None),
        versions => Ok(Some(Column::each_or_uniform(versions, items)?)),
    }
}

/// Returns the version that an item is expected to have.
pub(super) fn version_at(versions: Option<Column<'_, u64>>, item: usize) -> Option<Version> {
    versions.map(|versions| Version(*versions.at(item))).filter(|version| version.0 != 0)
}

/// Returns the puts of a put-end or put-revoke request.
///
/// # Errors
/// The request has no columns, or columns that do not match.
pub(super) fn put_refs(columns: Option<&v1::PutRefColumns>) -> Result<Vec<PutRef<'_>>> {
    Ok(PutRefs::read(columns::require(columns)?)?.collect())
}

/// The reply to put-start, built item by item.
#[derive(Debug)]
pub(super) struct PutStartReply {
    columns: v1::StartedColumns,
    places: v1::PlaceColumns,
}

impl PutStartReply {
    pub(super) fn with_capacity(items: usize) -> Self {
        let columns =
            v1::StartedColumns { versions: Vec::with_capacity(items), ..Default::default() };
        Self { columns, places: place_columns(items) }
    }

    pub(super) fn push(
        &mut self,
        state: &State,
        segments: &mut SegmentTable,
        started: Result<Started, v1::Failure>,
    ) {
        let Self { columns, places } = self;
        let item = columns.versions.len();
        match started {
            Ok(started) => {
                columns.versions.push(started.version.0);
                let each = started.places.iter();
                places.push(item, each.map(|&place| segments.place(state, place)));
            }
            Err(failure) => {
                columns.versions.push(0);
                places.push(item, std::iter::empty());
                push_failure(&mut columns.failures, item, failure);
            }
        }
    }

    pub(super) fn into_response(
        self,
        segments: SegmentTable,
        write_window_ms: u64,
        log_mark: Option<v1::LogMark>,
    ) -> v1::PutStartResponse {
        let Self { mut columns, mut places } = self;
        collapse_if_uniform(&mut places.segments);
        columns.places = Some(places);
        let segments = segments.into_segments();
        v1::PutStartResponse { segments, write_window_ms, columns: Some(columns), log_mark }
    }
}

/// Appends the outcome of the next item to the reply to put-end or put-revoke.
pub(super) fn push_done(reply: &mut v1::DoneColumns, outcome: Result<(), Error>) {
    if let Err(error) = outcome {
        push_failure(&mut reply.failures, reply.items as usize, &error);
    }
    reply.items += 1;
}

/// The reply to locate, built object by object.
#[derive(Debug)]
pub(super) struct LocateReply<'a> {
    columns: v1::LocatedColumns,
    places: v1::PlaceColumns,
    /// Name of the wanted tag; empty: none.
    tag: &'a str,
}

impl<'a> LocateReply<'a> {
    pub(super) fn new(items: usize, tag: &'a str) -> Self {
        let columns = v1::LocatedColumns {
            versions: Vec::with_capacity(items),
            lengths: Vec::with_capacity(items),
            fences: Vec::with_capacity(items),
            objects: Vec::with_capacity(items),
            ..Default::default()
        };
        Self { columns, places: place_columns(items), tag }
    }

    pub(super) fn push(
        &mut self,
        state: &State,
        segments: &mut SegmentTable,
        found: Result<LocatedObject>,
    ) {
        let Self { columns, places, tag } = self;
        let item = columns.versions.len();
        if !tag.is_empty() {
            let value = found.as_ref().ok().and_then(|object| state.tag(object, tag));
            columns.tags.push(value.unwrap_or_default().to_owned());
        }
        let (version, length, hold) = match found {
            Ok(object) => {
                let each = object.places.iter().map(|&place| segments.place(state, place));
                match object.disk {
                    None => places.push(item, each),
                    // Memory first: some callers look at the first copy only.
                    Some(disk) => {
                        let mut each: SmallVec<[v1::Place; 2]> = each.collect();
                        each.push(segments.disk_place(state, disk));
                        places.push(item, each.into_iter());
                    }
                }
                if let Some(checksum) = object.checksum {
                    columns.checksums.get_or_insert_default().push(item, checksum);
                }
                (object.version.0, object.length, object.ticket)
            }
            Err(error) => {
                places.push(item, std::iter::empty());
                push_failure(&mut columns.failures, item, &error);
                (0, 0, None)
            }
        };
        columns.versions.push(version);
        columns.lengths.push(length);
        columns.fences.push(hold.map_or(0, |hold| hold.fence));
        columns.objects.push(hold.map_or(0, |hold| hold.object.number()));
    }

    pub(super) fn into_response(self, segments: SegmentTable, fence_ms: u64) -> v1::LocateResponse {
        let Self { mut columns, mut places, .. } = self;
        collapse_if_uniform(&mut places.segments);
        collapse_if_uniform(&mut columns.lengths);
        collapse_if_uniform(&mut columns.fences);
        collapse_if_uniform(&mut columns.tags);
        columns.places = Some(places);
        let segments = segments.into_segments();
        v1::LocateResponse { segments, fence_ms, columns: Some(columns) }
    }
}

/// Returns empty columns with capacity for one place per item.
fn place_columns(items: usize) -> v1::PlaceColumns {
    v1::PlaceColumns {
        counts: Vec::new(),
        segments: Vec::with_capacity(items),
        offsets: Vec::with_capacity(items),
        replicas: Vec::with_capacity(items),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys() -> Option<v1::KeyColumn> {
        Some(v1::KeyColumn::pack(["a", "bc"]))
    }

    fn start(lengths: &[u64], groups: &[&str]) -> v1::PutStartRequest {
        let groups = groups.iter().map(ToString::to_string).collect();
        let lengths = lengths.to_vec();
        let columns = v1::PutColumns { keys: keys(), lengths, groups, if_versions: vec![] };
        v1::PutStartRequest { columns: Some(columns), ..Default::default() }
    }

    #[test]
    fn put_items_need_matching_columns() {
        let read = |lengths: &[u64], groups: &[&str]| {
            let request = start(lengths, groups);
            let items = put_items(&request)?;
            Ok(items
                .iter()
                .map(|item| (item.key.to_vec(), item.length, item.group.to_vec()))
                .collect::<Vec<_>>())
        };
        let expected = |at: usize, length, group: &str| {
            ([&b"a"[..], b"bc"][at].to_vec(), length, group.as_bytes().to_vec())
        };
        let check = |found: Result<Vec<_>>, items| assert_eq!(found.unwrap(), items);
        check(read(&[7], &[]), vec![expected(0, 7, ""), expected(1, 7, "")]);
        check(read(&[7, 8], &["g", ""]), vec![expected(0, 7, "g"), expected(1, 8, "")]);
        for (lengths, groups) in [(&[][..], &[][..]), (&[1; 3], &[]), (&[1], &["g"])] {
            assert!(read(lengths, groups).is_err(), "{lengths:?} {groups:?}");
        }
    }

    #[test]
    fn put_refs_need_matching_columns() {
        let columns = v1::PutRefColumns {
            versions: vec![3, 4],
            checksums: Some(v1::ChecksumColumn { items: vec![1], checksums: vec![9] }),
            failed_items: vec![0, 0],
            failed_replicas: vec![5, 6],
            keys: None,
            late_items: vec![1],
            late_replicas: vec![7],
        };
        let found = put_refs(Some(&columns)).unwrap();
        let shown: Vec<_> = found
            .iter()
            .map(|put| (put.key, put.version, put.checksum, put.failed_replicas))
            .collect();
        assert_eq!([found[0].late_replicas, found[1].late_replicas], [&[][..], &[7]]);
        assert_eq!(shown, [(&b""[..], 3, None, &[5, 6][..]), (b"", 4, Some(9), &[])]);
        let with_keys = v1::PutRefColumns { keys: keys(), ..columns.clone() };
        let found = put_refs(Some(&with_keys)).unwrap();
        assert_eq!([found[0].key, found[1].key], [&b"a"[..], b"bc"]);
        type Break = fn(&mut v1::PutRefColumns);
        let breaks: [Break; 7] = [
            |columns| {
                columns.keys = Some(v1::KeyColumn { lengths: vec![1], bytes: vec![9].into() })
            },
            |columns| columns.versions.truncate(1),
            |columns| columns.failed_items = vec![0, 2],
            |columns| columns.failed_items = vec![1, 0],
            |columns| columns.failed_replicas.truncate(1),
            |columns| columns.late_items = vec![2],
            |columns| columns.late_replicas.clear(),
        ];
        for (number, spoil) in breaks.iter().enumerate() {
            let mut columns = columns.clone();
            spoil(&mut columns);
            assert!(put_refs(Some(&columns)).is_err(), "break {number}");
        }
        assert!(put_refs(None).is_err(), "no columns");
    }
}
