//! Each item of a batch has its own outcome, and columns that do not match are refused as a whole.

use std::slice;

use mooncake_proto::{
    calls::Method,
    columns::{Located, Outcome},
};

use super::*;

/// One key names no existing object; one value has no bytes.
const KEYS: [&str; 4] = ["a", "b", "c", "d"];
const LENGTHS: [u64; 4] = [10, 0, 30, 40];

fn start(service: &Service, id: ClientId) -> (v1::PutStartResponse, v1::StartedColumns) {
    let items: Vec<_> = KEYS.into_iter().zip(LENGTHS).collect();
    started(service, put_start(id, &items))
}

fn end(service: &Service, id: ClientId, columns: v1::PutRefColumns) -> v1::DoneColumns {
    let end = v1::PutEndRequest { caller: caller(id), columns: Some(columns) };
    match ask(service, Call::PutEnd(end)) {
        response::Call::PutEnd(ended) => ended.columns.expect("columns"),
        other => panic!("{other:?}"),
    }
}

fn locate(service: &Service, request: v1::LocateRequest) -> v1::LocateResponse {
    match ask(service, Call::Locate(request)) {
        response::Call::Locate(located) => located,
        other => panic!("{other:?}"),
    }
}

/// An outcome of locate: version, length, checksum and places, or the code of the failure.
type Found = Result<(u64, u64, Option<u64>, Vec<v1::Place>), i32>;

fn found(outcome: Outcome<'_, Located<'_>>) -> Found {
    let found = outcome.map_err(|failure| failure.code)?;
    let places = found.places.to_messages(found.length).collect();
    Ok((found.version, found.length, found.checksum, places))
}

fn locate_all(service: &Service, keys: &[&str]) -> (Vec<Found>, Vec<v1::Segment>) {
    let column = Some(v1::KeyColumn::pack(keys));
    let answer = locate(service, v1::LocateRequest { keys: column, ..Default::default() });
    let columns = answer.columns.expect("columns");
    (columns.read(keys.len()).unwrap().map(found).collect(), answer.segments)
}

#[test]
fn wanted_tag_comes_with_each_object() {
    let (service, id) = lent();
    for (keys, value) in [(["a", "b"], Some("first")), (["c", "d"], None)] {
        let mut call = put_start(id, &keys.map(|key| (key, 10)));
        if let Some(value) = value {
            let tag = v1::Tag { name: "call".to_owned(), value: value.to_owned() };
            let other = v1::Tag { name: "a".to_owned(), value: "other".to_owned() };
            call.config.get_or_insert_default().tags = vec![tag, other];
        }
        let (_, columns) = started(&service, call);
        let refs = v1::PutRefColumns { versions: columns.versions, ..Default::default() };
        end(&service, id, refs);
    }
    let tags = |tag: &str, keys: &[&str]| {
        let (tag, column) = (tag.to_owned(), Some(v1::KeyColumn::pack(keys)));
        let request = v1::LocateRequest { tag, keys: column, ..Default::default() };
        locate(&service, request).columns.expect("columns")
    };
    let read = |columns: &v1::LocatedColumns, items| {
        let tags = columns.read(items).unwrap().flatten().map(|found| found.tag.to_owned());
        tags.collect::<Vec<_>>()
    };
    let mixed = tags("call", &["a", "c", "missing", "b"]);
    assert_eq!(read(&mixed, 4), ["first", "", "first"]);
    let same = tags("call", &["a", "b"]);
    assert_eq!((same.tags.len(), read(&same, 2)), (1, vec!["first".to_owned(); 2]));
    assert_eq!(read(&tags("unknown", &["a", "b"]), 2), ["", ""]);
    assert!(tags("", &["a", "b"]).tags.is_empty(), "no tag is wanted");
}

