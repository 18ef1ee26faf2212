//! Property tests: arbitrary calls never panic the service. Unit tests of dispatch.

mod columns;
mod connections;
mod disks;
mod failed_log;
mod fuzz;
mod hanging_disk;
mod lost_log;
mod panics;
mod pause;
mod repeated_calls;
mod reply_size;
mod restart;
mod slices;
mod stalled_log;

use std::time::Duration;

use bytes::{BufMut, BytesMut};
use mooncake_base::{ClientId, ErrorCode, SystemClock, TenantId};
use mooncake_proto::{calls::Method, v1::request::Call};
use proptest::prelude::*;
use prost::Message;

use super::*;

fn service() -> Service {
    Service::new(Rules::default(), SystemClock::shared())
}

fn ask(service: &Service, call: Call) -> response::Call {
    let request = v1::Request { call: Some(call), ..Default::default() };
    service.dispatch(request, &Origin::in_process()).call.expect("every call has an answer")
}

fn caller(id: ClientId) -> Option<v1::Caller> {
    Some(v1::Caller { client: Bytes::copy_from_slice(&id.to_bytes()), tenant: String::new() })
}

/// Returns a call that starts puts of these keys and lengths.
fn put_start<K: AsRef<[u8]> + Clone>(id: ClientId, items: &[(K, u64)]) -> v1::PutStartRequest {
    let columns = Some(v1::PutColumns::pack(items.iter().cloned()));
    v1::PutStartRequest { caller: caller(id), columns, ..Default::default() }
}

/// Starts puts. Returns the response and its columns.
fn started(
    service: &Service,
    call: v1::PutStartRequest,
) -> (v1::PutStartResponse, v1::StartedColumns) {
    let response::Call::PutStart(answer) = ask(service, Call::PutStart(call)) else {
        panic!("not an answer to a put")
    };
    let columns = answer.columns.clone().expect("columns");
    (answer, columns)
}

/// Returns whether a replica of the object can be read.
fn is_readable(service: &Service, key: &str) -> bool {
    let keys = Some(v1::KeyColumn::pack([key]));
    let locate = v1::LocateRequest { keys, ..Default::default() };
    let response::Call::Locate(located) = ask(service, Call::Locate(locate)) else {
        panic!("not an answer to a locate call")
    };
    located.columns.expect("columns").failures.is_empty()
}

/// Returns a call that ends the puts of these versions.
fn put_end(id: ClientId, versions: &[u64]) -> Call {
    let columns =
        Some(v1::PutRefColumns { versions: versions.to_vec(), ..v1::PutRefColumns::default() });
    Call::PutEnd(v1::PutEndRequest { caller: caller(id), columns })
}

/// Returns how many items of a PutEnd or Remove failed.
fn failures(answer: &response::Call) -> usize {
    match answer {
        response::Call::PutEnd(r) => r.columns.as_ref().unwrap().failures.len(),
        response::Call::Remove(r) => r.results.iter().filter(|r| r.failure.is_some()).count(),
        other => panic!("{other:?}"),
    }
}

/// Returns a service with one client that has mounted a segment, and the client's id.
fn lent() -> (Service, ClientId) {
    let service = service();
    let id = lend(&service);
    (service, id)
}

/// Registers a client that mounts a segment. Returns its id.
fn lend(service: &Service) -> ClientId {
    let id = ClientId::from_bits(1);
    let name = "h:1".to_owned();
    let register = v1::RegisterRequest { caller: caller(id), name, ..Default::default() };
    assert!(matches!(ask(service, Call::Register(register)), response::Call::Register(_)));
    let mount = v1::MountRequest {
        caller: caller(id),
        segments: vec![segment()],
        ..v1::MountRequest::default()
    };
    assert!(matches!(ask(service, Call::Mount(mount)), response::Call::Mount(_)));
    id
}

/// Returns the segment of `lend`.
fn segment() -> v1::Segment {
    v1::Segment {
        id: Bytes::from_static(&[9; 16]),
        incarnation: 1,
        name: "h:1".to_owned(),
        endpoint: "h:1".to_owned(),
        base: 1 << 20,
        length: 1 << 20,
        protocol: "tcp".to_owned(),
        kind: v1::SegmentKind::Memory.into(),
    }
}

/// Generates encoded messages: fields of numbers, bytes and messages under small tags. Most of them
/// decode as a request of some kind.
fn wire(depth: u32) -> BoxedStrategy<Vec<u8>> {
    let number = prop_oneof![
        1 => Just(0),
        4 => Just(1),
        1 => Just(u64::MAX),
        1 => any::<u64>(),
        1 => 0_u64..2000
    ];
    let bytes = prop_oneof![
        Just(vec![1; 16]),
        Just(1_u128.to_le_bytes().to_vec()),
        proptest::collection::vec(any::<u8>(), 0..20),
        "[a-c]{1,3}".prop_map(String::into_bytes),
    ];
    let scalar = (1_u32..8, number).prop_map(|(tag, value)| {
        let mut out = BytesMut::new();
        prost::encoding::uint64::encode(tag, &value, &mut out);
        out.to_vec()
    });
    let text = (1_u32..8, bytes).prop_map(|(tag, value)| field(tag, &value));
    if depth == 0 {
        return proptest::collection::vec(prop_oneof![scalar, text], 0..5)
            .prop_map(|fields| fields.concat())
            .boxed();
    }
    let nested = (1_u32..8, wire(depth - 1)).prop_map(|(tag, value)| field(tag, &value));
    proptest::collection::vec(prop_oneof![scalar, text, nested], 0..6)
        .prop_map(|fields| fields.concat())
        .boxed()
}

