//! A call in columns has the same effects as the same call item by item, and columns that do not
//! match are refused as a whole.

use mooncake_base::KeyRef;
use mooncake_proto::columns::{Located, Outcome};

use super::*;

/// One key names no existing object; one value has no bytes.
const KEYS: [&str; 4] = ["a", "b", "c", "d"];
const LENGTHS: [u64; 4] = [10, 0, 30, 40];

fn column(keys: &[&str]) -> v1::KeyColumn {
    let keys: Vec<_> = keys.iter().map(|key| KeyRef::new(key.as_bytes()).unwrap()).collect();
    v1::KeyColumn::pack(keys.into_iter())
}

fn start(service: &Service, id: ClientId) -> v1::PutStartResponse {
    let columns =
        v1::PutColumns { keys: Some(column(&KEYS)), lengths: LENGTHS.to_vec(), groups: Vec::new() };
    let columns = Some(columns);
    let start = v1::PutStartRequest { caller: caller(id), columns, ..Default::default() };
    match ask(service, Call::PutStart(start)) {
        response::Call::PutStart(started) => started,
        other => panic!("{other:?}"),
    }
}

fn end(service: &Service, id: ClientId, columns: v1::PutRefColumns) -> v1::DoneColumns {
    let end =
        v1::PutEndRequest { caller: caller(id), columns: Some(columns), ..Default::default() };
    match ask(service, Call::PutEnd(end)) {
        response::Call::PutEnd(ended) => {
            assert!(ended.results.is_empty());
            ended.columns.expect("in columns")
        }
        other => panic!("{other:?}"),
    }
}

fn locate(service: &Service, request: v1::LocateRequest) -> v1::LocateResponse {
    match ask(service, Call::Locate(request)) {
        response::Call::Locate(located) => located,
        other => panic!("{other:?}"),
    }
}

/// Formats one result without its fence.
fn shown(found: Outcome<'_, Located<'_>>) -> v1::LocateResult {
    match found {
        Ok(found) => v1::LocateResult {
            version: found.version,
            length: found.length,
            checksum: found.checksum,
            places: found.places.to_messages(found.length).collect(),
            ..Default::default()
        },
        Err(failure) => v1::LocateResult { failure: Some(failure.clone()), ..Default::default() },
    }
}

#[test]
fn column_batch_behaves_like_single_items() {
    let (service, id) = lent();
    let started = start(&service, id);
    let columns = started.columns.expect("in columns");
    assert!(started.results.is_empty() && started.segments.len() == 1);
    let outcomes: Vec<_> = columns.read(4).unwrap().collect();
    let done = [true, false, true, true];
    assert_eq!(outcomes.iter().map(Result::is_ok).collect::<Vec<_>>(), done);
    let written = v1::PutRefColumns {
        versions: [0, 2, 3].map(|item| columns.versions[item]).to_vec(),
        checksums: Some(v1::ChecksumColumn { items: vec![1], checksums: vec![77] }),
        // The only replica fails, and with it the object.
        failed_items: vec![2],
        failed_replicas: vec![columns.places.as_ref().unwrap().replicas[2]],
        keys: None,
    };
    let ended = end(&service, id, written);
    let failed: Vec<_> = ended.failures.iter().map(|failure| failure.item).collect();
    assert_eq!((ended.items, failed), (3, vec![2]));

    let keys = KEYS.map(|key| Bytes::from_static(key.as_bytes())).to_vec();
    let one_by_one = locate(&service, v1::LocateRequest { keys, ..Default::default() });
    let columns = Some(column(&KEYS));
    let found = locate(&service, v1::LocateRequest { columns, ..Default::default() });
    let columns = found.columns.expect("in columns");
    assert_eq!(columns.read(4).unwrap().map(shown).collect::<Vec<_>>(), one_by_one.results);
    assert_eq!(found.segments, one_by_one.segments);
    assert_eq!(one_by_one.results.iter().filter(|result| result.failure.is_none()).count(), 2);
    assert_eq!(one_by_one.results[2].checksum, Some(77));
    let count = service.op_metrics().count(Op::Locate);
    assert_eq!((count.batches, count.items, count.items_failed), (2, 8, 4));
}

#[test]
fn fence_of_column_batch_can_be_released() {
    let (service, id) = lent();
    let versions = start(&service, id).columns.unwrap().versions;
    end(&service, id, v1::PutRefColumns { versions: vec![versions[0]], ..Default::default() });
    let columns = Some(column(&["a", "b"]));
    let request = v1::LocateRequest { columns, fence: true, lease: true, ..Default::default() };
    let fences: Vec<_> = locate(&service, request).fences().collect();
    assert_eq!(fences.len(), 1, "of what was found");
    assert_eq!(fences[0].1, versions[0]);
}