#[test]
fn batch_behaves_like_single_items() {
    let (service, id) = lent();
    let (answer, columns) = start(&service, id);
    assert_eq!(answer.segments.len(), 1);
    let outcomes: Vec<_> = columns.read(4).unwrap().collect();
    let done = [true, false, true, true];
    assert_eq!(outcomes.iter().map(Result::is_ok).collect::<Vec<_>>(), done);
    let written = v1::PutRefColumns {
        versions: [0, 2, 3].map(|item| columns.versions[item]).to_vec(),
        checksums: Some(v1::ChecksumColumn { items: vec![1], checksums: vec![77] }),
        // The only replica fails, and with it the object.
        failed_items: vec![2],
        failed_replicas: vec![columns.places.as_ref().unwrap().replicas[2]],
        ..v1::PutRefColumns::default()
    };
    let ended = end(&service, id, written);
    let failed: Vec<_> = ended.failures.iter().map(|failure| failure.item).collect();
    assert_eq!((ended.items, failed), (3, vec![2]));

    let (batch, segments) = locate_all(&service, &KEYS);
    let one_by_one: Vec<_> =
        KEYS.iter().map(|&key| locate_all(&service, &[key]).0.remove(0)).collect();
    assert_eq!(batch, one_by_one);
    assert_eq!(segments, answer.segments);
    let absent = Err(ErrorCode::OBJECT_NOT_FOUND.number());
    assert_eq!((&batch[1], &batch[3]), (&absent, &absent));
    let places = columns.places.as_ref().unwrap();
    let place = |item: usize, length| v1::Place {
        segment: 0,
        offset: places.offsets[item],
        length,
        replica: places.replicas[item],
    };
    assert_eq!(batch[0], Ok((columns.versions[0], 10, None, vec![place(0, 10)])));
    assert_eq!(batch[2], Ok((columns.versions[2], 30, Some(77), vec![place(1, 30)])));
    let count = service.op_metrics().count(Method::Locate);
    assert_eq!((count.batches, count.items, count.items_failed), (1, 4, 2));
}

#[test]
fn fence_of_column_batch_can_be_released() {
    let (service, id) = lent();
    let (_, v1::StartedColumns { versions, .. }) = start(&service, id);
    end(&service, id, v1::PutRefColumns { versions: vec![versions[0]], ..Default::default() });
    let keys = Some(v1::KeyColumn::pack(["a", "b"]));
    let request = v1::LocateRequest { keys, fence: true, lease: true, ..Default::default() };
    let fences: Vec<_> = locate(&service, request).fences().collect();
    assert_eq!(fences.len(), 1, "of what was found");
    assert_eq!(fences[0].1, versions[0]);
}

#[test]
fn refuses_too_many_items_in_columns() {
    let (service, id) = lent();
    let lengths = vec![0; BATCH_ITEMS_MAX + 1];
    let keys = Some(v1::KeyColumn { bytes: Bytes::new(), lengths });
    let call = v1::LocateRequest { caller: caller(id), keys, ..Default::default() };
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
    let whole = proptest::collection::vec("[a-c]{1,2}", 0..4)
        .prop_map(|keys| Some(v1::KeyColumn::pack(&keys)));
    let broken = (proptest::collection::vec(any::<u8>(), 0..9), small_numbers())
        .prop_map(|(bytes, lengths)| Some(v1::KeyColumn { bytes: bytes.into(), lengths }));
    prop_oneof![6 => whole, 2 => broken, 1 => Just(None)]
}

pub(super) fn any_call(id: ClientId) -> impl Strategy<Value = Call> {
    let groups = proptest::collection::vec("[gh]?", 0..3);
    let start = (keys(), numbers(), groups).prop_map(move |(keys, lengths, groups)| {
        let columns = Some(v1::PutColumns { keys, lengths, groups, if_versions: vec![] });
        Call::PutStart(v1::PutStartRequest { caller: caller(id), columns, ..Default::default() })
    });
    let refs = (numbers(), small_numbers(), small_numbers(), numbers()).prop_map(
        |(versions, summed, failed_items, failed_replicas)| v1::PutRefColumns {
            checksums: Some(v1::ChecksumColumn { items: summed, checksums: versions.clone() }),
            versions,
            late_items: failed_items.clone(),
            late_replicas: failed_replicas.clone(),
            failed_items,
            failed_replicas,
            keys: None,
        },
    );
    let close = (refs, any::<bool>()).prop_map(move |(columns, is_end)| {
        let (caller, columns) = (caller(id), Some(columns));
        if is_end {
            Call::PutEnd(v1::PutEndRequest { caller, columns })
        } else {
            Call::PutRevoke(v1::PutRevokeRequest { caller, columns })
        }
    });
    let locate = (keys(), any::<bool>()).prop_map(move |(keys, fence)| {
        Call::Locate(v1::LocateRequest {
            caller: caller(id),
            keys,
            fence,
            lease: fence,
            ..Default::default()
        })
    });
    prop_oneof![start, close, locate]
}