/// Generates a call: its tag in `Request` and its message. Half of the messages have a caller.
fn call() -> impl Strategy<Value = (u32, Vec<u8>)> {
    let known = field(1, &field(1, &1_u128.to_le_bytes()));
    (prop_oneof![3 => 1_u32..18, 2 => 30_u32..47], any::<bool>(), wire(2)).prop_map(
        move |(tag, is_known, body)| {
            (tag, if is_known { [&known[..], &body].concat() } else { body })
        },
    )
}

fn field(tag: u32, value: &[u8]) -> Vec<u8> {
    let mut out = BytesMut::new();
    prost::encoding::encode_key(tag, prost::encoding::WireType::LengthDelimited, &mut out);
    prost::encoding::encode_varint(value.len() as u64, &mut out);
    out.put_slice(value);
    out.to_vec()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn answers_every_decodable_request(calls in proptest::collection::vec(call(), 1..40)) {
        let (service, _) = lent();
        let origin = service.open_session(false);
        for (tag, body) in calls {
            let Ok(request) = v1::Request::decode(&field(tag, &body)[..]) else { continue };
            let response = service.dispatch(request, &origin);
            prop_assert!(response.call.is_some());
            let back = v1::Response::decode(&response.encode_to_vec()[..]);
            prop_assert_eq!(back.ok(), Some(response));
            service.advance();
        }
        service.close_session(&origin, ConnectionEnd::ByPeer);
    }
}

#[test]
fn arbitrary_calls_reach_state() {
    use proptest::{strategy::ValueTree, test_runner::TestRunner};
    let mut runner = TestRunner::deterministic();
    let (service, id) = lent();
    let in_columns = columns::any_call(id);
    for number in 0..40_000 {
        let (tag, body) = call().new_tree(&mut runner).unwrap().current();
        if let Ok(request) = v1::Request::decode(&field(tag, &body)[..]) {
            service.dispatch(request, &Origin::in_process());
        }
        // Arbitrary bytes are hardly ever columns that match.
        if number % 100 == 0 {
            ask(&service, in_columns.new_tree(&mut runner).unwrap().current());
        }
    }
    for (op, name, _) in op_metrics::Op::all() {
        let count = service.op_metrics().count(op);
        assert!(count.single + count.batches > 0, "{name} was never reached");
    }
}

#[test]
fn reply_has_one_entry_per_item() {
    let (service, id) = lent();
    let start = put_start(id, &[("a", 10), ("", 10), ("b", 0), ("c", 10)]);
    let (answer, columns) = started(&service, start);
    let outcomes = columns.read(4).unwrap();
    let codes: Vec<Option<i32>> = outcomes.map(|item| item.err().map(|f| f.code)).collect();
    let invalid = Some(ErrorCode::INVALID_PARAMS.number());
    assert_eq!(codes, [None, invalid, invalid, None]);
    assert_eq!(answer.segments.len(), 1, "a segment is named once");
    assert!(answer.write_window_ms > 0);
    let count = service.op_metrics().count(Method::PutStart);
    assert_eq!((count.batches, count.batches_partial), (1, 1));
    assert_eq!((count.items, count.items_failed), (4, 2));
}

#[test]
fn tenants_share_namespace_without_multi_tenancy() {
    let (service, id) = lent();
    let probe = |tenant: &str| {
        let client = Bytes::copy_from_slice(&id.to_bytes());
        let caller = Some(v1::Caller { client, tenant: tenant.to_owned() });
        let keys = vec![Bytes::from_static(b"a")];
        match ask(
            &service,
            Call::Probe(v1::ProbeRequest { caller, keys, lease: false, ..Default::default() }),
        ) {
            response::Call::Probe(answer) => answer.states().next(),
            other => panic!("{other:?}"),
        }
    };
    started(&service, put_start(id, &[("a", 1)]));
    assert_eq!(probe("x"), Some(v1::ObjectState::Writing));
    assert_eq!(probe(""), Some(v1::ObjectState::Writing));
}

