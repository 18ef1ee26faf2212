//! Greetings and frames that masters and clients of November 2026 wrote, at commit 8daf09a: they are
//! read, and written in the same way where they say nothing new.

use bytes::{Bytes, BytesMut};
use prost::Message;

use crate::{
    native_frame::{
        DaemonGreeting, FRAME_BYTES_MAX, ServerGreeting, check_client_greeting, client_greeting,
        decode, encode,
    },
    v1::{self, request::Call, response::Call as Answer},
};

/// A name and bytes in hexadecimal in each line. The bytes of the messages come from an encoder that was
/// generated from the definitions of that commit.
const FRAMES: &str = include_str!("../tests/data/frames-version-2.txt");

fn recorded(name: &str) -> Vec<u8> {
    let mut lines = FRAMES.lines().filter_map(|line| line.split_once(' '));
    let (_, digits) = lines.find(|(found, _)| *found == name).expect(name);
    let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
    (0..digits.len()).step_by(2).map(byte).collect()
}

#[track_caller]
fn check<M: Message + Default + PartialEq + std::fmt::Debug>(name: &str, message: &M) {
    let bytes = recorded(name);
    let mut incoming = BytesMut::from(&bytes[..]);
    let read = decode::<M>(&mut incoming, FRAME_BYTES_MAX).unwrap();
    assert_eq!(read.as_ref(), Some(message), "{name}");
    assert!(incoming.is_empty(), "{name}");
    let mut written = BytesMut::new();
    encode(message, &mut written).unwrap();
    assert_eq!(written, bytes, "{name}");
}

fn call(name: &str, call: Call) {
    check(name, &v1::Request { call: Some(call), ..v1::Request::default() });
}

fn answer(name: &str, call: Answer) {
    check(name, &v1::Response { call: Some(call), ..v1::Response::default() });
}

fn caller() -> Option<v1::Caller> {
    Some(v1::Caller { client: (0..16).collect::<Vec<u8>>().into(), tenant: "t".into() })
}

fn keys(keys: &[&[u8]]) -> Option<v1::KeyColumn> {
    let lengths = keys.iter().map(|key| key.len() as u32).collect();
    Some(v1::KeyColumn { bytes: keys.concat().into(), lengths })
}

fn segment() -> v1::Segment {
    v1::Segment {
        id: vec![7; 16].into(),
        incarnation: 3,
        name: "host:1".into(),
        endpoint: "host:2".into(),
        base: 1 << 40,
        length: 1 << 30,
        protocol: "tcp".into(),
        ..v1::Segment::default()
    }
}

fn mark() -> Option<v1::LogMark> {
    Some(v1::LogMark { master: 11, timeline: 12, synced_frame: 13 })
}

fn failure() -> v1::Failure {
    let context = vec![v1::FailureDetail { name: "key".into(), value: "b".into() }];
    let message = "no such object".into();
    v1::Failure { code: -704, message, context, ..v1::Failure::default() }
}

fn failures() -> Vec<v1::ItemFailure> {
    vec![v1::ItemFailure { item: 1, failure: Some(failure()) }]
}

fn places() -> Option<v1::PlaceColumns> {
    Some(v1::PlaceColumns {
        counts: vec![1, 2],
        segments: vec![0, 0, 1],
        offsets: vec![0, 4096, 8192],
        replicas: vec![21, 22, 23],
    })
}

fn checksums() -> Option<v1::ChecksumColumn> {
    Some(v1::ChecksumColumn { items: vec![0], checksums: vec![99] })
}

#[test]
fn reads_recorded_greetings() {
    let greeting: [u8; 12] = recorded("greeting-of-a-client").try_into().unwrap();
    check_client_greeting(&greeting).unwrap();
    assert_eq!(client_greeting(), greeting);
    let master = ServerGreeting { version: 2, master: vec![9; 16], ..ServerGreeting::default() };
    let socket = "mooncake-9".to_owned();
    check("greeting-of-a-master", &ServerGreeting { unix_socket: socket, ..master.clone() });
    let daemon = DaemonGreeting { name: "host:1".into(), metadata: "P2PHANDSHAKE".into() };
    check("greeting-of-a-daemon", &ServerGreeting { daemon: Some(daemon), ..master });
    let challenge = vec![5; 32];
    let challenged = ServerGreeting { version: 2, challenge, ..ServerGreeting::default() };
    check("challenge-of-a-master", &challenged);
    let message = "the token is another one".into();
    let refusal = Some(v1::Failure { code: -601, message, ..v1::Failure::default() });
    check("refusal-of-a-master", &ServerGreeting { refusal, ..ServerGreeting::default() });
}