/// Returns whether the reply has columns for this number of items.
fn fits(answer: &response::Call, items: usize) -> bool {
    match answer {
        response::Call::PutStart(r) => r.columns.as_ref().is_some_and(|c| c.read(items).is_ok()),
        response::Call::PutEnd(r) => r.columns.as_ref().is_some_and(|c| c.read(items).is_ok()),
        response::Call::PutRevoke(r) => r.columns.as_ref().is_some_and(|c| c.read(items).is_ok()),
        response::Call::Locate(r) => r.columns.as_ref().is_some_and(|c| c.read(items).is_ok()),
        _ => false,
    }
}

#[test]
fn nothing_is_put_if_an_object_exists_that_must_not() {
    let (service, id) = lent();
    let start = |key: &'static str, absent: &[&str]| {
        let if_absent = Some(v1::KeyColumn::pack(absent));
        Call::PutStart(v1::PutStartRequest { if_absent, ..put_start(id, &[(key, 64)]) })
    };
    let begun = ask(&service, start("a", &["b", "c"]));
    let response::Call::PutStart(begun) = begun else { panic!("{begun:?}") };
    // An object that is being written does not exist yet.
    assert!(matches!(ask(&service, start("x", &["b", "a"])), response::Call::PutStart(_)));
    ask(&service, put_end(id, &begun.columns.unwrap().versions));
    let response::Call::Failure(failure) = ask(&service, start("y", &["b", "a"])) else {
        panic!("the object exists")
    };
    assert_eq!(failure.code, ErrorCode::OBJECT_ALREADY_EXISTS.number());
    let response::Call::PutStart(kept) = ask(&service, start("a", &["b"])) else {
        panic!("the condition holds")
    };
    assert_eq!(kept.columns.unwrap().failures.len(), 1, "the object itself is kept");
}

#[test]
fn put_is_refused_if_an_object_exists_beside_its_key() {
    let (service, id) = lent();
    let start = |keys: &[(&'static str, u64)], suffixes: &[&'static [u8]], replace: bool| {
        let absent_suffixes = suffixes.iter().map(|&suffix| Bytes::from_static(suffix)).collect();
        let call = v1::PutStartRequest { absent_suffixes, replace, ..put_start(id, keys) };
        ask(&service, Call::PutStart(call))
    };
    let refused = |answer: response::Call| {
        let response::Call::PutStart(reply) = answer else { panic!("{answer:?}") };
        let failures = reply.columns.unwrap().failures;
        let of_item = |each: v1::ItemFailure| {
            let failure = each.failure.unwrap();
            assert_eq!(failure.code, ErrorCode::OBJECT_ALREADY_EXISTS.number());
            (each.item, failure.context[0].name.clone(), failure.context[0].value.clone())
        };
        failures.into_iter().map(of_item).collect::<Vec<_>>()
    };
    let begun = start(&[("a_0", 64)], &[b"_0"], false);
    let response::Call::PutStart(begun) = begun else { panic!("{begun:?}") };
    assert_eq!(refused(start(&[("a", 64)], &[b"_0"], true)), [], "it is still being written");
    ask(&service, put_end(id, &begun.columns.unwrap().versions));
    let beside = (1, "beside".to_owned(), "\"a_0\"".to_owned());
    for replace in [false, true] {
        let items = [("b", 64), ("a", 64)];
        assert_eq!(refused(start(&items, &[b"_1", b"_0"], replace)), slice::from_ref(&beside));
    }
    assert_eq!(refused(start(&[("a", 64)], &[b"_1"], true)), [], "there is no such object");
    assert_eq!(refused(start(&[("a", 64)], &[], true)), [], "there is no condition");
    let nine: [&[u8]; 9] = [b"x"; 9];
    assert!(matches!(start(&[("a", 64)], &nine, true), response::Call::Failure(_)));
    assert!(matches!(start(&[("a", 64)], &[&[b'x'; 65]], true), response::Call::Failure(_)));
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
                    prop_assert!(fits(answer, items), "{:?} to {:?}", answer, is_answerable);
                }
            }
            service.advance();
        }
    }
}