#[test]
fn long_page_is_cut_by_bytes_and_resumes() {
    let (service, id) = lent();
    let key = |i: u16| {
        let mut key = vec![b'k'; 60 * 1024];
        key.extend_from_slice(&i.to_be_bytes());
        Bytes::from(key)
    };
    let items: Vec<_> = (0..200).map(|i| (key(i), 1)).collect();
    started(&service, put_start(id, &items));
    let mut after = Bytes::new();
    let mut found = Vec::new();
    let mut pages = 0;
    loop {
        let selector = Some(v1::KeySelector { by: Some(v1::key_selector::By::All(true)) });
        let list = v1::ListObjectsRequest { caller: None, selector, after, limit: 0 };
        let response::Call::ListObjects(page) = ask(&service, Call::ListObjects(list)) else {
            panic!("not a page")
        };
        assert!(page.encoded_len() < mooncake_proto::native_frame::FRAME_BYTES_MAX);
        found.extend(page.objects.into_iter().map(|object| object.key));
        pages += 1;
        after = found.last().cloned().unwrap();
        if page.is_last {
            break;
        }
    }
    assert!(pages > 1, "the page was not cut");
    assert_eq!(found, (0..200).map(key).collect::<Vec<_>>());
}

#[test]
fn empty_selector_removes_nothing() {
    let (service, _) = lent();
    for by in [None, Some(v1::key_selector::By::All(false))] {
        let selector = Some(v1::KeySelector { by });
        let remove =
            v1::RemoveMatchingRequest { caller: None, selector, force: true, ..Default::default() };
        assert!(matches!(
            ask(&service, Call::RemoveMatching(remove)),
            response::Call::Failure(f) if f.code == -600
        ));
    }
}

#[test]
fn heartbeat_interval_is_fraction_of_ttl() {
    let service = service();
    let register =
        v1::RegisterRequest { caller: caller(ClientId::from_bits(1)), ..Default::default() };
    let response::Call::Register(answer) = ask(&service, Call::Register(register)) else {
        panic!("not registered")
    };
    assert!(answer.ignores_tenants);
    assert_eq!(answer.client_ttl_ms, 10_000);
    assert!(answer.heartbeat_interval_ms * 4 < Duration::from_secs(10).as_millis() as u64);
}

#[test]
fn multi_tenancy_separates_keys_and_persists_quotas() {
    let rules = Rules { is_multi_tenant: true, ..Rules::default() };
    let service = Service::new(rules, SystemClock::shared());
    let register =
        v1::RegisterRequest { caller: caller(ClientId::from_bits(1)), ..Default::default() };
    let response::Call::Register(answer) = ask(&service, Call::Register(register)) else {
        panic!("not registered")
    };
    assert!(!answer.ignores_tenants);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("quotas.yaml");
    std::fs::write(&path, "version: 1\ntenants:\n  - name: a\n    quota: 1KB\n").unwrap();
    service.load_quota_file(path.to_str().unwrap()).unwrap();
    let set = |tenant: &str, bytes| {
        let quotas = vec![v1::Quota { tenant: tenant.to_owned(), bytes }];
        let set = v1::SetQuotasRequest { caller: None, quotas };
        let response::Call::SetQuotas(answer) = ask(&service, Call::SetQuotas(set)) else {
            panic!("not set")
        };
        answer.results[0].failure.as_ref().map_or(0, |failure| failure.code)
    };
    assert_eq!((set("b", Some(5)), set("a", None), set("a", None)), (0, 0, -704));
    assert_eq!((set("", Some(5)), set("c", Some(0))), (-600, -600));
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(text, "version: 1\ntenants:\n  - name: \"b\"\n    quota: 5\n");
    let quotas =
        || -> Vec<_> { service.quotas().into_iter().map(|q| (q.tenant, q.requested)).collect() };
    assert_eq!(quotas(), [(TenantId::new("b"), 5)]);
    // A quota that cannot be written to the file is not in effect.
    drop(folder);
    let failed = ErrorCode::FILE_WRITE_FAIL.number();
    assert_eq!((set("b", Some(6)), set("b", None), set("c", Some(7))), (failed, failed, failed));
    assert_eq!(quotas(), [(TenantId::new("b"), 5)]);
}

#[tokio::test]
async fn put_over_new_connection_shows_that_client_lives() {
    let (service, id) = lent();
    let service = Arc::new(service);
    let (_, columns) = started(&service, put_start(id, &[("a", 1)]));
    assert_eq!(failures(&ask(&service, put_end(id, &columns.versions))), 0);
    let first = service.open_session(false);
    let heartbeat =
        Call::Heartbeat(v1::HeartbeatRequest { caller: caller(id), ..Default::default() });
    service.dispatch(v1::Request { call: Some(heartbeat), ..Default::default() }, &first);
    service.close_session(&first, ConnectionEnd::ByPeer);
    assert!(!is_readable(&service, "a"), "its last connection is closed");
    let second = service.open_session(false);
    let call = Some(Call::PutStart(put_start(id, &[("b", 1)])));
    let request = v1::Request { call, ..Default::default() };
    service.answer(request, &second, (), AnsweringThread::Runtime).await;
    assert!(is_readable(&service, "a"));
}
