//! Tests of the link against a scripted server.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr as UnixAddress, UnixListener},
    },
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::Instant,
};

use bytes::BytesMut;
use mooncake_base::{ClientId, ErrorKind};
use mooncake_proto::{
    native_frame::{self, ServerGreeting},
    v1::response::Call as Reply,
};

use super::*;

const SECOND: Duration = Duration::from_secs(1);

/// The server's reaction to a request.
#[derive(Clone, Copy, PartialEq)]
enum Reaction {
    /// Answers with the number of the connection and whether it is a Unix socket.
    Reply,
    HangUp,
    Silence,
}

/// A server on loopback. `Choose` picks the reaction by connection and request.
struct Server {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
    is_over: Arc<AtomicBool>,
    acceptors: Vec<JoinHandle<()>>,
    unix: Option<UnixAddress>,
}

type Choose = fn(usize, usize) -> Reaction;

impl Server {
    fn start(choose: Choose) -> Self {
        Self::with_unix(choose, None)
    }

    /// Also listens on a Unix socket, where it greets with the given id.
    fn with_unix(choose: Choose, unix_id: Option<&[u8]>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Arc::new(AtomicUsize::new(0));
        let is_over = Arc::new(AtomicBool::new(false));
        let name = format!("mooncake-test-{}", ClientId::random());
        let greeting = |master: &[u8], unix_socket: &str| ServerGreeting {
            version: native_frame::VERSION,
            master: master.to_vec(),
            unix_socket: unix_socket.to_owned(),
            ..ServerGreeting::default()
        };
        let mut acceptors = Vec::new();
        let mut unix = None;
        if let Some(id) = unix_id {
            let at = UnixAddress::from_abstract_name(&name).unwrap();
            let listener = UnixListener::bind_addr(&at).unwrap();
            unix = Some(at);
            let greeting = greeting(id, &name);
            let (connections, is_over) = (Arc::clone(&connections), Arc::clone(&is_over));
            acceptors.push(std::thread::spawn(move || {
                while let Ok((stream, _)) = listener.accept() {
                    if is_over.load(Ordering::SeqCst) {
                        return;
                    }
                    serve(stream, &greeting, &connections, choose, true);
                }
            }));
        }
        let greeting = greeting(b"m", if unix_id.is_some() { &name } else { "" });
        let (others, over) = (Arc::clone(&connections), Arc::clone(&is_over));
        acceptors.push(std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                if over.load(Ordering::SeqCst) {
                    return;
                }
                serve(stream, &greeting, &others, choose, false);
            }
        }));
        Self { address, connections, is_over, acceptors, unix }
    }

    fn link(&self, config: LinkConfig) -> SocketLink {
        SocketLink::new(&self.address.to_string(), config).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        TcpStream::connect(self.address).unwrap();
        if let Some(unix) = &self.unix {
            std::os::unix::net::UnixStream::connect_addr(unix).unwrap();
        }
        for acceptor in self.acceptors.drain(..) {
            acceptor.join().unwrap();
        }
    }
}

fn serve(
    mut stream: impl Read + Write + Send + 'static,
    greeting: &ServerGreeting,
    connections: &Arc<AtomicUsize>,
    choose: Choose,
    is_unix: bool,
) {
    let greeting = greeting.clone();
    let connections = Arc::clone(connections);
    // The thread ends when the client hangs up, which each test does.
    std::thread::spawn(move || {
        let mut hello = [0; 12];
        stream.read_exact(&mut hello).unwrap();
        native_frame::check_client_greeting(&hello).unwrap();
        let mut outgoing = BytesMut::new();
        native_frame::encode(&greeting, &mut outgoing).unwrap();
        stream.write_all(&outgoing).unwrap();
        let mut incoming = BytesMut::new();
        let mut connection = None;
        let mut requests = 0;
        loop {
            while native_frame::decode::<v1::Request>(&mut incoming, native_frame::FRAME_BYTES_MAX)
                .unwrap()
                .is_some()
            {
                let connection =
                    *connection.get_or_insert_with(|| connections.fetch_add(1, Ordering::SeqCst));
                let reaction = choose(connection, requests);
                requests += 1;
                match reaction {
                    Reaction::HangUp => return,
                    Reaction::Silence => continue,
                    Reaction::Reply => {}
                }
                let status = v1::StatusResponse {
                    keys: connection as u64,
                    clients: u64::from(is_unix),
                    ..Default::default()
                };
                let response =
                    v1::Response { call: Some(Reply::Status(status)), ..v1::Response::default() };
                outgoing.clear();
                native_frame::encode(&response, &mut outgoing).unwrap();
                if stream.write_all(&outgoing).is_err() {
                    return;
                }
            }
            let mut chunk = [0; 4096];
            match stream.read(&mut chunk) {
                Ok(0) | Err(_) => return,
                Ok(count) => incoming.extend_from_slice(&chunk[..count]),
            }
        }
    });
}

