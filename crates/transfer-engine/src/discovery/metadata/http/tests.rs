//! Tests the HTTP store against a small server that answers as upstream's does.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, Endpoint, ErrorKind, SystemClock};

use super::*;
use crate::{
    Engine, EngineConfig, SegmentDescriptor,
    discovery::metadata::{MetadataStore, keyed::KeyedStore},
};

type Entries = Arc<Mutex<BTreeMap<String, Vec<u8>>>>;

/// Serves one connection after another; returns the URL and the stored values by encoded key.
fn server() -> (String, Entries) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/metadata", listener.local_addr().unwrap());
    let entries = Entries::default();
    let stored = Arc::clone(&entries);
    thread::spawn(move || {
        for stream in listener.incoming() {
            serve(stream.unwrap(), &stored);
        }
    });
    (url, entries)
}

fn serve(mut stream: TcpStream, entries: &Entries) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut first = String::new();
    reader.read_line(&mut first).unwrap();
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if line.trim().is_empty() {
            break;
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    let mut words = first.split(' ');
    let (method, path) = (words.next().unwrap(), words.next().unwrap());
    let key = path.strip_prefix("/metadata?key=").unwrap().to_owned();
    let (status, text) = answer(method, key, body, &mut entries.lock());
    let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n", text.len());
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(b"Connection: close\r\n\r\n").unwrap();
    stream.write_all(&text).unwrap();
}

fn answer(
    method: &str,
    key: String,
    body: Vec<u8>,
    entries: &mut BTreeMap<String, Vec<u8>>,
) -> (u16, Vec<u8>) {
    match (method, entries.get(&key)) {
        ("GET", Some(value)) => (200, value.clone()),
        ("GET" | "DELETE", None) => (404, b"metadata not found".to_vec()),
        ("PUT", Some(value)) if key.contains("rpc_meta") && *value != body => {
            (400, b"Duplicate rpc_meta key not allowed".to_vec())
        }
        ("PUT", _) => {
            entries.insert(key, body);
            (200, b"metadata updated".to_vec())
        }
        ("DELETE", Some(_)) => {
            entries.remove(&key);
            (200, b"metadata deleted".to_vec())
        }
        _ => (404, Vec::new()),
    }
}

fn store(url: &str, prefix: &str) -> KeyedStore<HttpServer> {
    KeyedStore::new(HttpServer::new(url, &MetadataSettings::default()).unwrap(), prefix)
}

fn soon() -> Moment {
    SystemClock.now() + Duration::from_secs(20)
}

fn descriptor(name: &str) -> SegmentDescriptor {
    SegmentDescriptor { name: name.into(), protocol: "tcp".into(), ..Default::default() }
}

#[test]
fn publishes_under_upstream_keys() {
    let check = |prefix: &str, name: &str, keys: [&str; 2]| {
        let (url, entries) = server();
        let store = store(&url, prefix);
        let rpc = Endpoint::new("::1", 7);
        store.publish(&descriptor(name), &rpc, soon()).unwrap();
        assert_eq!(entries.lock().keys().collect::<Vec<_>>(), keys);
        assert_eq!(store.resolve(name, soon()).unwrap(), descriptor(name));
        assert_eq!(store.locate(name, soon()).unwrap(), rpc);
        store.withdraw(soon()).unwrap();
        store.withdraw(soon()).unwrap();
        assert!(entries.lock().is_empty());
    };
    check("", "a:1", ["mooncake%2Fram%2Fa%3A1", "mooncake%2Frpc_meta%2Fa%3A1"]);
    check("c1", "a b", ["mooncake%2Fc1%2Fram%2Fa%20b", "mooncake%2Fc1%2Frpc_meta%2Fa%20b"]);
    check("", "x/a", ["mooncake%2Frpc_meta%2Fx%2Fa", "mooncake%2Fx%2Fa"]);
}

#[test]
fn handshake_entry_is_upstream_json() {
    let (url, entries) = server();
    store(&url, "").publish(&descriptor("a"), &Endpoint::new("h", 7), soon()).unwrap();
    let text = entries.lock()["mooncake%2Frpc_meta%2Fa"].clone();
    assert_eq!(text, br#"{"ip_or_host_name":"h","rpc_port":7}"#);
}

#[test]
fn publishing_again_updates_the_entry() {
    let (url, _entries) = server();
    let store = store(&url, "");
    for (protocol, port) in [("tcp", 1), ("rdma", 1), ("tcp", 2)] {
        let own = SegmentDescriptor { protocol: protocol.into(), ..descriptor("a") };
        store.publish(&own, &Endpoint::new("h", port), soon()).unwrap();
        assert_eq!(store.resolve("a", soon()).unwrap(), own);
        assert_eq!(store.locate("a", soon()).unwrap(), Endpoint::new("h", port));
    }
}

#[test]
fn refuses_a_name_of_another_engine_and_keeps_its_entry() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let config = EngineConfig { name: "127.0.0.1".to_owned(), ..EngineConfig::default() };
    let engine = Engine::start(config, runtime.handle().clone()).unwrap();
    let alive = Endpoint::new("127.0.0.1", engine.rpc_port());
    let (url, entries) = server();
    let first = store(&url, "");
    first.publish(&descriptor("a"), &alive, soon()).unwrap();
    let second = store(&url, "");
    let error = second.publish(&descriptor("a"), &Endpoint::new("h", 2), soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    for part in ["local_hostname", "name=a", &url, &format!("held_by={alive}")] {
        assert!(error.to_string().contains(part), "{error}");
    }
    second.withdraw(soon()).unwrap();
    assert_eq!(entries.lock().len(), 2);
    first.withdraw(soon()).unwrap();
    second.publish(&descriptor("a"), &Endpoint::new("h", 2), soon()).unwrap();
}

#[test]
fn name_of_a_dead_engine_is_taken_over_at_once() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (url, entries) = server();
    store(&url, "").publish(&descriptor("a"), &Endpoint::new("127.0.0.1", port), soon()).unwrap();
    let second = store(&url, "");
    let begin = Instant::now();
    second.publish(&descriptor("a"), &Endpoint::new("127.0.0.1", 7), soon()).unwrap();
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    assert_eq!(second.locate("a", soon()).unwrap(), Endpoint::new("127.0.0.1", 7));
    assert_eq!(entries.lock().len(), 2);
}

