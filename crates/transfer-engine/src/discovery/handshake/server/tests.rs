//! Loopback tests of the handshake socket: the client against the server, and the server against
//! hand-written bytes.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::LazyLock,
    thread,
    time::Instant,
};

use mooncake_base::{Clock, Endpoint, ErrorKind, Moment, SystemClock};
use tokio::runtime::Runtime;

use super::*;
use crate::discovery::{
    descriptor::{BufferDescriptor, SegmentDescriptor},
    handshake,
    metadata::{self, MetadataSettings},
};

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
});

fn soon() -> Moment {
    SystemClock.now() + Duration::from_secs(20)
}

fn descriptor() -> SegmentDescriptor {
    SegmentDescriptor {
        name: "peer".into(),
        protocol: "tcp".into(),
        buffers: vec![
            BufferDescriptor {
                name: "*".into(),
                addr: 5,
                length: 6,
                ..BufferDescriptor::default()
            };
            3
        ],
        ..SegmentDescriptor::default()
    }
}

fn server_with(host: &str, settings: HandshakeSettings) -> (HandshakeServer, Endpoint) {
    let listener = TcpListener::bind((host, 0)).unwrap();
    let describe: Describe = Arc::new(|| descriptor().to_json());
    let server = HandshakeServer::start(listener, describe, settings, RUNTIME.handle()).unwrap();
    let endpoint = Endpoint::new(host, server.address().port());
    (server, endpoint)
}

fn server() -> (HandshakeServer, Endpoint) {
    server_with("127.0.0.1", HandshakeSettings::default())
}

fn notification(number: usize) -> Notification {
    Notification { name: "me".into(), message: format!("{number}") }
}

#[test]
fn finds_a_peer_by_its_address() {
    let store = metadata::open("P2PHANDSHAKE", MetadataSettings::default()).unwrap();
    store.publish(&descriptor(), &Endpoint::new("h", 1), soon()).unwrap();
    for host in ["127.0.0.1", "::1"] {
        let (_server, endpoint) = server_with(host, HandshakeSettings::default());
        assert_eq!(store.resolve(&endpoint.to_string(), soon()).unwrap(), descriptor());
        assert_eq!(store.locate(&endpoint.to_string(), soon()).unwrap(), endpoint);
    }
    for bad in ["", "host", "127.0.0.1:0", "a:b", "x y:1"] {
        assert!(store.resolve(bad, soon()).is_err(), "{bad:?}");
    }
    store.withdraw(soon()).unwrap();
}

#[test]
fn only_a_live_server_answers_a_probe() {
    let (server, endpoint) = server();
    handshake::probe(&endpoint, soon()).unwrap();
    server.close();
    let error = handshake::probe(&endpoint, soon()).unwrap_err();
    assert!(error.to_string().contains(&endpoint.to_string()), "{error}");
}

#[test]
fn notifications_are_returned_once_and_in_order() {
    let (server, endpoint) = server();
    for number in 0..3 {
        handshake::notify(&endpoint, &notification(number), None, soon()).unwrap();
    }
    assert_eq!(server.take_notifications(), [0, 1, 2].map(notification));
    assert_eq!(server.take_notifications(), []);
}

#[test]
fn full_queue_refuses_notifications_until_some_are_taken() {
    let settings = HandshakeSettings { notifications_max: 2, ..HandshakeSettings::default() };
    let (server, endpoint) = server_with("127.0.0.1", settings);
    for number in 0..2 {
        handshake::notify(&endpoint, &notification(number), None, soon()).unwrap();
    }
    let error = handshake::notify(&endpoint, &notification(2), None, soon()).unwrap_err();
    assert!(error.to_string().contains("too many"), "{error}");
    assert_eq!(server.take_notifications().len(), 2);
    handshake::notify(&endpoint, &notification(3), None, soon()).unwrap();
    let queue = server.notifications();
    assert_eq!((queue.waiting, queue.limit, queue.refused), (1, 2, 1));
}

