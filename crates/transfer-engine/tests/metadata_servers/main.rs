//! The metadata store over real etcd and Redis servers. Where a server is not installed its tests
//! count as ignored.
#![allow(clippy::unwrap_used, reason = "tests, also in the functions that they share")]

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use libtest_mimic::Arguments;
use mooncake_base::{Clock, Endpoint, ErrorKind, Moment, SystemClock, requirement::trial};
use mooncake_kv_client::real_server::{RealServer, etcd, missing, redis};
use mooncake_transfer_engine::{
    SegmentDescriptor,
    discovery::{
        descriptor::BufferDescriptor,
        handshake,
        metadata::{MetadataSettings, MetadataStore, RedisLogin, open},
    },
};

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let no_etcd = missing("etcd", "etcd-server");
    let no_redis = missing("redis-server", "redis-server");
    let trials = vec![
        trial(no_etcd, "etcd_stores_segments", etcd_stores_segments),
        trial(no_redis.clone(), "redis_stores_segments", redis_stores_segments),
        trial(no_redis.clone(), "redis_uses_login_and_database", redis_uses_login_and_database),
        trial(no_redis, "rejects_entries_that_are_no_segment", rejects_entries_that_are_no_segment),
    ];
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn soon() -> Moment {
    SystemClock.now() + Duration::from_secs(20)
}

fn descriptor(name: &str) -> SegmentDescriptor {
    SegmentDescriptor { name: name.into(), protocol: "tcp".into(), ..Default::default() }
}

fn store(url: &str) -> Arc<dyn MetadataStore> {
    open(url, MetadataSettings::default()).unwrap()
}

/// A port without a listener.
fn dead_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A server that answers probes, and its address.
fn live_server() -> (tokio::runtime::Runtime, handshake::HandshakeServer, Endpoint) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = Endpoint::new("127.0.0.1", listener.local_addr().unwrap().port());
    let settings = handshake::HandshakeSettings::default();
    let server =
        handshake::HandshakeServer::start(listener, Arc::new(Vec::new), settings, runtime.handle());
    (runtime, server.unwrap(), at)
}

/// Claims that hold for every server.
fn suite(url: &str) {
    publishes_updates_and_withdraws(url);
    clusters_are_separate(url);
    large_descriptors_fit(url);
    name_belongs_to_one_live_engine(url);
    name_of_a_dead_engine_is_taken_over(url);
    former_holder_changes_nothing(url);
}

fn publishes_updates_and_withdraws(url: &str) {
    let store = store(url);
    for name in ["a:1", "x/a", "ä b"] {
        for (protocol, port) in [("tcp", 1), ("rdma", 1), ("tcp", 2)] {
            let own = SegmentDescriptor { protocol: protocol.into(), ..descriptor(name) };
            store.publish(&own, &Endpoint::new("::1", port), soon()).unwrap();
            assert_eq!(store.resolve(name, soon()).unwrap(), own);
            assert_eq!(store.locate(name, soon()).unwrap(), Endpoint::new("::1", port));
        }
        store.withdraw(soon()).unwrap();
        store.withdraw(soon()).unwrap();
        for error in
            [store.resolve(name, soon()).unwrap_err(), store.locate(name, soon()).unwrap_err()]
        {
            assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
            assert!(error.to_string().contains(&format!("segment={name}")), "{error}");
        }
    }
}

fn clusters_are_separate(url: &str) {
    let in_cluster = |prefix: &str| {
        open(url, MetadataSettings { prefix: prefix.into(), ..MetadataSettings::default() })
    };
    let (one, two) = (in_cluster("one").unwrap(), in_cluster("two").unwrap());
    one.publish(&descriptor("c"), &Endpoint::new("h", 1), soon()).unwrap();
    assert_eq!(two.resolve("c", soon()).unwrap_err().kind(), ErrorKind::NotFound);
    two.publish(&descriptor("c"), &Endpoint::new("h", 2), soon()).unwrap();
    one.withdraw(soon()).unwrap();
    assert!(two.resolve("c", soon()).is_ok());
    two.withdraw(soon()).unwrap();
}

fn large_descriptors_fit(url: &str) {
    let store = store(url);
    let buffer = BufferDescriptor {
        name: "cpu:0".into(),
        addr: 1,
        length: 2,
        ..BufferDescriptor::default()
    };
    let own = SegmentDescriptor { buffers: vec![buffer; 10_000], ..descriptor("large") };
    store.publish(&own, &Endpoint::new("h", 1), soon()).unwrap();
    assert_eq!(store.resolve("large", soon()).unwrap(), own);
    store.withdraw(soon()).unwrap();
}