#[test]
fn unknown_segment_is_not_found() {
    let (url, _entries) = server();
    for error in [
        store(&url, "").resolve("nobody", soon()).unwrap_err(),
        store(&url, "").locate("nobody", soon()).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.to_string().contains("segment=nobody"), "{error}");
    }
}

#[test]
fn rejects_unreadable_entries() {
    let (url, entries) = server();
    entries.lock().insert("mooncake%2Fram%2Fa".into(), b"\xFF{".to_vec());
    entries.lock().insert("mooncake%2Frpc_meta%2Fa".into(), b"{\"rpc_port\":99999}".to_vec());
    assert!(store(&url, "").resolve("a", soon()).is_err());
    assert!(store(&url, "").locate("a", soon()).is_err());
}

/// A server that answers every connection with these bytes, and then hangs.
fn garbled_server(answer: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/metadata", listener.local_addr().unwrap());
    thread::spawn(move || {
        let mut held = Vec::new();
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(answer);
            held.push(stream);
        }
    });
    url
}

#[test]
fn request_to_a_hanging_server_ends_at_the_deadline() {
    for answer in [&b""[..], b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"] {
        let url = garbled_server(answer);
        let begin = Instant::now();
        let deadline = SystemClock.now() + Duration::from_millis(200);
        let error = store(&url, "").resolve("a", deadline).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert!(error.to_string().contains(&url), "{error}");
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    }
}

#[test]
fn closing_engine_removes_its_name_from_a_slow_server() {
    let (url, entries) = server();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let config = EngineConfig { name: "slow:1".into(), metadata: url, ..EngineConfig::default() };
    let engine = Engine::start(config, runtime.handle().clone()).unwrap();
    let busy = entries.lock();
    assert_eq!(busy.len(), 2);
    let (ended, has_ended) = mpsc::sync_channel(1);
    let ending = thread::spawn(move || {
        drop(engine);
        ended.send(()).unwrap();
    });
    assert!(has_ended.recv_timeout(Duration::from_millis(200)).is_err(), "it did not wait");
    drop(busy);
    ending.join().unwrap();
    assert_eq!(*entries.lock(), BTreeMap::new());
}

#[test]
fn error_names_a_failing_or_non_http_server() {
    let failing = &b"HTTP/1.1 500 Oh\r\nContent-Length: 4\r\n\r\noops"[..];
    for answer in [&b"SSH-2.0-x\r\n\r\n"[..], failing] {
        let url = garbled_server(answer);
        let error = store(&url, "").resolve("a", soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains(&url), "{error}");
    }
}

#[test]
fn error_names_an_unreachable_server() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("http://127.0.0.1:{port}/metadata");
    let publish = store(&url, "").publish(&descriptor("a"), &Endpoint::new("h", 1), soon());
    let error = publish.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains(&url), "{error}");
}

#[cfg(all(feature = "rdma", feature = "test-util"))]
#[test]
fn changed_address_of_a_device_is_published() {
    use crate::{config::RdmaFabric, rdma::RdmaSettings};

    let (url, entries) = server();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let fabric = mooncake_verbs::fake::Fabric::of(1);
    let config = EngineConfig {
        name: "of-a-device".into(),
        metadata: url,
        rdma: Some(RdmaSettings::default()),
        rdma_fabric: Some(RdmaFabric(fabric.library())),
        ..EngineConfig::default()
    };
    let _engine = Engine::start(config, runtime.handle().clone()).unwrap();
    let has = |text: &str| {
        let entries = entries.lock();
        let mut values = entries.values();
        values.any(|value| String::from_utf8_lossy(value).contains(text))
    };
    assert!(has("0a:4d:00:01"));
    fabric.set_address(0, Some((3, std::net::Ipv4Addr::new(10, 77, 0, 200))));
    let begin = Instant::now();
    while !has("0a:4d:00:c8") {
        assert!(begin.elapsed() < Duration::from_secs(30), "the old address is still published");
        thread::yield_now();
    }
    assert!(!has("0a:4d:00:01"));
}