#[test]
fn connection_request_is_declined_in_both_forms() {
    let (_server, endpoint) = server();
    for typed in [Some(MessageKind::Connection), None] {
        let question = Message { typed, body: br#"{"qp_num":[1]}"#.to_vec() };
        let answer = handshake::request(&endpoint, &question, soon()).unwrap();
        assert_eq!(answer.typed, typed);
        let json: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
        assert!(json["reply_msg"].as_str().unwrap().contains("no RDMA"), "{json}");
    }
}

#[test]
fn answer_is_upstream_byte_for_byte_and_ends_the_connection() {
    let (_server, endpoint) = server();
    let mut stream = TcpStream::connect(endpoint.to_pair()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // In several segments, which the server has to reassemble.
    for bytes in [&[3, 0, 0][..], &[0, 0, 0, 0, 0, 3], b"{}"] {
        stream.write_all(bytes).unwrap();
    }
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let text = br#"{"status":"success"}"#;
    assert_eq!(answer, [&[21, 0, 0, 0, 0, 0, 0, 0, 3][..], text].concat());
}

#[test]
fn invalid_or_missing_bytes_end_only_their_connection() {
    let receive_timeout = Duration::from_millis(50);
    let settings = HandshakeSettings { receive_timeout, ..HandshakeSettings::default() };
    let (_server, endpoint) = server_with("127.0.0.1", settings);
    let half = [&100_u64.to_le_bytes()[..], b"\x01{"].concat();
    let too_long = [0xFF; 100];
    for bytes in [&[][..], &[1, 2, 3], &[0; 8], &half, &too_long] {
        let mut stream = TcpStream::connect(endpoint.to_pair()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(bytes).unwrap();
        let mut answer = Vec::new();
        if let Err(failure) = stream.read_to_end(&mut answer) {
            assert_eq!(failure.kind(), io::ErrorKind::ConnectionReset);
        }
        assert!(answer.is_empty(), "{bytes:?}");
    }
    handshake::probe(&endpoint, soon()).unwrap();
}

#[test]
fn peers_above_the_limit_wait_and_are_served() {
    let settings = HandshakeSettings { connections_max: 1, ..HandshakeSettings::default() };
    let (_server, endpoint) = server_with("127.0.0.1", settings);
    thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| handshake::probe(&endpoint, soon()).unwrap());
        }
    });
}

