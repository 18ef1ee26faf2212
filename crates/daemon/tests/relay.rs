//! Tests of dummy clients over real sockets, with a master in the same process.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::BytesMut;
use mooncake_base::{ClientId, ErrorCode, TenantId};
use mooncake_daemon::{Listeners, Relay, RelayLimits, RelaySettings};
use mooncake_proto::{
    native_frame::{self, DaemonGreeting, ServerGreeting},
    v1::{self, request::Call, response},
};
use mooncake_store_client::{
    ClientConfig, DaemonLink, LinkConfig, PutOptions, PutOutcome, SocketLink,
};
use mooncake_testkit::{Cluster, ClusterSettings, Node, Random, cluster::key, until};

const PATIENCE: Duration = Duration::from_secs(20);

fn cluster() -> Cluster {
    Cluster::start(ClusterSettings::default()).unwrap()
}

fn relay(cluster: &Cluster, port: u16) -> Relay {
    relay_with(cluster, port, RelayLimits::default())
}

fn relay_with(cluster: &Cluster, port: u16, limits: RelayLimits) -> Relay {
    let link = SocketLink::new(&cluster.address().to_string(), LinkConfig::default()).unwrap();
    let settings = RelaySettings {
        link: Arc::new(link),
        daemon: DaemonGreeting {
            name: "127.0.0.1:1".to_owned(),
            metadata: "P2PHANDSHAKE".to_owned(),
        },
        host: "127.0.0.1".to_owned(),
        tenant: TenantId::default(),
        rpc_timeout: PATIENCE,
        limits,
    };
    Relay::start(Listeners::bind(port).unwrap(), settings).unwrap()
}

fn dummy(cluster: &Cluster, relay: &Relay, config: LinkConfig) -> Node {
    let link = DaemonLink::connect(&relay.address().to_string(), config, PATIENCE).unwrap();
    cluster.join_by(ClientConfig::default(), Arc::new(link)).unwrap()
}

/// A connection that sends hand-made frames.
struct Raw {
    stream: TcpStream,
    incoming: BytesMut,
}

impl Raw {
    fn connect(address: SocketAddr) -> Self {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(&native_frame::client_greeting()).unwrap();
        let mut raw = Self { stream, incoming: BytesMut::new() };
        let greeting: ServerGreeting = raw.receive().unwrap();
        assert_eq!(greeting.daemon.unwrap().metadata, "P2PHANDSHAKE");
        raw
    }

    fn send(&mut self, call: Call) {
        let mut frame = BytesMut::new();
        let request = v1::Request { call: Some(call), ..Default::default() };
        native_frame::encode(&request, &mut frame).unwrap();
        self.stream.write_all(&frame).unwrap();
    }

    /// Receives a frame; `None` if the connection ends first.
    fn receive<M: prost::Message + Default>(&mut self) -> Option<M> {
        loop {
            let frame =
                native_frame::decode(&mut self.incoming, native_frame::FRAME_BYTES_MAX).unwrap();
            if frame.is_some() {
                return frame;
            }
            let mut part = [0; 4096];
            match self.stream.read(&mut part) {
                Ok(count) if count > 0 => self.incoming.extend_from_slice(&part[..count]),
                _ => return None,
            }
        }
    }

    /// Receives a failure and returns its code.
    fn refused(&mut self) -> i32 {
        match self.receive::<v1::Response>().unwrap().call {
            Some(response::Call::Failure(failure)) => failure.code,
            other => panic!("{other:?}"),
        }
    }
}

fn caller(client: ClientId) -> Option<v1::Caller> {
    Some(v1::Caller { client: client.to_bytes().to_vec().into(), tenant: String::new() })
}

fn status(client: ClientId) -> Call {
    Call::Status(v1::StatusRequest { caller: caller(client) })
}

#[test]
fn dummy_client_shares_objects_with_other_clients() {
    let cluster = cluster();
    let relay = relay(&cluster, 0);
    let dummy = dummy(&cluster, &relay, LinkConfig::default());
    let value = vec![7; 300_000];
    dummy.put("a", &value).unwrap();
    assert_eq!(dummy.get("a").unwrap().unwrap(), value);
    assert_eq!(cluster.nodes[0].get("a").unwrap().unwrap(), value);
    cluster.nodes[0].put("b", b"from a member").unwrap();
    assert_eq!(dummy.get("b").unwrap().unwrap(), b"from a member");
    assert_eq!(relay.dummy_clients(), 1);
    dummy.client.health().unwrap();
}

#[test]
fn unregistered_dummy_client_is_removed() {
    let cluster = cluster();
    let relay = relay(&cluster, 0);
    let dummy = dummy(&cluster, &relay, LinkConfig::default());
    assert_eq!(cluster.nodes[0].client.status().unwrap().clients, 2);
    drop(dummy);
    assert_eq!(relay.dummy_clients(), 0);
    assert_eq!(cluster.nodes[0].client.status().unwrap().clients, 1);
}