#[test]
fn refuses_too_many_items_in_columns() {
    let (service, id) = lent();
    let lengths = vec![0; BATCH_ITEMS_MAX + 1];
    let columns = Some(v1::KeyColumn { bytes: Bytes::new(), lengths });
    let call = v1::LocateRequest { caller: caller(id), columns, ..Default::default() };
    let response::Call::Failure(failure) = ask(&service, Call::Locate(call)) else {
        panic!("it was taken")
    };
    assert_eq!(failure.code, ErrorCode::INVALID_PARAMS.number());
}

/// Generates short columns, some of which match.
fn numbers() -> impl Strategy<Value = Vec<u64>> {
    proptest::collection::vec(prop_oneof![4 => 0_u64..4, 1 => any::<u64>()], 0..4)
}

fn small_numbers() -> impl Strategy<Value = Vec<u32>> {
    proptest::collection::vec(prop_oneof![9 => 0_u32..3, 1 => any::<u32>()], 0..4)
}

fn keys() -> impl Strategy<Value = Option<v1::KeyColumn>> {
    let whole = proptest::collection::vec("[a-c]{1,2}", 0..4).prop_map(|keys| {
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        Some(column(&keys))
    });
    let broken = (proptest::collection::vec(any::<u8>(), 0..9), small_numbers())
        .prop_map(|(bytes, lengths)| Some(v1::KeyColumn { bytes: bytes.into(), lengths }));
    prop_oneof![6 => whole, 2 => broken, 1 => Just(None)]
}

fn any_call(id: ClientId) -> impl Strategy<Value = Call> {
    let groups = proptest::collection::vec("[gh]?", 0..3);
    let start = (keys(), numbers(), groups).prop_map(move |(keys, lengths, groups)| {
        let columns = Some(v1::PutColumns { keys, lengths, groups });
        Call::PutStart(v1::PutStartRequest { caller: caller(id), columns, ..Default::default() })
    });
    let refs = (numbers(), small_numbers(), small_numbers(), numbers()).prop_map(
        |(versions, summed, failed_items, failed_replicas)| v1::PutRefColumns {
            checksums: Some(v1::ChecksumColumn { items: summed, checksums: versions.clone() }),
            versions,
            failed_items,
            failed_replicas,
            keys: None,
        },
    );
    let close = (refs, any::<bool>()).prop_map(move |(columns, is_end)| {
        let (caller, columns) = (caller(id), Some(columns));
        match is_end {
            true => Call::PutEnd(v1::PutEndRequest { caller, columns, puts: Vec::new() }),
            false => Call::PutRevoke(v1::PutRevokeRequest { caller, columns, puts: Vec::new() }),
        }
    });
    let locate = (keys(), any::<bool>()).prop_map(move |(columns, fence)| {
        let caller = caller(id);
        Call::Locate(v1::LocateRequest {
            caller,
            columns,
            fence,
            lease: fence,
            ..Default::default()
        })
    });
    prop_oneof![start, close, locate]
}

/// Returns the expected number of items in the reply, and whether the columns match; `None` for a
/// call without columns.
fn fits(answer: &response::Call, items: usize) -> Option<bool> {
    Some(match answer {
        response::Call::PutStart(r) => r.columns.as_ref()?.read(items).is_ok(),
        response::Call::PutEnd(r) => r.columns.as_ref()?.read(items).is_ok(),
        response::Call::PutRevoke(r) => r.columns.as_ref()?.read(items).is_ok(),
        response::Call::Locate(r) => r.columns.as_ref()?.read(items).is_ok(),
        _ => return None,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn reply_to_arbitrary_columns_fits_call_or_fails(
        calls in proptest::collection::vec(any_call(ClientId::from_bits(1)), 1..30)
    ) {
        let (service, _) = lent();
        for call in calls {
            let (items, is_answerable) = (call.items(), call.clone());
            let answer = ask(&service, call);
            match &answer {
                response::Call::Failure(failure) => {
                    prop_assert_eq!(failure.code, ErrorCode::INVALID_PARAMS.number());
                }
                answer => {
                    // A call without any keys is answered item by item, with no items.
                    let fits = fits(answer, items);
                    prop_assert!(fits.unwrap_or(items == 0), "{:?} to {:?}", answer, is_answerable);
                }
            }
            service.advance();
        }
    }
}
