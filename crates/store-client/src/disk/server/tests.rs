//! A record server and its readers, without a master.

use std::{
    io::Read as _,
    io::Write as _,
    net::{TcpListener, TcpStream},
    path::Path,
};

use mooncake_base::{ErrorKind, Moment};
use mooncake_disk::{Name, Write, WriteOutcome};
use mooncake_proto::records;
use mooncake_transfer_engine::{Engine, EngineConfig, LocalRange, Opcode, TransferEntry};
use tokio::runtime::{Builder, Runtime};

use super::*;
use crate::{config::DiskConfig, disk::reader::RecordReaders, metrics::Metrics};

const LIMIT: Duration = Duration::from_secs(20);

struct Fixture {
    server: RecordServer,
    owner: Arc<Owner>,
    staging: Arc<Staging>,
    engine: Engine,
    _runtime: Runtime,
    _directory: tempfile::TempDir,
}

fn deadline() -> Moment {
    SystemClock.now() + LIMIT
}

fn open(path: &Path, metrics: &Arc<Metrics>) -> Owner {
    let config = DiskConfig { path: path.into(), capacity: Some(256 << 20), uses_ring: None };
    Owner::open(&config, &Default::default(), metrics).unwrap()
}

/// Returns a range of ports that are free.
fn free_ports(count: u16) -> std::ops::RangeInclusive<u16> {
    let bind = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port));
    loop {
        let first = bind(0).unwrap().local_addr().unwrap().port();
        let last = first.saturating_add(count - 1);
        if (first..=last).len() == usize::from(count)
            && (first..=last).all(|port| bind(port).is_ok())
        {
            return first..=last;
        }
    }
}

impl Fixture {
    fn start(staging_bytes: u64, token: Option<&Token>) -> Self {
        Self::start_with(EngineConfig::default(), staging_bytes, token)
    }

    fn start_with(config: EngineConfig, staging_bytes: u64, token: Option<&Token>) -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let config = EngineConfig { name: "127.0.0.1".to_owned(), ..config };
        let engine = Engine::start(config, runtime.handle().clone()).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let metrics = Arc::default();
        let owner = Arc::new(open(directory.path(), &metrics));
        let staging = Arc::new(Staging::new(engine.clone(), staging_bytes, &metrics));
        let served = Served {
            owners: [Arc::clone(&owner)].into(),
            staging: Arc::clone(&staging),
            endpoint: engine.segment_name().to_owned(),
            token: token.map(records::token),
        };
        let server = RecordServer::start(&engine, served).unwrap();
        Self { server, owner, staging, engine, _runtime: runtime, _directory: directory }
    }

    fn write(&self, key: &str, payload: &[u8]) {
        let name = Name { tenant: "t", key: key.as_bytes(), version: 1 };
        let report = self.owner.disk().unwrap().write(&[Write { name, payload }]);
        assert!(matches!(report.outcomes[0], WriteOutcome::Written(_)), "{report:?}");
    }

    /// Reads bytes of the engine's memory as a peer does.
    fn fetch(&self, address: u64, length: usize) -> Vec<u8> {
        let memory = self.engine.allocate(length as u64).unwrap();
        let hold = memory.hold();
        let range: LocalRange = hold.range(0, length as u64).unwrap();
        let peer = self.engine.open(self.engine.segment_name(), deadline()).unwrap();
        let mut entries = [TransferEntry::new(range, address)];
        self.engine.transfer(&peer, Opcode::Read, &mut entries, deadline());
        entries[0].outcome.take().unwrap().unwrap();
        let mut bytes = vec![0; length];
        memory.read(0, &mut bytes).unwrap();
        bytes
    }

    fn readers(&self, token: Option<&Token>) -> RecordReaders {
        RecordReaders::new(token.map(records::token))
    }
}

fn wanted(key: &str, offset: u64, length: u64) -> Wanted<'_> {
    Wanted { tenant: "t", key: key.as_bytes(), version: 1, offset, length }
}

#[test]
fn listens_on_a_port_of_the_range_of_engines() {
    let ports = free_ports(3);
    let config = EngineConfig { ports: ports.clone(), ..EngineConfig::default() };
    let fixture = Fixture::start_with(config, 64 << 20, None);
    let port = fixture.server.endpoint().rsplit_once(':').unwrap().1.parse().unwrap();
    assert!(ports.contains(&port), "{port} {ports:?}");
}

#[test]
fn ranges_are_loaded_and_released() {
    let fixture = Fixture::start(1 << 20, None);
    let payload: Vec<u8> = (0..100_000_u32).map(|at| (at % 251) as u8).collect();
    fixture.write("a", &payload);
    fixture.write("b", b"short");
    let readers = fixture.readers(None);
    let mut reader = readers.connect(fixture.server.endpoint(), deadline()).unwrap();
    let wanted =
        [wanted("a", 1000, 70_000), wanted("b", 0, 5), wanted("c", 0, 5), wanted("b", 3, 3)];
    let load = reader.load(fixture.owner.id(), &wanted, deadline()).unwrap();
    let outcomes: Vec<_> = load.ranges.iter().map(|(loaded, _)| *loaded).collect();
    assert_eq!(outcomes, [Loaded::Good, Loaded::Good, Loaded::Missing, Loaded::Failed]);
    assert_eq!(load.endpoint, fixture.engine.segment_name());
    assert!(fixture.fetch(load.ranges[0].1, 70_000) == payload[1000..71_000]);
    assert_eq!(fixture.fetch(load.ranges[1].1, 5), b"short");
    reader.release(load.lease, deadline()).unwrap();
    let again = reader.release(load.lease, deadline()).unwrap_err();
    assert_eq!(again.code(), ErrorCode::TRANSFER_FAIL, "the memory is not held any more");
    let lost = fixture.owner.take_lost();
    assert_eq!(lost.len(), 1);
    assert_eq!(&*lost[0].key, b"c");
}