fn status() -> v1::Request {
    v1::Request { call: Some(Call::Status(v1::StatusRequest::default())), ..Default::default() }
}

fn put_start() -> v1::Request {
    v1::Request { call: Some(Call::PutStart(v1::PutStartRequest::default())), ..Default::default() }
}

fn soon() -> Moment {
    SystemClock.now() + 10 * SECOND
}

/// Returns the connection of the response and whether it is a Unix socket.
fn answered(response: Result<v1::Response, Box<CallFailure>>) -> (u64, bool) {
    match response.unwrap().call {
        Some(Reply::Status(status)) => (status.keys, status.clients == 1),
        other => panic!("{other:?}"),
    }
}

#[test]
fn reuses_one_connection_for_sequential_calls() {
    let server = Server::start(|_, _| Reaction::Reply);
    let link = server.link(LinkConfig::default());
    for _ in 0..3 {
        assert_eq!(answered(link.call(status(), soon())), (0, false));
    }
    assert_eq!(server.connections.load(Ordering::SeqCst), 1);
}

#[test]
fn uses_unix_socket_only_of_same_master() {
    let same = Server::with_unix(|_, _| Reaction::Reply, Some(b"m"));
    assert!(answered(same.link(LinkConfig::default()).call(status(), soon())).1);
    let tcp_only = LinkConfig { may_use_unix_socket: false, ..LinkConfig::default() };
    assert!(!answered(same.link(tcp_only).call(status(), soon())).1);
    let other = Server::with_unix(|_, _| Reaction::Reply, Some(b"x"));
    assert!(!answered(other.link(LinkConfig::default()).call(status(), soon())).1);
}

#[test]
fn dead_pooled_connection_is_reported_and_replaced() {
    let hang_up_once = |connection, request| match (connection, request) {
        (0, 1) => Reaction::HangUp,
        _ => Reaction::Reply,
    };
    let server = Server::start(hang_up_once);
    let link = server.link(LinkConfig::default());
    assert_eq!(answered(link.call(status(), soon())).0, 0);
    let failure = link.call(put_start(), soon()).unwrap_err();
    assert_eq!(failure.error.code(), ErrorCode::RPC_FAIL, "{failure:?}");
    assert_eq!(failure.kind, AttemptFailure::Broken, "the master may have executed it");
    assert_eq!(failure.request, Some(put_start()), "it is the caller who sends it again");
    assert_eq!(answered(link.call(status(), soon())).0, 1);
}

#[test]
fn call_times_out_at_deadline() {
    let server = Server::start(|_, _| Reaction::Silence);
    let link = server.link(LinkConfig::default());
    let start = Instant::now();
    let error = link.call(status(), SystemClock.now() + SECOND / 5).unwrap_err().error;
    assert_eq!(error.code(), ErrorCode::RPC_TIMEOUT, "{error}");
    assert!(error.to_string().contains(&server.address.to_string()), "{error}");
    assert!((SECOND / 5..5 * SECOND).contains(&start.elapsed()), "{:?}", start.elapsed());
}

#[test]
fn close_wakes_waiting_call() {
    let server = Server::start(|_, _| Reaction::Silence);
    let link = Arc::new(server.link(LinkConfig::default()));
    let other = Arc::clone(&link);
    let waiter = std::thread::spawn(move || other.call(status(), SystemClock.now() + 60 * SECOND));
    let limit = Instant::now() + 10 * SECOND;
    while server.connections.load(Ordering::SeqCst) == 0 {
        assert!(Instant::now() < limit, "the call never arrived");
        std::thread::yield_now();
    }
    link.close();
    let start = Instant::now();
    assert!(waiter.join().unwrap().is_err());
    assert!(start.elapsed() < 10 * SECOND);
    assert_eq!(link.call(status(), soon()).unwrap_err().error.kind(), ErrorKind::Closed);
}

