//! The two encodings of the calls about objects: requests are converted from either encoding to
//! items, replies are built in the encoding of their request.
//!
//! A request in columns always has a reply in columns.

use mooncake_base::Result;
use mooncake_proto::{
    columns::{BatchEncoding, Column, PutRefs, collapse_if_uniform, push_failure},
    items::column_keys,
    v1::{self, ItemResult},
};

use super::wire::SegmentTable;
use crate::state::{LocatedObject, Started, State};

/// One object of a put-start request.
#[derive(Debug, Clone, Copy)]
pub(super) struct PutItem<'a> {
    pub(super) key: &'a [u8],
    pub(super) length: u64,
    /// The group name; empty for none.
    pub(super) group: &'a [u8],
}

/// Returns the items of a put-start request.
///
/// # Errors
/// The request has items in both encodings, or columns that do not match.
pub(super) fn put_items(r: &v1::PutStartRequest) -> Result<Vec<PutItem<'_>>> {
    let columns = match BatchEncoding::of(&r.items, r.columns.as_ref())? {
        BatchEncoding::Items(items) => {
            let items = items.iter().map(|item| PutItem {
                key: &item.key,
                length: item.length,
                group: item.group.as_bytes(),
            });
            return Ok(items.collect());
        }
        BatchEncoding::Columns(columns) => columns,
    };
    let keys = column_keys(columns.keys.as_ref())?;
    let lengths = Column::each_or_uniform(&columns.lengths, keys.len())?;
    let groups = match &columns.groups[..] {
        [] => None,
        groups => Some(Column::each(groups, keys.len())?),
    };
    let item = |(at, key)| PutItem {
        key,
        length: *lengths.at(at),
        group: groups.map_or(&[], |groups| groups.at(at).as_bytes()),
    };
    Ok(keys.into_iter().enumerate().map(item).collect())
}

/// One object of a put-end or put-revoke request.
#[derive(Debug, Clone, Copy)]
pub(super) struct PutEndItem<'a> {
    /// The key; empty if the request does not contain it.
    pub(super) key: &'a [u8],
    pub(super) version: u64,
    pub(super) checksum: Option<u64>,
    pub(super) failed_replicas: &'a [u64],
}

/// Returns the items of a put-end or put-revoke request.
///
/// # Errors
/// The request has items in both encodings, or columns that do not match.
pub(super) fn put_end_items<'a>(
    puts: &'a [v1::PutRef],
    columns: Option<&'a v1::PutRefColumns>,
) -> Result<Vec<PutEndItem<'a>>> {
    match BatchEncoding::of(puts, columns)? {
        BatchEncoding::Items(puts) => {
            let item = |put: &'a v1::PutRef| PutEndItem {
                key: &put.key,
                version: put.version,
                checksum: put.checksum,
                failed_replicas: &put.failed_replicas,
            };
            Ok(puts.iter().map(item).collect())
        }
        BatchEncoding::Columns(columns) => {
            let item = |put: mooncake_proto::columns::PutRef<'a>| PutEndItem {
                key: put.key,
                version: put.version,
                checksum: put.checksum,
                failed_replicas: put.failed_replicas,
            };
            Ok(PutRefs::read(columns)?.map(item).collect())
        }
    }
}

/// The reply to put-start, built item by item.
#[derive(Debug)]
pub(super) enum PutStartReply {
    Items(Vec<v1::PutStartResult>),
    Columns(v1::StartedColumns),
}

impl PutStartReply {
    /// Creates an empty reply in the encoding of the request.
    pub(super) fn matching(r: &v1::PutStartRequest, items: usize) -> Self {
        if r.columns.is_none() {
            return Self::Items(Vec::with_capacity(items));
        }
        Self::Columns(v1::StartedColumns {
            versions: Vec::with_capacity(items),
            places: Some(place_columns(items)),
            failures: Vec::new(),
        })
    }

    pub(super) fn push(
        &mut self,
        state: &State,
        segments: &mut SegmentTable,
        started: Result<Started, v1::Failure>,
    ) {
        match (self, started) {
            (Self::Items(results), Ok(Started { version, places })) => {
                let places = segments.places(state, &places);
                results.push(v1::PutStartResult { failure: None, version: version.0, places });
            }
            (Self::Items(results), Err(failure)) => {
                let failure = Some(failure);
                results.push(v1::PutStartResult { failure, ..Default::default() });
            }
            (Self::Columns(columns), started) => {
                let item = columns.versions.len();
                let places = columns.places.get_or_insert_default();
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
        }
    }

    pub(super) fn into_response(
        self,
        segments: SegmentTable,
        write_window_ms: u64,
        log_mark: Option<v1::LogMark>,
    ) -> v1::PutStartResponse {
        let segments = segments.into_segments();
        let (results, columns) = match self {
            Self::Items(results) => (results, None),
            Self::Columns(mut columns) => {
                collapse_segments(&mut columns.places);
                (Vec::new(), Some(columns))
            }
        };
        v1::PutStartResponse { results, segments, write_window_ms, columns, log_mark }
    }
}

/// The reply to put-end or put-revoke, built item by item.
#[derive(Debug)]
pub(super) enum PutEndReply {
    Items(Vec<ItemResult>),
    Columns { items: usize, failures: Vec<v1::ItemFailure> },
}

impl PutEndReply {
    /// Creates an empty reply in the encoding of the request.
    pub(super) fn matching(columns: Option<&v1::PutRefColumns>, items: usize) -> Self {
        match columns {
            None => Self::Items(Vec::with_capacity(items)),
            Some(_) => Self::Columns { items: 0, failures: Vec::new() },
        }
    }

