//! The native protocol over TCP and Unix sockets, and connections that are refused.

use std::{
    io::{Read, Write},
    net::TcpStream,
};

use bytes::Bytes;
use mooncake_master::MasterConfig;
use mooncake_proto::{
    native_frame,
    v1::{self, request, response},
};

use crate::support::{NativeClient, Running, connect, eventually, get};

/// Returns whether the peer closed the connection: end of stream or a reset.
fn is_closed(stream: &mut impl Read) -> bool {
    matches!(stream.read(&mut [0; 64]), Ok(0))
        || stream.read(&mut [0; 64]).is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset)
}

#[test]
fn greeting_names_master_and_its_unix_socket() {
    let running = Running::whole();
    let tcp = running.native();
    let unix = running.unix();
    assert_eq!(tcp.greeting.version, native_frame::VERSION);
    assert_eq!(tcp.greeting.master.len(), 16);
    assert_eq!(tcp.greeting.master, unix.greeting.master);
    assert_eq!(tcp.greeting.master, running.master().service().identity());
}

#[test]
fn put_over_tcp_is_visible_over_unix_socket() {
    let running = Running::whole();
    let mut writer = running.native();
    writer.join("127.0.0.1:1", 1 << 20);
    writer.put("a", 100);
    let mut reader = running.unix();
    let found = reader.probe(&["a", "b"]);
    let states: Vec<_> = found.states().collect();
    assert_eq!(states, [v1::ObjectState::Complete, v1::ObjectState::Absent]);
    assert_eq!(found.lengths, [100, 0]);
    let status = reader.status();
    assert_eq!((status.keys, status.clients, status.capacity), (1, 1, 1 << 20));
    assert_eq!(status.rpc_address, running.addresses().rpc.to_string());
}

#[test]
fn pipelined_calls_are_answered_in_order() {
    let running = Running::whole();
    let mut client = running.native();
    client.join("127.0.0.1:1", 1 << 20);
    let known =
        request::Call::Heartbeat(v1::HeartbeatRequest { caller: client.caller(), registration: 0 });
    let status = request::Call::Status(v1::StatusRequest { caller: None });
    let pick = |i| if i % 3 == 0 { known.clone() } else { status.clone() };
    let calls: Vec<_> = (0..1000).map(pick).collect();
    client.send(&calls);
    for (i, call) in calls.iter().enumerate() {
        match (call, client.receive()) {
            (request::Call::Heartbeat(_), response::Call::Heartbeat(r)) => assert!(r.is_known),
            (request::Call::Status(_), response::Call::Status(_)) => {}
            (_, answer) => panic!("call {i}: {answer:?}"),
        }
    }
}

#[test]
fn stale_registration_must_register_again() {
    let running = Running::whole();
    let mut client = running.native();
    client.join("127.0.0.1:1", 1 << 20);
    // The first client of a master is its first registration.
    for (registration, is_known) in [(1, true), (0, true), (2, false)] {
        let beat = v1::HeartbeatRequest { caller: client.caller(), registration };
        client.send(&[request::Call::Heartbeat(beat)]);
        match client.receive() {
            response::Call::Heartbeat(r) => assert_eq!(r.is_known, is_known, "{registration}"),
            answer => panic!("{answer:?}"),
        }
    }
}

#[test]
fn fragmented_frame_is_one_call() {
    let running = Running::whole();
    let mut client = running.native();
    let mut wire = bytes::BytesMut::new();
    let call = request::Call::Status(v1::StatusRequest { caller: client.caller() });
    native_frame::encode(&v1::Request { call: Some(call), ..Default::default() }, &mut wire)
        .unwrap();
    for byte in &wire {
        client.stream.write_all(&[*byte]).unwrap();
    }
    assert!(matches!(client.receive(), response::Call::Status(_)));
}

#[test]
fn bad_call_fails_without_closing_connection() {
    let running = Running::whole();
    let mut client = running.native();
    let without_client = request::Call::Heartbeat(v1::HeartbeatRequest::default());
    assert!(matches!(client.call(without_client), response::Call::Failure(_)));
    client.stream.write_all(&0_u32.to_le_bytes()).unwrap();
    assert!(matches!(client.receive(), response::Call::Failure(f) if f.code == -600));
    client.status();
}