fn name_belongs_to_one_live_engine(url: &str) {
    let (_runtime, _server, alive) = live_server();
    let (first, second) = (store(url), store(url));
    first.publish(&descriptor("n"), &alive, soon()).unwrap();
    let error = second.publish(&descriptor("n"), &Endpoint::new("h", 2), soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    for part in ["local_hostname", "name=n", &format!("held_by={alive}")] {
        assert!(error.to_string().contains(part), "{error}");
    }
    second.withdraw(soon()).unwrap();
    assert_eq!(first.locate("n", soon()).unwrap(), alive);
    first.withdraw(soon()).unwrap();
    second.publish(&descriptor("n"), &Endpoint::new("h", 2), soon()).unwrap();
    second.withdraw(soon()).unwrap();
}

fn name_of_a_dead_engine_is_taken_over(url: &str) {
    let (dead, heir) = (store(url), store(url));
    let at = |port| Endpoint::new("127.0.0.1", port);
    dead.publish(&descriptor("d"), &at(dead_port()), soon()).unwrap();
    heir.publish(&descriptor("d"), &at(2), soon()).unwrap();
    assert_eq!(heir.locate("d", soon()).unwrap(), at(2));
    heir.withdraw(soon()).unwrap();
}

fn former_holder_changes_nothing(url: &str) {
    let (_runtime, _server, alive) = live_server();
    let (lost, heir) = (store(url), store(url));
    lost.publish(&descriptor("l"), &Endpoint::new("127.0.0.1", dead_port()), soon()).unwrap();
    let own = SegmentDescriptor { protocol: "rdma".into(), ..descriptor("l") };
    heir.publish(&own, &alive, soon()).unwrap();
    let was = Endpoint::new("127.0.0.1", dead_port());
    let error = lost.publish(&descriptor("l"), &was, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
    lost.withdraw(soon()).unwrap();
    assert_eq!(heir.resolve("l", soon()).unwrap(), own);
    assert_eq!(heir.locate("l", soon()).unwrap(), alive);
    heir.withdraw(soon()).unwrap();
}

/// A stopped or dead server causes an error in time that names it.
fn fails_in_time(url: &str, server: &mut RealServer) {
    let store = store(url);
    store.publish(&descriptor("t"), &Endpoint::new("h", 1), soon()).unwrap();
    server.freeze();
    let begin = Instant::now();
    let deadline = SystemClock.now() + Duration::from_millis(200);
    let error = store.resolve("t", deadline).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    server.kill();
    for error in [
        store.resolve("t", soon()).unwrap_err(),
        store.publish(&descriptor("t"), &Endpoint::new("h", 1), soon()).unwrap_err(),
        store.withdraw(soon()).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains(&server.port.to_string()), "{error}");
    }
}

fn etcd_stores_segments() {
    let mut server = RealServer::start("etcd", etcd, &[]);
    let url = format!("etcd://127.0.0.1:{}", server.port);
    suite(&url);
    // A dead member is skipped; the scheme may be omitted.
    suite(&format!("127.0.0.1:{},127.0.0.1:{}", dead_port(), server.port));
    fails_in_time(&url, &mut server);
}

fn redis_stores_segments() {
    let mut server = RealServer::start("redis-server", redis, &[]);
    let url = format!("redis://127.0.0.1:{}", server.port);
    suite(&url);
    fails_in_time(&url, &mut server);
}

fn redis_uses_login_and_database() {
    let password = ["--requirepass", "open sesame"];
    let server = RealServer::start("redis-server", redis, &password);
    let url = format!("redis://127.0.0.1:{}", server.port);
    let error = store(&url).resolve("a", soon()).unwrap_err();
    assert!(error.to_string().contains("NOAUTH"), "{error}");
    let login = |username: &str, password: &str, database| {
        let (username, password) = (username.into(), password.into());
        let redis = RedisLogin { username, password, database };
        open(&url, MetadataSettings { redis, ..MetadataSettings::default() }).unwrap()
    };
    let error = login("", "closed", 0).resolve("a", soon()).unwrap_err();
    assert!(error.to_string().contains("WRONGPASS"), "{error}");
    assert!(!error.to_string().contains("closed"), "{error}");
    let third = login("default", "open sesame", 3);
    third.publish(&descriptor("a"), &Endpoint::new("h", 1), soon()).unwrap();
    assert!(login("", "open sesame", 3).resolve("a", soon()).is_ok());
    let other = login("", "open sesame", 0).resolve("a", soon()).unwrap_err();
    assert_eq!(other.kind(), ErrorKind::NotFound);
    let named = format!("redis://:open sesame@127.0.0.1:{}/3", server.port);
    assert!(store(&named).resolve("a", soon()).is_ok());
    let none = login("", "open sesame", 99).resolve("a", soon()).unwrap_err();
    assert!(none.to_string().contains("out of range"), "{none}");
    suite(&named);
}

fn rejects_entries_that_are_no_segment() {
    let server = RealServer::start("redis-server", redis, &[]);
    let url = format!("redis://127.0.0.1:{}", server.port);
    set(&server, "mooncake/rpc_meta/a", b"{\"rpc_port\":99999}");
    set(&server, "mooncake/ram/a", b"\xFF{");
    for error in [
        store(&url).resolve("a", soon()).unwrap_err(),
        store(&url).locate("a", soon()).unwrap_err(),
    ] {
        assert!(error.to_string().contains("cannot be read"), "{error}");
    }
    // The holder of the unreadable entry cannot be probed, so the name counts as free.
    store(&url).publish(&descriptor("a"), &Endpoint::new("h", 1), soon()).unwrap();
}

/// Writes an entry as it is, without the metadata store.
fn set(server: &RealServer, key: &str, value: &[u8]) {
    let mut stream = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    let head = format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${}\r\n", key.len(), value.len());
    stream.write_all(&[head.as_bytes(), value, b"\r\n"].concat()).unwrap();
    let mut reply = [0; 5];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(&reply, b"+OK\r\n");
}