#[test]
fn last_connection_of_dummy_client_releases_its_put() {
    let cluster = cluster();
    let relay = relay(&cluster, 0);
    let id = ClientId::random();
    let mut raw = Raw::connect(relay.address());
    raw.send(Call::Register(v1::RegisterRequest { caller: caller(id), ..Default::default() }));
    assert!(matches!(
        raw.receive::<v1::Response>().unwrap().call,
        Some(response::Call::Register(_))
    ));
    let config = v1::ReplicateConfig { replica_num: 1, ..Default::default() };
    raw.send(Call::PutStart(v1::PutStartRequest {
        caller: caller(id),
        columns: Some(v1::PutColumns::pack([("k", 1 << 20)])),
        config: Some(config),
        ..Default::default()
    }));
    assert!(raw.receive::<v1::Response>().is_some());
    let member = &cluster.nodes[0];
    let busy = member.client.put_bytes(&key("k"), b"x", &PutOptions::default());
    assert!(!matches!(busy, Ok(PutOutcome::Stored { .. })), "the dummy client is writing it");
    drop(raw);
    until(PATIENCE, "the dummy client is gone", || {
        (member.client.status().unwrap().clients == 1).then_some(())
    });
    member.put("k", b"another's").unwrap();
    assert_eq!(member.get("k").unwrap().unwrap(), b"another's");
}

#[test]
fn calls_fail_without_daemon_and_resume_with_next() {
    let cluster = cluster();
    let first = relay(&cluster, 0);
    let port = first.address().port();
    let dummy = dummy(&cluster, &first, LinkConfig::default());
    dummy.put("before", b"1").unwrap();
    drop(first);
    let began = Instant::now();
    let error = dummy.get("before").unwrap_err();
    assert_eq!(error.code(), ErrorCode::RPC_FAIL);
    assert!(error.to_string().contains("daemon"), "{error}");
    assert!(began.elapsed() < PATIENCE);
    let _second = relay(&cluster, port);
    let found = until(PATIENCE, "calls continue", || dummy.get("before").ok());
    assert_eq!(found.unwrap(), b"1");
    dummy.put("after", b"2").unwrap();
}

#[test]
fn dummy_client_waits_for_daemon_start() {
    let cluster = cluster();
    let listeners = Listeners::bind(0).unwrap();
    let port = listeners.address().port();
    drop(listeners);
    let coming = std::thread::spawn(move || {
        DaemonLink::connect(&format!("127.0.0.1:{port}"), LinkConfig::default(), PATIENCE)
    });
    let _relay = relay(&cluster, port);
    let link = coming.join().unwrap().unwrap();
    let dummy = cluster.join_by(ClientConfig::default(), Arc::new(link)).unwrap();
    dummy.put("a", b"1").unwrap();
}

#[test]
fn rejects_master_and_closed_port_as_daemon() {
    let cluster = cluster();
    let master = cluster.address().to_string();
    let error = DaemonLink::connect(&master, LinkConfig::default(), PATIENCE).unwrap_err();
    assert_eq!(error.code(), ErrorCode::INVALID_PARAMS, "{error}");
    let soon = Duration::from_millis(200);
    let error = DaemonLink::connect("127.0.0.1:1", LinkConfig::default(), soon).unwrap_err();
    assert_eq!(error.code(), ErrorCode::RPC_FAIL, "{error}");
}

#[test]
fn serves_dummy_clients_over_tcp() {
    let cluster = cluster();
    let relay = relay(&cluster, 0);
    let config = LinkConfig { may_use_unix_socket: false, ..LinkConfig::default() };
    let dummy = dummy(&cluster, &relay, config);
    dummy.put("a", b"1").unwrap();
    assert_eq!(dummy.get("a").unwrap().unwrap(), b"1");
}