#[test]
fn respects_connection_limit() {
    let server = Server::start(|_, _| Reaction::Silence);
    let link = Arc::new(server.link(LinkConfig { connections_max: 1, ..LinkConfig::default() }));
    let (other, (sender, receiver)) = (Arc::clone(&link), mpsc::sync_channel(1));
    let waiter = std::thread::spawn(move || {
        sender.send(()).unwrap();
        other.call(status(), SystemClock.now() + 60 * SECOND)
    });
    receiver.recv().unwrap();
    let limit = Instant::now() + 10 * SECOND;
    while server.connections.load(Ordering::SeqCst) == 0 {
        assert!(Instant::now() < limit, "the call never arrived");
        std::thread::yield_now();
    }
    let error = link.call(status(), SystemClock.now() + SECOND / 10).unwrap_err().error;
    assert_eq!(error.code(), ErrorCode::RPC_TIMEOUT, "{error}");
    assert!(error.to_string().contains("busy"), "{error}");
    link.close();
    assert!(waiter.join().unwrap().is_err());
}

#[test]
fn heartbeat_does_not_wait_for_calls_that_hang() {
    let first_is_silent = |connection, _| match connection {
        0 => Reaction::Silence,
        _ => Reaction::Reply,
    };
    let server = Server::start(first_is_silent);
    let link = Arc::new(server.link(LinkConfig { connections_max: 1, ..LinkConfig::default() }));
    let other = Arc::clone(&link);
    let waiter = std::thread::spawn(move || other.call(status(), SystemClock.now() + 60 * SECOND));
    let limit = Instant::now() + 10 * SECOND;
    while server.connections.load(Ordering::SeqCst) == 0 {
        assert!(Instant::now() < limit, "the call never arrived");
        std::thread::yield_now();
    }
    let heartbeat = Call::Heartbeat(v1::HeartbeatRequest::default());
    for _ in 0..3 {
        let request = v1::Request { call: Some(heartbeat.clone()), ..Default::default() };
        assert_eq!(answered(link.call(request, soon())).0, 1, "a connection of their own");
    }
    link.close();
    assert!(waiter.join().unwrap().is_err());
}

#[test]
fn names_dead_address_and_pauses_retries() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let link = SocketLink::new(&address.to_string(), LinkConfig::default()).unwrap();
    let start = Instant::now();
    let first = link.call(status(), soon()).unwrap_err().error;
    assert_eq!(first.code(), ErrorCode::RPC_FAIL);
    assert!(first.to_string().contains(&address.to_string()), "{first}");
    assert!(!first.remedy().is_empty());
    let listener = TcpListener::bind(address).unwrap();
    let second = link.call(status(), SystemClock.now() + SECOND).unwrap_err().error;
    assert_eq!(second.code(), ErrorCode::RPC_FAIL, "{second}");
    listener.set_nonblocking(true).unwrap();
    let tried = listener.accept().is_ok();
    // On a very busy machine, the pause may have passed, and a retry is correct.
    assert!(!tried || start.elapsed() >= SECOND / 10, "it was tried again at once");
}

#[test]
fn rejects_server_that_is_no_master() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let web = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 12]).unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
    });
    let link = SocketLink::new(&address.to_string(), LinkConfig::default()).unwrap();
    let error = link.call(status(), soon()).unwrap_err().error;
    assert_eq!(error.code(), ErrorCode::RPC_FAIL);
    assert!(error.to_string().contains("no mooncake master"), "{error}");
    web.join().unwrap();
}

#[test]
fn tries_every_address_of_host_name() {
    let server = Server::start(|_, _| Reaction::Reply);
    let address = format!("localhost:{}", server.address.port());
    let link = SocketLink::new(&address, LinkConfig::default()).unwrap();
    link.call(status(), soon()).unwrap();
    assert!(SocketLink::new("a:b:c", LinkConfig::default()).is_err());
}