#[test]
fn silent_strangers_keep_no_peer_away() {
    let settings = HandshakeSettings::default();
    let (server, endpoint) = server_with("127.0.0.1", settings.clone());
    let connect = |_| TcpStream::connect(endpoint.to_pair()).unwrap();
    let mut strangers: Vec<TcpStream> = (0..settings.connections_max + 64).map(connect).collect();
    // Half of them begin a message and never finish it.
    strangers.iter_mut().step_by(2).for_each(|stream| stream.write_all(&[9, 0]).unwrap());
    let begin = Instant::now();
    handshake::probe(&endpoint, soon()).unwrap();
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    assert!(server.acceptor.load().refused >= 64);
    // The youngest strangers were left alone.
    let youngest = strangers.last_mut().unwrap();
    youngest.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    assert_eq!(youngest.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
}

/// A listener that runs `serve` on its first connection.
fn peer(serve: impl FnOnce(TcpStream) + Send + 'static) -> Endpoint {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || serve(listener.accept().unwrap().0));
    Endpoint::new("127.0.0.1", port)
}

#[test]
fn probe_of_a_silent_peer_ends_at_the_deadline() {
    // One peer is silent; the other trickles: each byte comes in time, the answer does not.
    let silent = peer(|mut stream| drop(stream.read_to_end(&mut Vec::new())));
    let trickling = peer(|mut stream| {
        let _ = stream.write_all(&1000_u64.to_le_bytes());
        let _ = stream.set_read_timeout(Some(Duration::from_millis(10)));
        while stream.write_all(&[1]).is_ok() {
            let _ = stream.read(&mut [0; 64]);
        }
    });
    for endpoint in [silent, trickling] {
        let begin = Instant::now();
        let deadline = SystemClock.now() + Duration::from_millis(150);
        let error = handshake::probe(&endpoint, deadline).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    }
}

#[test]
fn rejects_invalid_answers() {
    let answers: [&[u8]; 4] = [
        b"",                                      // closed
        &[0xFF; 8],                               // too long
        &[5, 0, 0, 0, 0, 0, 0, 0, 1, b'{'],       // cut
        &[3, 0, 0, 0, 0, 0, 0, 0, 2, b'{', b'}'], // another type
    ];
    for answer in answers {
        let endpoint = peer(move |mut stream| {
            let _ = stream.read(&mut [0; 64]);
            let _ = stream.write_all(answer);
            let _ = stream.shutdown(Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let error = handshake::probe(&endpoint, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TransferFailed, "{error}");
    }
    let endpoint = peer(|mut stream| {
        let _ = stream.read(&mut [0; 4096]);
        let _ = stream.write_all(&Message::new(MessageKind::Metadata, *b"[no").encode());
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let error = handshake::fetch_descriptor(&endpoint, &descriptor(), None, soon()).unwrap_err();
    assert!(error.to_string().contains("descriptor cannot be read"), "{error}");
}

#[test]
fn close_does_not_wait_for_open_connections() {
    let (server, endpoint) = server();
    let mut held = TcpStream::connect(endpoint.to_pair()).unwrap();
    held.write_all(&[1]).unwrap();
    let begin = Instant::now();
    server.close();
    server.close();
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    held.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    assert_eq!(held.read(&mut [0]).unwrap_or(0), 0);
}

fn token(secret: &str) -> Token {
    Token::new(secret).unwrap()
}

/// A server with a token, and its refusal counters.
fn guarded() -> (HandshakeServer, Endpoint, Arc<Refusals>) {
    let refusals = Arc::<Refusals>::default();
    let settings = HandshakeSettings {
        token: Some(token("correct horse")),
        refusals: Arc::clone(&refusals),
        ..HandshakeSettings::default()
    };
    let (server, endpoint) = server_with("127.0.0.1", settings);
    (server, endpoint, refusals)
}

#[test]
fn peer_with_the_token_is_served() {
    let (server, endpoint, refusals) = guarded();
    let good = token("correct horse");
    let found = handshake::fetch_descriptor(&endpoint, &descriptor(), Some(&good), soon()).unwrap();
    assert_eq!(found, descriptor());
    for number in 0..3 {
        handshake::notify(&endpoint, &notification(number), Some(&good), soon()).unwrap();
    }
    assert_eq!(server.take_notifications(), [0, 1, 2].map(notification));
    assert_eq!(refusals.snapshot().token_here, 0);
}

#[test]
fn peer_without_the_token_only_gets_probe_answers() {
    let (server, endpoint, refusals) = guarded();
    for (turn, secret) in [None, Some(token("another one"))].iter().enumerate() {
        let secret = secret.as_ref();
        let error =
            handshake::fetch_descriptor(&endpoint, &descriptor(), secret, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
        let error = handshake::notify(&endpoint, &notification(1), secret, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
        handshake::probe(&endpoint, soon()).unwrap();
        assert_eq!(refusals.snapshot().token_here, 2 * (turn as u64 + 1));
    }
    assert_eq!(server.take_notifications(), []);
}

#[test]
fn sends_nothing_to_a_peer_that_proves_no_token() {
    let (server, endpoint) = server();
    let good = token("correct horse");
    let error =
        handshake::fetch_descriptor(&endpoint, &descriptor(), Some(&good), soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    let error = handshake::notify(&endpoint, &notification(1), Some(&good), soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    assert_eq!(server.take_notifications(), []);
}

#[test]
fn sealed_message_is_refused_on_another_connection() {
    let (server, endpoint, refusals) = guarded();
    let text = Message::new(MessageKind::Notify, notification(1).to_json());
    let (sealed, _) = proof::seal(&token("correct horse"), token::nonce(), &text);
    // Once without a challenge, and once after a challenge that the seal does not answer.
    assert!(handshake::request(&endpoint, &sealed, soon()).is_ok());
    let stream = TcpStream::connect(("127.0.0.1", endpoint.port.unwrap())).unwrap();
    let mut stream = mooncake_os::DeadlineStream::new(stream, soon());
    for (sent, wanted) in
        [(&proof::challenge_request(), "mooncake_nonce"), (&sealed, "mooncake_refused")]
    {
        stream.write_all(&sent.encode()).unwrap();
        let mut prefix = [0; codec::LENGTH_BYTES];
        stream.read_exact(&mut prefix).unwrap();
        let mut content = vec![0; codec::content_length(prefix, 1000).unwrap()];
        stream.read_exact(&mut content).unwrap();
        assert_eq!(content[0], sent.kind() as u8);
        let text = String::from_utf8_lossy(&content);
        assert!(text.contains(wanted), "{text}");
    }
    assert_eq!(server.take_notifications(), []);
    assert_eq!(refusals.snapshot().token_here, 2);
}
