//! End-to-end tests of clients and servers, including failures.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use mooncake_base::{Endpoint, ErrorKind, Result};
use mooncake_rpc::{Client, ClientConfig, Kind, Server, ServerConfig};

const SOON: Duration = Duration::from_secs(20);

fn server(config: ServerConfig) -> Arc<Server> {
    Arc::new(Server::start(&Endpoint::new("127.0.0.1", 0), config).unwrap())
}

fn client(connections_max: usize, timeout: Duration) -> Client {
    Client::new(ClientConfig { connections_max, timeout }).unwrap()
}

fn send(client: &Client, server: &Server, body: &[u8]) -> Result<()> {
    let target = server.address().to_string();
    client.send(&target, Kind::Data, b"", &mut &*body, body.len() as u64)
}

/// Answers `count` messages with the result of `answer` for their bodies.
fn answering(
    server: &Arc<Server>,
    count: usize,
    answer: fn(&[u8]) -> Result<(), String>,
) -> thread::JoinHandle<Vec<Vec<u8>>> {
    let server = Arc::clone(server);
    thread::spawn(move || {
        (0..count)
            .map(|_| {
                let mut delivery = server.take(SOON).unwrap().unwrap();
                let body = delivery.take_body();
                delivery.answer(answer(&body));
                body
            })
            .collect()
    })
}

#[test]
fn delivers_bodies_of_every_size_with_description() {
    let (server, client) = (server(ServerConfig::default()), client(2, SOON));
    for length in [0, 1, 100, 262_112, 262_144, 262_145, 9_000_001] {
        let body: Vec<u8> = (0..length).map(|index| (index % 251) as u8).collect();
        let taker = Arc::clone(&server);
        let taken = thread::spawn(move || {
            let mut delivery = taker.take(SOON).unwrap().unwrap();
            let (kind, meta) = (delivery.kind, delivery.meta.clone());
            let body = delivery.take_body();
            delivery.answer(Ok(()));
            (kind, meta, body)
        });
        let target = server.address().to_string();
        client.send(&target, Kind::Tensor, b"meta", &mut &body[..], length).unwrap();
        assert_eq!(taken.join().unwrap(), (Kind::Tensor, b"meta".to_vec(), body));
    }
}

#[test]
fn many_threads_share_few_connections() {
    let (server, client) = (server(ServerConfig::default()), Arc::new(client(3, SOON)));
    let takers: Vec<_> = (0..4).map(|_| answering(&server, 50, |_| Ok(()))).collect();
    let senders: Vec<_> = (0..10_u8)
        .map(|number| {
            let (client, server) = (Arc::clone(&client), Arc::clone(&server));
            thread::spawn(move || {
                for round in 0..20_u8 {
                    send(&client, &server, &[number, round]).unwrap();
                }
            })
        })
        .collect();
    senders.into_iter().for_each(|sender| sender.join().unwrap());
    let mut taken: Vec<_> = takers.into_iter().flat_map(|taker| taker.join().unwrap()).collect();
    taken.sort();
    let wanted = (0..10_u8).flat_map(|number| (0..20_u8).map(move |round| vec![number, round]));
    assert_eq!(taken, wanted.collect::<Vec<_>>());
}

#[test]
fn refusal_gives_reason_and_keeps_connection() {
    let (server, client) = (server(ServerConfig::default()), client(1, SOON));
    let taker = answering(&server, 2, |body| match body {
        b"no" => Err("not today".to_owned()),
        _ => Ok(()),
    });
    let error = send(&client, &server, b"no").unwrap_err();
    assert!(error.to_string().contains("not today"), "{error}");
    send(&client, &server, b"yes").unwrap();
    taker.join().unwrap();
    // The receiver drops the message without an answer.
    let silent = Arc::clone(&server);
    let taker = thread::spawn(move || drop(silent.take(SOON).unwrap()));
    let error = send(&client, &server, b"lost").unwrap_err();
    assert!(error.to_string().contains("dropped without an answer"), "{error}");
    taker.join().unwrap();
}

