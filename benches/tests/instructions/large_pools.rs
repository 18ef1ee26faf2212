//! The counted calls of large pools: puts by a client that avoids many peers, and connections that
//! give way at a holder that has as many as it may have.

use std::{
    collections::VecDeque,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    sync::Arc,
};

use bytes::Bytes;
use mooncake_base::{ClientId, SegmentId};
use mooncake_benches::callgrind::counted;
use mooncake_master::{MasterConfig, Origin, Service};
use mooncake_os::rlimit;
use mooncake_proto::v1::{self, request, response};
use mooncake_transfer_engine::transport::tcp::{TcpServer, TcpServerSettings};
use tokio::runtime::Builder;

/// Puts of [`puts`].
pub(crate) const PUTS: usize = 200;

/// Peers that lend memory.
const PEERS: usize = 1000;

/// Makes puts while all peers can be reached.
pub(crate) fn puts_avoiding_none() {
    puts(0);
}

/// Makes puts while a quarter of the peers cannot be reached.
pub(crate) fn puts_avoiding_quarter() {
    puts(PEERS / 4);
}

/// Makes puts of one object each, by a client that avoids this number of peers.
fn puts(avoided: usize) {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let master = runtime.block_on(mooncake_master::start(MasterConfig::embedded())).unwrap();
    let service = master.service();
    for peer in 0..PEERS {
        lend(&service, peer);
    }
    let avoided_endpoints: Vec<_> = (0..avoided).map(endpoint).collect();
    for number in 0..=PUTS {
        let key = format!("{number:064}");
        let start = request::Call::PutStart(v1::PutStartRequest {
            caller: caller(0),
            columns: Some(v1::PutColumns::pack([(key, 4096)])),
            avoided_endpoints: avoided_endpoints.clone(),
            ..v1::PutStartRequest::default()
        });
        // The first one opens what later ones find open.
        if number == 0 {
            check_started(ask(&service, start));
            continue;
        }
        let mut start = Some(start);
        counted(&mut || check_started(ask(&service, start.take().unwrap())));
    }
    runtime.block_on(master.stop());
}

fn check_started(answer: response::Call) {
    let response::Call::PutStart(v1::PutStartResponse { columns, .. }) = answer else {
        panic!("another answer: {answer:?}")
    };
    assert!(columns.unwrap().failures.is_empty());
}

/// Registers a client that lends one segment.
fn lend(service: &Arc<Service>, peer: usize) {
    let name = endpoint(peer);
    let register = v1::RegisterRequest {
        caller: caller(peer),
        name: name.clone(),
        ..v1::RegisterRequest::default()
    };
    ask(service, request::Call::Register(register));
    let id = SegmentId::from_bits(peer as u128 + 1).to_bytes();
    let segment = v1::Segment {
        id: Bytes::copy_from_slice(&id),
        incarnation: 1,
        name: name.clone(),
        endpoint: name,
        base: 1 << 40,
        length: 1 << 20,
        protocol: "tcp".to_owned(),
        kind: v1::SegmentKind::Memory.into(),
    };
    let (caller, segments) = (caller(peer), vec![segment]);
    let mount = v1::MountRequest { caller, segments, ..v1::MountRequest::default() };
    ask(service, request::Call::Mount(mount));
}

fn ask(service: &Arc<Service>, call: request::Call) -> response::Call {
    let request = v1::Request { call: Some(call), ..v1::Request::default() };
    let answer = service.dispatch(request, &Origin::in_process()).call.unwrap();
    assert!(!matches!(answer, response::Call::Failure(_)), "{answer:?}");
    answer
}

fn endpoint(peer: usize) -> String {
    format!("peer-{peer}:1")
}

fn caller(peer: usize) -> Option<v1::Caller> {
    let client = ClientId::from_bits(peer as u128 + 1).to_bytes();
    Some(v1::Caller { client: Bytes::copy_from_slice(&client), tenant: String::new() })
}

/// Connections that give way in [`displacements`].
pub(crate) const DISPLACEMENTS: usize = 1500;

/// Connections that the listener may have.
const CONNECTIONS_MAX: usize = 1500;

/// The greeting of a client that wants any engine.
const GREETING: [u8; 32] = *b"mncake1\xF7\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

/// Opens connections to a listener that has as many as it may have, so that each new one displaces
/// another.
pub(crate) fn displacements() {
    // Both ends of each connection are in this process.
    rlimit::raise();
    assert!(rlimit::limit() > 3 * CONNECTIONS_MAX as u64, "the limit of open files is too low");
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let settings =
        TcpServerSettings { connections_max: CONNECTIONS_MAX, ..TcpServerSettings::default() };
    let server = TcpServer::start(listener, Arc::default(), settings, runtime.handle()).unwrap();
    let open = || {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.write_all(&GREETING).unwrap();
        let mut greeting = [0; GREETING.len()];
        stream.read_exact(&mut greeting).unwrap();
        stream
    };
    let mut connections: VecDeque<_> = (0..CONNECTIONS_MAX).map(|_| open()).collect();
    for _ in 0..DISPLACEMENTS {
        connections.push_back(open());
        // The one that waited longest has given way.
        assert_eq!(connections.pop_front().unwrap().read(&mut [0]).unwrap(), 0);
    }
    server.close();
}