#[test]
fn oversized_frame_closes_connection() {
    let running = Running::whole();
    let mut client = running.native();
    client.stream.write_all(&u32::MAX.to_le_bytes()).unwrap();
    assert!(is_closed(&mut client.stream));
}

#[test]
fn undecodable_frame_closes_connection() {
    let running = Running::whole();
    let mut client = running.native();
    client.stream.write_all(&[4, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]).unwrap();
    assert!(is_closed(&mut client.stream));
}

#[test]
fn other_version_learns_ours_and_is_closed() {
    let running = Running::whole();
    let mut stream = connect(running.addresses().rpc);
    let mut greeting = native_frame::client_greeting();
    greeting[8] = 99;
    stream.write_all(&greeting).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let mut answer = bytes::BytesMut::from(&answer[..]);
    let ours: native_frame::ServerGreeting =
        native_frame::decode(&mut answer, native_frame::GREETING_BYTES_MAX).unwrap().unwrap();
    assert_eq!(ours.version, native_frame::VERSION);
    let metrics = get(running.addresses().admin.unwrap(), "/metrics");
    let metrics = metrics.text();
    assert!(metrics.contains("\nmooncake_master_refused_versions_total 1\n"), "{metrics}");
}

#[test]
fn garbage_and_partial_greeting_are_closed() {
    let running = Running::whole();
    let address = running.addresses().rpc;
    let mut half = connect(address);
    half.write_all(b"MOON").unwrap();
    for garbage in [&b"\x16\x03\x01\x02\x00"[..], b"MOONBEAM", b"hello\r\n", &[0; 64]] {
        let mut stream = connect(address);
        stream.write_all(garbage).unwrap();
        assert!(is_closed(&mut stream), "{}", garbage.escape_ascii());
    }
    half.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(is_closed(&mut half));
    running.native().status();
}

#[test]
fn closed_connection_makes_client_suspect() {
    let running = Running::whole();
    close_and_locate(&running, running.native());
    close_and_locate(&running, running.unix());
}

/// Registers an owner, puts an object, and closes the owner's connection.
fn close_and_locate<S: Read + Write>(running: &Running, mut owner: NativeClient<S>) {
    owner.join("127.0.0.1:1", 1 << 20);
    owner.put("a", 100);
    let mut reader = running.unix();
    let found = reader.locate("a").expect("found");
    assert_eq!(found.columns.expect("columns").places.expect("places").offsets.len(), 1);
    assert_eq!(found.segments[0].name, "127.0.0.1:1");
    assert!(found.fence_ms > 0);
    drop(owner);
    eventually("the reader sees the removal", || reader.locate("a").is_none());
    // The next owner puts under the same key.
    let selector = v1::KeySelector { by: Some(v1::key_selector::By::All(true)) };
    let call = v1::RemoveMatchingRequest {
        caller: reader.caller(),
        selector: Some(selector),
        force: true,
        ..Default::default()
    };
    reader.call(request::Call::RemoveMatching(call));
}

#[test]
fn client_with_another_connection_stays_readable() {
    let running = Running::whole();
    let mut owner = running.native();
    owner.join("127.0.0.1:1", 1 << 20);
    owner.put("a", 100);
    let mut second = running.native();
    second.id = owner.id;
    let mut reader = running.unix();
    let mut is_readable = || reader.locate("a").is_some();
    second.status();
    owner.stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(is_closed(&mut owner.stream), "the master closes its end, too");
    for _ in 0..200 {
        assert!(is_readable(), "the second connection is open");
    }
    drop(second);
    eventually("the last connection is closed", || !is_readable());
    let mut third = running.native();
    third.id = owner.id;
    third.status();
    assert!(is_readable(), "a call shows that the client lives");
}