#[test]
fn calls_time_out() {
    let short = Duration::from_millis(200);
    let config = ServerConfig { timeout: short, ..ServerConfig::default() };
    let server = server(config);
    let begin = Instant::now();
    let error = send(&client(1, SOON), &server, b"x").unwrap_err();
    assert!(error.to_string().contains("in time"), "{error}");
    assert_eq!(
        server.take(Duration::ZERO).unwrap().map(|late| late.body.clone()),
        Some(b"x".into())
    );
    // A server that accepts and never answers.
    let dumb = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = dumb.local_addr().unwrap().to_string();
    let waiting = client(1, short);
    let error = waiting.send(&target, Kind::Data, b"", &mut &b""[..], 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
}

#[test]
fn reconnects_to_restarted_server() {
    let (first, client) = (server(ServerConfig::default()), client(1, SOON));
    let taker = answering(&first, 1, |_| Ok(()));
    send(&client, &first, b"x").unwrap();
    taker.join().unwrap();
    let at = first.address();
    first.stop();
    first.stop();
    assert!(first.take(SOON).unwrap_err().kind() == ErrorKind::Closed);
    assert!(send(&client, &first, b"x").is_err());
    let endpoint = Endpoint::new("127.0.0.1", at.port());
    let second = Arc::new(Server::start(&endpoint, ServerConfig::default()).unwrap());
    let taker = answering(&second, 1, |_| Ok(()));
    send(&client, &second, b"y").unwrap();
    assert_eq!(taker.join().unwrap(), [b"y"]);
    let error = Server::start(&endpoint, ServerConfig::default()).unwrap_err();
    assert!(error.to_string().contains(&at.port().to_string()), "{error}");
    for target in ["", "nonsense", "127.0.0.1", "127.0.0.1:x"] {
        assert!(client.send(target, Kind::Data, b"", &mut &b""[..], 0).is_err(), "{target}");
    }
}

#[test]
fn stop_ends_waiting_calls() {
    let (server, client) = (server(ServerConfig::default()), client(2, SOON));
    let (taker, stopper) = (Arc::clone(&server), Arc::clone(&server));
    let held = thread::spawn(move || {
        let delivery = taker.take(SOON).unwrap().unwrap();
        // A thread that handles a message may stop the server.
        stopper.stop();
        delivery.answer(Ok(()));
    });
    let begin = Instant::now();
    let error = send(&client, &server, b"x").unwrap_err();
    assert!(error.to_string().contains("stopped"), "{error}");
    held.join().unwrap();
    assert!(begin.elapsed() < Duration::from_secs(10));
}

#[test]
fn invalid_data_ends_only_its_connection() {
    let config = ServerConfig { body_bytes_max: 1000, ..ServerConfig::default() };
    let server = server(config);
    for nonsense in [&b"GET / HTTP/1.1\r\nHost: x\r\n\r\n......"[..], &[0xFF; 64], b"MKR1"] {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.write_all(nonsense).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        // The server closes the connection without an answer.
        assert!(matches!(stream.read(&mut [0; 10]), Ok(0) | Err(_)));
    }
    let client = client(1, SOON);
    assert!(send(&client, &server, &[0; 1001]).is_err());
    let taker = answering(&server, 1, |_| Ok(()));
    send(&client, &server, &[0; 1000]).unwrap();
    taker.join().unwrap();
}

#[test]
fn bodies_that_nobody_takes_have_a_limit_together() {
    const LIMIT: usize = 1 << 20;
    let config = ServerConfig {
        body_bytes_max: LIMIT as u64,
        bodies_bytes_max: LIMIT as u64,
        timeout: Duration::from_millis(300),
        ..ServerConfig::default()
    };
    let (server, client) = (server(config), client(2, SOON));
    thread::scope(|scope| {
        let first = scope.spawn(|| send(&client, &server, &[1; LIMIT]));
        let delivery = server.take(SOON).unwrap().unwrap();
        send(&client, &server, &[2; 1000]).expect_err("there is no room for its body");
        delivery.answer(Ok(()));
        let _ = first.join().unwrap();
    });
    let taker = answering(&server, 1, |_| Ok(()));
    send(&client, &server, &[3; LIMIT]).unwrap();
    assert_eq!(taker.join().unwrap(), [vec![3; LIMIT]]);
}

#[test]
fn serves_clients_above_connection_limit_in_turn() {
    let config = ServerConfig {
        connections_max: 1,
        idle_timeout: Duration::from_millis(100),
        ..ServerConfig::default()
    };
    let server = server(config);
    let taker = answering(&server, 3, |_| Ok(()));
    for _ in 0..3 {
        // Each client keeps its connection until the server's idle time-out closes it.
        let client = Box::leak(Box::new(client(1, SOON)));
        send(client, &server, b"x").unwrap();
    }
    taker.join().unwrap();
}

#[test]
fn silent_connections_give_way_to_clients() {
    let server = server(ServerConfig { connections_max: 2, ..ServerConfig::default() });
    let mut strangers: Vec<TcpStream> =
        (0..4).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
    let taker = answering(&server, 1, |_| Ok(()));
    let client = client(1, SOON);
    send(&client, &server, b"x").unwrap();
    taker.join().unwrap();
    assert_eq!(strangers[0].read(&mut [0]).unwrap(), 0, "the oldest is closed");
}
