//! The limit and the gaps of the queue, and the wire protocol with a minimal subscriber.

use std::time::Duration;

use bytes::{BufMut, BytesMut};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

use super::*;

const DEADLINE: Duration = Duration::from_secs(10);

fn stored(key: &str) -> ObjectEvent {
    let key = key.as_bytes().into();
    ObjectEvent::Stored { tenant: mooncake_base::TenantId::default(), key, group: Box::default() }
}

fn events(config: EventsConfig) -> Events {
    Events::new(config, "127.0.0.1:1".parse().unwrap(), 0)
}

fn sequence(message: &[u8]) -> u64 {
    // The empty topic takes two bytes, the head of the next frame two more.
    u64::from_be_bytes(message[4..12].try_into().unwrap())
}

#[test]
fn full_queue_drops_oldest_and_leaves_gap() {
    let events = events(EventsConfig { capacity: 2, ..EventsConfig::default() });
    let mut frame = MessageEncoder::default();
    events.push([stored("a")]);
    let first = events.take_batch(&mut frame).unwrap();
    assert_eq!(sequence(&frame.message(&first, &events.config)), 1);
    events.push(["b", "c", "d", "e"].map(stored));
    let rest = events.take_batch(&mut frame).unwrap();
    let keys: Vec<_> = rest.iter().map(ObjectEvent::key).collect();
    assert_eq!(keys, [b"d", b"e"]);
    assert_eq!(sequence(&frame.message(&rest, &events.config)), 4, "two numbers are missing");
    assert_eq!(events.counts().dropped, 2);
    assert!(events.take_batch(&mut frame).is_none());
}

#[test]
fn batch_is_limited_by_events_and_bytes() {
    let events = events(EventsConfig::default());
    events.push((0..BATCH_MAX + 1).map(|i| stored(&i.to_string())));
    let mut frame = MessageEncoder::default();
    assert_eq!(events.take_batch(&mut frame).unwrap().len(), BATCH_MAX);
    assert_eq!(events.take_batch(&mut frame).unwrap().len(), 1);
    let large = "x".repeat(BATCH_BYTES_MAX - 1);
    events.push([stored(&large), stored("y"), stored("z")]);
    assert_eq!(events.take_batch(&mut frame).unwrap().len(), 2);
}

#[test]
fn without_keys_only_cleared_is_published() {
    let events = events(EventsConfig { has_object_key: false, ..EventsConfig::default() });
    let tenant = mooncake_base::TenantId::default();
    events.push([stored("a"), ObjectEvent::Cleared { tenant }]);
    let batch = events.take_batch(&mut MessageEncoder::default()).unwrap();
    assert!(matches!(batch[..], [ObjectEvent::Cleared { .. }]));
    assert_eq!(events.counts().skipped, 1);
}

#[tokio::test]
async fn bind_error_names_option() {
    for endpoint in ["", "ipc:///x", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "tcp://192.0.2.1:1"] {
        let error = bind(endpoint).await.unwrap_err().to_string();
        assert!(error.contains("kv_events_bind_endpoint"), "{endpoint}: {error}");
    }
    assert!(bind("tcp://*:*").await.is_ok() && bind("tcp://127.0.0.1:0").await.is_ok());
}

/// Connects a subscriber and completes the handshake.
async fn connect_subscriber(address: SocketAddr, kind: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(&zmtp::greeting()).await.unwrap();
    let mut greeting = [0; zmtp::GREETING_BYTES];
    stream.read_exact(&mut greeting).await.unwrap();
    zmtp::check_greeting(&greeting).unwrap();
    let mut ready = BytesMut::from(&b"\x05READY\x0bSocket-Type"[..]);
    ready.put_u32(kind.len() as u32);
    ready.put_slice(kind);
    stream.write_all(&[4, ready.len() as u8]).await.unwrap();
    stream.write_all(&ready).await.unwrap();
    stream
}

#[tokio::test]
async fn subscriber_receives_events_after_subscribing() {
    let listener = bind("tcp://127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let events = Arc::new(events(EventsConfig::default()));
    let stop = CancellationToken::new();
    let serving = events.clone().serve(listener, stop.clone());
    let work = async {
        let mut publisher = connect_subscriber(address, b"PUB").await;
        let mut end = Vec::new();
        publisher.read_to_end(&mut end).await.unwrap();
        assert!(end.ends_with(b"PUB"), "it receives the READY command, and the connection closes");

        let mut subscriber = connect_subscriber(address, b"SUB").await;
        let mut ready = [0; 27];
        subscriber.read_exact(&mut ready).await.unwrap();
        assert!(ready.ends_with(b"PUB"));
        events.push([stored("before")]);
        while events.counts().published_events != 1 {
            tokio::task::yield_now().await;
        }
        // A subscription, and a ping. Its reply shows that the subscription was processed.
        subscriber.write_all(b"\x00\x01\x01\x04\x08\x04PING\0\0!").await.unwrap();
        let mut pong = [0; 8];
        subscriber.read_exact(&mut pong).await.unwrap();
        assert_eq!(&pong, b"\x04\x06\x04PONG!");
        events.push([stored("after")]);
        let mut head = [0; 12];
        subscriber.read_exact(&mut head).await.unwrap();
        assert_eq!((&head[..4], sequence(&head)), (&[1, 0, 1, 8][..], 2));
        drop(subscriber);
        stop.cancel();
    };
    timeout(DEADLINE, async { tokio::join!(serving, work) }).await.expect("in time");
    assert_eq!(events.counts().subscribers, 0);
}