#[test]
fn call_repeated_over_another_connection_gets_first_response() {
    let running = Running::whole();
    let mut first = running.native();
    first.join("127.0.0.1:1", 1 << 20);
    first.put("a", 100);
    let mut second = running.native();
    second.id = first.id;
    let keys = vec![Bytes::from_static(b"a")];
    let remove =
        v1::RemoveRequest { caller: first.caller(), keys, force: true, ..Default::default() };
    let remove = request::Call::Remove(remove);
    // The connection breaks after the call was delivered.
    first.send_numbered(1, remove.clone());
    first.stream.shutdown(std::net::Shutdown::Write).unwrap();
    drop(first);
    eventually("the call is executed", || {
        second.probe(&["a"]).states().eq([v1::ObjectState::Absent])
    });
    second.send_numbered(1, remove.clone());
    let removed = v1::RemoveResponse { results: vec![v1::ItemResult { failure: None }] };
    assert_eq!(second.receive(), response::Call::Remove(removed));
    second.send_numbered(2, remove);
    let response::Call::Remove(again) = second.receive() else { panic!("remove") };
    assert!(again.results[0].failure.is_some(), "another call");
}

#[test]
fn oversized_batch_error_names_limit() {
    let running = Running::whole();
    let mut client = running.native();
    let keys = vec![Bytes::from_static(b"k"); mooncake_master::service::BATCH_ITEMS_MAX + 1];
    let caller = client.caller();
    let call = v1::ProbeRequest { caller, keys, lease: false, ..Default::default() };
    let response::Call::Failure(failure) = client.call(request::Call::Probe(call)) else {
        panic!("the batch was taken")
    };
    assert!(failure.message.contains("limit=131072"), "{}", failure.message);
}

#[test]
fn rpc_port_answers_http_health() {
    let running = Running::whole();
    let address = running.addresses().rpc;
    for target in ["/", "/health"] {
        let answer = get(address, target);
        assert_eq!((answer.status, &answer.json()["status"]), (200, &"ok".into()));
    }
    assert_eq!(get(address, "/metrics").status, 404);
    assert_eq!(crate::support::http(address, "POST", "/", b"x").status, 404);
    let head = crate::support::http(address, "HEAD", "/", b"");
    assert_eq!((head.status, head.body.len()), (200, 0));
}

#[test]
fn refuses_large_frames_beyond_budget() {
    let running = Running::new(MasterConfig::embedded());
    let announced = (16_u32 << 20).to_le_bytes();
    let mut hoarders: Vec<_> = (0..32).map(|_| running.native()).collect();
    for hoarder in &mut hoarders {
        hoarder.stream.write_all(&announced).unwrap();
        hoarder.stream.write_all(b"the rest of it never comes").unwrap();
    }
    let mut client = running.native();
    let large = vec!["k"; 50_000];
    let probe = |client: &mut NativeClient<TcpStream>| {
        let keys = large.iter().map(|key| Bytes::from_static(key.as_bytes())).collect();
        client.call(request::Call::Probe(v1::ProbeRequest {
            caller: None,
            keys,
            lease: false,
            ..Default::default()
        }))
    };
    let mut refusal = None;
    // The heads of the large frames may still be in flight.
    eventually("a large frame is refused", || {
        let answer = probe(&mut client);
        if let response::Call::Failure(failure) = answer {
            refusal = Some(failure);
        }
        refusal.is_some()
    });
    let refusal = refusal.unwrap();
    assert_eq!(refusal.code, -900);
    assert!(refusal.message.contains("too many bytes"), "{}", refusal.message);
    assert_eq!(
        client.probe(&["k"]).states.len(),
        1,
        "the connection stays open, and small calls are served"
    );
    drop(hoarders);
    eventually(
        "permits are available again",
        || matches!(probe(&mut client), response::Call::Probe(answer) if answer.states.len() == 50_000),
    );
}

#[test]
fn answers_calls_received_before_stop() {
    let running = Running::new(MasterConfig::embedded());
    let mut client = running.native();
    let call = request::Call::Status(v1::StatusRequest { caller: None });
    client.send(&vec![call; 500]);
    // The first reply shows that the master is processing the calls, which arrived in one piece.
    client.receive();
    running.stop();
    let rest = std::iter::from_fn(|| client.try_receive()).count();
    assert_eq!(rest, 499);
}