#[test]
fn load_takes_what_fits_and_waits_for_the_rest() {
    let fixture = Fixture::start(64 << 10, None);
    for key in ["a", "b", "c"] {
        fixture.write(key, &[7; 16_384]);
    }
    let readers = fixture.readers(None);
    let connect = || readers.connect(fixture.server.endpoint(), deadline()).unwrap();
    let (mut first, mut second) = (connect(), connect());
    let all = ["a", "b", "c"].map(|key| wanted(key, 0, 16_384));
    let load = first.load(fixture.owner.id(), &all, deadline()).unwrap();
    let outcomes: Vec<_> = load.ranges.iter().map(|(loaded, _)| *loaded).collect();
    assert_eq!(outcomes, [Loaded::Good, Loaded::Later, Loaded::Later], "a quarter is 16 KiB");
    for _ in 0..3 {
        first.load(fixture.owner.id(), &all, deadline()).unwrap();
    }
    let error = first.load(fixture.owner.id(), &all, deadline()).unwrap_err();
    assert!(error.to_string().contains("holds too much"), "{error}");
    let soon = SystemClock.now() + Duration::from_millis(200);
    let nothing = second.load(fixture.owner.id(), &all[..1], soon).map(|load| load.ranges[0].0);
    assert!(!matches!(nothing, Ok(Loaded::Good)), "the first reader holds all of it");
    drop(first);
    let load = connect().load(fixture.owner.id(), &all[..1], deadline()).unwrap();
    assert_eq!(load.ranges[0].0, Loaded::Good, "its memory came back with its connection");
}

#[test]
fn record_longer_than_the_memory_is_not_loaded() {
    let fixture = Fixture::start(64 << 10, None);
    fixture.write("a", &[1; 100_000]);
    let readers = fixture.readers(None);
    let mut reader = readers.connect(fixture.server.endpoint(), deadline()).unwrap();
    let load = reader.load(fixture.owner.id(), &[wanted("a", 0, 100_000)], deadline()).unwrap();
    assert_eq!((load.lease, load.ranges[0].0), (0, Loaded::Later));
}

#[test]
fn reader_without_the_token_gets_nothing() {
    let token = Token::new("open sesame").unwrap();
    let other = Token::new("open barley").unwrap();
    let fixture = Fixture::start(1 << 20, Some(&token));
    fixture.write("a", b"secret");
    for wrong in [None, Some(&other)] {
        let error = fixture.readers(wrong).connect(fixture.server.endpoint(), deadline());
        assert_eq!(error.unwrap_err().code(), ErrorCode::ILLEGAL_CLIENT);
    }
    let readers = fixture.readers(Some(&token));
    let mut reader = readers.connect(fixture.server.endpoint(), deadline()).unwrap();
    let load = reader.load(fixture.owner.id(), &[wanted("a", 0, 6)], deadline()).unwrap();
    assert_eq!(load.ranges[0].0, Loaded::Good);
    // A server without a token cannot prove that it belongs to the pool.
    let open = Fixture::start(1 << 20, None);
    let error = readers.connect(open.server.endpoint(), deadline()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::ILLEGAL_CLIENT);
}

#[test]
fn strangers_are_cut_off() {
    let fixture = Fixture::start(1 << 20, None);
    let too_long = u32::try_from(CALL_BYTES_MAX + 1).unwrap().to_le_bytes();
    let frame = [&records::reader_greeting()[..], &too_long].concat();
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &frame] {
        let mut stream = TcpStream::connect(fixture.server.endpoint()).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.write_all(bytes).unwrap();
        let mut answer = Vec::new();
        // The connection may be reset, as bytes of the caller were not read.
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.len() < 64, "at most the greeting: {answer:?}");
    }
}

#[test]
fn stopped_server_ends_reads_and_kept_connections() {
    let fixture = Fixture::start(1 << 20, None);
    fixture.write("a", b"x");
    let readers = fixture.readers(None);
    let connect = || readers.connect(fixture.server.endpoint(), deadline());
    let mut reader = connect().unwrap();
    let load = reader.load(fixture.owner.id(), &[wanted("a", 0, 1)], deadline()).unwrap();
    reader.release(load.lease, deadline()).unwrap();
    readers.keep(reader);
    let mut kept = connect().unwrap();
    let load = kept.load(fixture.owner.id(), &[wanted("a", 0, 1)], deadline()).unwrap();
    fixture.server.stop();
    assert!(kept.release(load.lease, deadline()).is_err(), "its bytes do not count");
    let error = connect().unwrap_err();
    assert_ne!(error.kind(), ErrorKind::Internal, "{error}");
    fixture.owner.close();
    assert_eq!(fixture.owner.disk().unwrap_err().kind(), ErrorKind::Closed);
    drop(fixture.staging);
}