#[test]
fn reads_recorded_frames_of_sessions() {
    let register = v1::RegisterRequest {
        caller: caller(),
        name: "host:1".into(),
        process: 4,
        version: "0.1.0".into(),
        log_mark: mark(),
        ..v1::RegisterRequest::default()
    };
    let request = v1::Request {
        call: Some(Call::Register(register)),
        call_number: 6,
        answered_below: 6,
        ..v1::Request::default()
    };
    check("register", &request);
    let registered = v1::RegisterResponse {
        heartbeat_interval_ms: 1000,
        client_ttl_ms: 10_000,
        master: vec![9; 16].into(),
        version: "0.1.0".into(),
        timeline_id: vec![8; 16].into(),
        registration: 5,
        ignores_tenants: true,
    };
    answer("registered", Answer::Register(registered));
    let heartbeat = v1::HeartbeatRequest { caller: caller(), registration: 5 };
    call("heartbeat", Call::Heartbeat(heartbeat));
    let answered = v1::HeartbeatResponse {
        is_known: true,
        master: vec![9; 16].into(),
        has_tasks: true,
        timeline_id: vec![8; 16].into(),
        log_mark: mark(),
    };
    answer("heartbeat-answered", Answer::Heartbeat(answered));
    let mount = v1::MountRequest {
        caller: caller(),
        segments: vec![segment()],
        resume: true,
        sequence: 2,
        is_all: true,
    };
    call("mount", Call::Mount(mount));
    let results = vec![v1::ItemResult::default()];
    answer("mounted", Answer::Mount(v1::MountResponse { results }));
}

#[test]
fn reads_recorded_frames_of_puts() {
    let config = v1::ReplicateConfig {
        replica_num: 2,
        soft_pin: v1::SoftPin::Enable.into(),
        soft_pin_ttl_ms: Some(9),
        preferred_segments: vec!["host:1".into()],
        ttl_ms: Some(8),
        tags: vec![v1::Tag { name: "n".into(), value: "v".into() }],
        ..v1::ReplicateConfig::default()
    };
    let columns = v1::PutColumns {
        keys: keys(&[b"a", b"bc"]),
        lengths: vec![4096],
        if_versions: vec![0, 31],
        ..v1::PutColumns::default()
    };
    let start = v1::PutStartRequest {
        caller: caller(),
        config: Some(config),
        replace: true,
        request_id: 77,
        columns: Some(columns),
        avoided_endpoints: vec!["host:3".into()],
        ..v1::PutStartRequest::default()
    };
    call("put-start", Call::PutStart(start));
    let columns =
        v1::StartedColumns { versions: vec![41, 0], places: places(), failures: failures() };
    let started = v1::PutStartResponse {
        segments: vec![segment()],
        write_window_ms: 20_000,
        columns: Some(columns),
        log_mark: mark(),
    };
    answer("put-started", Answer::PutStart(started));
    let columns = v1::PutRefColumns {
        versions: vec![41],
        checksums: checksums(),
        failed_items: vec![0],
        failed_replicas: vec![22],
        keys: keys(&[b"a"]),
        ..v1::PutRefColumns::default()
    };
    let end = v1::PutEndRequest { caller: caller(), columns: Some(columns) };
    call("put-end", Call::PutEnd(end));
    let columns = Some(v1::DoneColumns { items: 1, failures: Vec::new() });
    answer("put-ended", Answer::PutEnd(v1::PutEndResponse { columns }));
}

#[test]
fn reads_recorded_frames_of_reads_and_removals() {
    let locate = v1::LocateRequest {
        caller: caller(),
        lease: true,
        fence: true,
        keys: keys(&[b"a", b"bc"]),
        ..v1::LocateRequest::default()
    };
    let release = v1::FenceRelease { fence: 1, versions: vec![41], objects: vec![2] };
    let request = v1::Request {
        call: Some(Call::Locate(locate)),
        released_fences: vec![release],
        ..v1::Request::default()
    };
    check("locate", &request);
    let columns = v1::LocatedColumns {
        versions: vec![41, 0],
        lengths: vec![4096],
        places: places(),
        checksums: checksums(),
        fences: vec![1],
        objects: vec![2, 0],
        failures: failures(),
        ..v1::LocatedColumns::default()
    };
    let segments = vec![segment()];
    let located = v1::LocateResponse { segments, fence_ms: 250, columns: Some(columns) };
    answer("located", Answer::Locate(located));
    let probed = [b"a", &b"bc"[..]].map(Bytes::from_static).to_vec();
    let probe =
        v1::ProbeRequest { caller: caller(), keys: probed, lease: true, ..Default::default() };
    call("probe", Call::Probe(probe));
    let states = vec![v1::ObjectState::Complete.into(), v1::ObjectState::Absent.into()];
    let probed = v1::ProbeResponse { states, lengths: vec![4096, 0], ..Default::default() };
    answer("probed", Answer::Probe(probed));
    let remove = v1::RemoveRequest {
        caller: caller(),
        keys: vec![Bytes::from_static(b"a")],
        force: true,
        if_versions: vec![41],
        ..v1::RemoveRequest::default()
    };
    call("remove", Call::Remove(remove));
    answer("failed", Answer::Failure(failure()));
}