    pub(super) fn push(&mut self, ended: Result<()>) {
        match self {
            Self::Items(results) => results.push(ended.into()),
            Self::Columns { items, failures } => {
                if let Err(error) = ended {
                    push_failure(failures, *items, &error);
                }
                *items += 1;
            }
        }
    }

    /// Returns the results item by item, or the columns.
    pub(super) fn into_parts(self) -> (Vec<ItemResult>, Option<v1::DoneColumns>) {
        match self {
            Self::Items(results) => (results, None),
            Self::Columns { items, failures } => {
                let items = u32::try_from(items).expect("a call has fewer items");
                (Vec::new(), Some(v1::DoneColumns { items, failures }))
            }
        }
    }
}

/// The reply to locate, built object by object.
#[derive(Debug)]
pub(super) struct LocateReply(v1::LocateResponse);

impl LocateReply {
    /// Creates an empty reply in the encoding of the request.
    pub(super) fn matching(r: &v1::LocateRequest, items: usize) -> Self {
        let columns = r.columns.as_ref().map(|_| v1::LocatedColumns {
            versions: Vec::with_capacity(items),
            lengths: Vec::with_capacity(items),
            places: Some(place_columns(items)),
            checksums: None,
            fences: Vec::with_capacity(items),
            objects: Vec::with_capacity(items),
            failures: Vec::new(),
        });
        let results = Vec::with_capacity(if columns.is_none() { items } else { 0 });
        Self(v1::LocateResponse { results, columns, ..Default::default() })
    }

    pub(super) fn push(
        &mut self,
        state: &State,
        segments: &mut SegmentTable,
        found: Result<LocatedObject>,
    ) {
        let v1::LocateResponse { results, columns, .. } = &mut self.0;
        match (columns, found) {
            (Some(columns), found) => push_located(columns, state, segments, found),
            (None, Ok(object)) => results.push(located_to_wire(state, segments, object)),
            (None, Err(error)) => {
                let failure = Some((&error).into());
                results.push(v1::LocateResult { failure, ..Default::default() });
            }
        }
    }

    pub(super) fn into_response(self, segments: SegmentTable, fence_ms: u64) -> v1::LocateResponse {
        let Self(mut answer) = self;
        if let Some(columns) = &mut answer.columns {
            collapse_segments(&mut columns.places);
            collapse_if_uniform(&mut columns.lengths);
            collapse_if_uniform(&mut columns.fences);
        }
        v1::LocateResponse { segments: segments.into_segments(), fence_ms, ..answer }
    }
}

fn push_located(
    columns: &mut v1::LocatedColumns,
    state: &State,
    segments: &mut SegmentTable,
    found: Result<LocatedObject>,
) {
    let item = columns.versions.len();
    let places = columns.places.get_or_insert_default();
    let (version, length, hold) = match found {
        Ok(object) => {
            let each = object.places.iter();
            places.push(item, each.map(|&place| segments.place(state, place)));
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

fn located_to_wire(
    state: &State,
    segments: &mut SegmentTable,
    object: LocatedObject,
) -> v1::LocateResult {
    v1::LocateResult {
        failure: None,
        version: object.version.0,
        length: object.length,
        places: segments.places(state, &object.places),
        checksum: object.checksum,
        fence: object.ticket.map_or(0, |hold| hold.fence),
        object: object.ticket.map_or(0, |hold| hold.object.number()),
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

fn collapse_segments(places: &mut Option<v1::PlaceColumns>) {
    if let Some(places) = places {
        collapse_if_uniform(&mut places.segments);
    }
}

#[cfg(test)]
mod tests {
    use mooncake_base::KeyRef;

    use super::*;

    fn keys() -> Option<v1::KeyColumn> {
        let keys = ["a", "bc"].map(|key| KeyRef::new(key.as_bytes()).unwrap());
        Some(v1::KeyColumn::pack(keys.into_iter()))
    }

    fn start(lengths: &[u64], groups: &[&str]) -> v1::PutStartRequest {
        let groups = groups.iter().map(ToString::to_string).collect();
        let columns = v1::PutColumns { keys: keys(), lengths: lengths.to_vec(), groups };
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
    fn put_end_items_need_matching_columns() {
        let columns = v1::PutRefColumns {
            versions: vec![3, 4],
            checksums: Some(v1::ChecksumColumn { items: vec![1], checksums: vec![9] }),
            failed_items: vec![0, 0],
            failed_replicas: vec![5, 6],
            keys: None,
        };
        let found = put_end_items(&[], Some(&columns)).unwrap();
        let shown: Vec<_> = found
            .iter()
            .map(|put| (put.key, put.version, put.checksum, put.failed_replicas))
            .collect();
        assert_eq!(shown, [(&b""[..], 3, None, &[5, 6][..]), (b"", 4, Some(9), &[])]);
        let with_keys = v1::PutRefColumns { keys: keys(), ..columns.clone() };
        let found = put_end_items(&[], Some(&with_keys)).unwrap();
        assert_eq!([found[0].key, found[1].key], [&b"a"[..], b"bc"]);
        type Break = fn(&mut v1::PutRefColumns);
        let breaks: [Break; 5] = [
            |columns| {
                columns.keys = Some(v1::KeyColumn { lengths: vec![1], bytes: vec![9].into() })
            },
            |columns| columns.versions.truncate(1),
            |columns| columns.failed_items = vec![0, 2],
            |columns| columns.failed_items = vec![1, 0],
            |columns| columns.failed_replicas.truncate(1),
        ];
        for (number, spoil) in breaks.iter().enumerate() {
            let mut columns = columns.clone();
            spoil(&mut columns);
            assert!(put_end_items(&[], Some(&columns)).is_err(), "break {number}");
        }
        assert!(put_end_items(&[v1::PutRef::default()], Some(&columns)).is_err(), "two forms");
    }
}