#[test]
fn daemon_for_its_own_user_refuses_tcp_and_names_the_option() {
    let cluster = cluster();
    let limits = RelayLimits { own_user_only: true, ..RelayLimits::default() };
    let relay = relay_with(&cluster, 0, limits);
    let dummy = dummy(&cluster, &relay, LinkConfig::default());
    dummy.put("a", b"1").unwrap();
    let mut raw = Raw::connect(relay.address());
    raw.send(status(ClientId::random()));
    match raw.receive::<v1::Response>().unwrap().call {
        Some(response::Call::Failure(failure)) => {
            assert_eq!(failure.code, ErrorCode::ILLEGAL_CLIENT.number(), "{failure:?}");
            assert!(format!("{failure:?}").contains("--unix_only"), "{failure:?}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(dummy.get("a").unwrap().unwrap(), b"1", "over the Unix socket of the own user");
}

#[test]
fn dummy_client_cannot_mount_memory() {
    let cluster = cluster();
    let relay = relay(&cluster, 0);
    let dummy = dummy(&cluster, &relay, LinkConfig::default());
    let error = dummy.client.mount(1 << 20).unwrap_err();
    assert_eq!(error.code(), ErrorCode::NOT_SUPPORTED, "{error}");
}

#[test]
fn connection_belongs_to_one_client() {
    let cluster = cluster();
    let relay = relay(&cluster, 0);
    let mut raw = Raw::connect(relay.address());
    let id = ClientId::random();
    raw.send(status(id));
    assert!(matches!(raw.receive::<v1::Response>().unwrap().call, Some(response::Call::Status(_))));
    raw.send(status(cluster.nodes[0].client.id()));
    assert_eq!(raw.refused(), ErrorCode::ILLEGAL_CLIENT.number());
    raw.send(Call::Status(v1::StatusRequest { caller: None }));
    assert_eq!(raw.refused(), ErrorCode::INVALID_PARAMS.number());
    raw.send(status(id));
    assert!(raw.receive::<v1::Response>().is_some(), "the connection stays usable");
}

#[test]
fn invalid_frame_gets_error_and_closes_connection() {
    let cluster = cluster();
    let relay = relay(&cluster, 0);
    for bytes in [&[0xff; 64][..], &[3, 0, 0, 0, 0xff, 0xff, 0xff], b"\0\0\0\x02"] {
        let mut raw = Raw::connect(relay.address());
        raw.stream.write_all(bytes).unwrap();
        assert_eq!(raw.refused(), ErrorCode::RPC_FAIL.number(), "{bytes:?}");
        assert!(raw.receive::<v1::Response>().is_none(), "the connection ends");
    }
}

#[test]
fn random_bytes_do_not_disturb_relay() {
    let cluster = cluster();
    let relay = relay(&cluster, 0);
    let mut random = Random::new();
    for _ in 0..300 {
        let mut bytes: Vec<u8> = (0..random.below(200)).map(|_| random.below(256) as u8).collect();
        let has_greeting = random.below(4) > 0;
        if has_greeting && random.below(2) == 0 && bytes.len() > 4 {
            let length = (bytes.len() - 4) as u32;
            bytes[..4].copy_from_slice(&length.to_le_bytes());
        }
        let mut stream = TcpStream::connect(relay.address()).unwrap();
        // The relay may close the connection in the middle.
        let _ = has_greeting.then(|| stream.write_all(&native_frame::client_greeting()));
        let _ = stream.write_all(&bytes);
    }
    let dummy = dummy(&cluster, &relay, LinkConfig::default());
    dummy.put("a", b"1").unwrap();
    until(PATIENCE, "all others are gone", || (relay.dummy_clients() == 1).then_some(()));
}

#[test]
fn silent_connections_give_way_to_dummy_clients() {
    let cluster = cluster();
    let limits = RelayLimits { connections_max: 24, ..RelayLimits::default() };
    let relay = relay_with(&cluster, 0, limits);
    let first = dummy(&cluster, &relay, LinkConfig::default());
    let strangers: Vec<TcpStream> =
        (0..40).map(|_| TcpStream::connect(relay.address()).unwrap()).collect();
    let began = Instant::now();
    let second = dummy(&cluster, &relay, LinkConfig::default());
    second.put("a", b"1").unwrap();
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert_eq!(first.get("a").unwrap().unwrap(), b"1", "a client that makes calls stays");
    drop(strangers);
}

#[test]
fn trickled_frames_end_their_connection() {
    let cluster = cluster();
    let limit = Duration::from_millis(200);
    let limits =
        RelayLimits { greeting_timeout: limit, frame_timeout: limit, ..RelayLimits::default() };
    let relay = relay_with(&cluster, 0, limits);
    // Each byte of a greeting, or of a frame of a mebibyte, comes in time. The whole does not.
    let greeted = Raw::connect(relay.address()).stream;
    let ungreeted = TcpStream::connect(relay.address()).unwrap();
    let greeting = native_frame::client_greeting();
    let length = (1_u32 << 20).to_le_bytes();
    for (mut stream, begin) in [(greeted, &length[..]), (ungreeted, &greeting[..])] {
        stream.set_read_timeout(Some(limit * 3 / 4)).unwrap();
        let began = Instant::now();
        for byte in begin.iter().chain(std::iter::repeat(&0)) {
            assert!(began.elapsed() < Duration::from_secs(5), "the connection goes on");
            let sent = stream.write_all(&[*byte]);
            match stream.read(&mut [0; 64]) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock && sent.is_ok() => {}
                Ok(count) => {
                    assert_eq!(count, 0, "the relay answers nothing");
                    break;
                }
                Err(_) => break,
            }
        }
        assert!(began.elapsed() < limit * 8, "it ended after its first bytes");
    }
}

#[test]
fn stop_closes_silent_connections() {
    let cluster = cluster();
    let relay = relay(&cluster, 0);
    let mut silent = Raw::connect(relay.address());
    let mut unsaid = TcpStream::connect(relay.address()).unwrap();
    let began = Instant::now();
    relay.stop();
    assert!(began.elapsed() < PATIENCE);
    assert!(silent.receive::<v1::Response>().is_none());
    assert!(!matches!(unsaid.read(&mut [0; 1]), Ok(1)));
}
