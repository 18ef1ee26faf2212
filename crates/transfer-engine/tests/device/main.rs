//! Device memory over every transport, through a fake driver without a device.
#![allow(clippy::unwrap_used, reason = "tests")]

#[cfg(feature = "rdma")]
mod direct;
mod fake;
mod lent;

use std::{path::PathBuf, sync::Arc, time::Duration};

use mooncake_base::{Clock, ErrorKind, Moment, Result, SystemClock};
use mooncake_transfer_engine::{
    Engine, EngineConfig, LocalRange, Opcode, Peer, Stream, TransferEntry, TransportKind,
};
use tokio::runtime::Runtime;

use self::fake::{Fake, driver_file};

const KINDS: [TransportKind; 3] = [TransportKind::Memory, TransportKind::Shm, TransportKind::Tcp];
const MIB: usize = 1 << 20;

/// An engine with a driver, and one that lends host memory.
struct Pair {
    near: Engine,
    far: Engine,
    peer: Arc<Peer>,
    lent: Vec<u8>,
    _runtime: Runtime,
}

impl Pair {
    fn new(kind: TransportKind, driver: PathBuf, length: usize) -> Self {
        let runtime = runtime();
        let near = start(kind, driver, &runtime);
        let far = start(kind, PathBuf::from("no-driver.so"), &runtime);
        let lent = vec![0; length];
        far.regions().register(lent.as_ptr() as u64, length as u64, "cpu:0").unwrap();
        let peer = near.open(far.segment_name(), soon()).unwrap();
        assert_eq!(peer.transport(), Some(kind));
        Self { near, far, peer, lent, _runtime: runtime }
    }

    fn base(&self) -> u64 {
        self.lent.as_ptr() as u64
    }

    fn transfer(&self, opcode: Opcode, ranges: &[(usize, usize, u64)]) -> Vec<Result<()>> {
        let mut entries = entries(ranges);
        self.near.transfer(&self.peer, opcode, &mut entries, soon());
        outcomes(entries)
    }

    fn on_stream(&self, stream: usize, opcode: Opcode, range: (usize, usize, u64)) -> Result<()> {
        let mut entries = entries(&[range]);
        let on_stream = self.near.on_stream(Stream(stream))?;
        on_stream.transfer(&self.peer, opcode, &mut entries, soon(), None)?;
        outcomes(entries).remove(0)
    }

    /// Returns the lent bytes; `black_box`, since transfers write them unseen by the compiler.
    fn lent(&self) -> Vec<u8> {
        std::hint::black_box(&self.lent).clone()
    }
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Starts an engine with one transport.
fn start(kind: TransportKind, device_driver: PathBuf, runtime: &Runtime) -> Engine {
    start_with(&[kind], device_driver, runtime)
}

/// Starts an engine with these transports.
fn start_with(kinds: &[TransportKind], device_driver: PathBuf, runtime: &Runtime) -> Engine {
    let config = EngineConfig {
        name: "127.0.0.1".to_owned(),
        is_tcp_forced: kinds == [TransportKind::Tcp],
        disabled: KINDS.into_iter().filter(|other| !kinds.contains(other)).collect(),
        device_driver,
        ..EngineConfig::default()
    };
    Engine::start(config, runtime.handle().clone()).unwrap()
}

fn entries(ranges: &[(usize, usize, u64)]) -> Vec<TransferEntry> {
    let entry = |(address, length, remote): &(usize, usize, u64)| {
        // SAFETY: tests hold no reference to the memory of such a range.
        TransferEntry::new(unsafe { LocalRange::foreign(*address, *length) }, *remote)
    };
    ranges.iter().map(entry).collect()
}

fn outcomes(entries: Vec<TransferEntry>) -> Vec<Result<()>> {
    entries.into_iter().map(|entry| entry.outcome.expect("every entry has an outcome")).collect()
}

fn pattern(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|i| ((i + seed) % 251) as u8 ^ (i >> 11) as u8).collect()
}

fn soon() -> Moment {
    SystemClock.now() + Duration::from_secs(30)
}

#[test]
fn device_memory_moves_over_every_transport() {
    for (kind, length) in KINDS
        .into_iter()
        .flat_map(|kind| [1, 4096, 8 * MIB, 8 * MIB + 1, 19 * MIB + 3].map(|length| (kind, length)))
    {
        let fake = Fake::load();
        let pair = Pair::new(kind, fake.file(), length);
        let bytes = pattern(length, 3);
        let (from, to) = (fake.memory(&bytes), fake.memory(&vec![0; length]));
        pair.transfer(Opcode::Write, &[(from, length, pair.base())]).remove(0).unwrap();
        assert!(pair.lent() == bytes, "{kind:?} {length}");
        pair.transfer(Opcode::Read, &[(to, length, pair.base())]).remove(0).unwrap();
        assert!(fake.bytes(to, length) == bytes, "{kind:?} {length}");
    }
}

#[test]
fn batch_mixes_host_memory_and_several_devices() {
    let fake = Fake::load();
    let pair = Pair::new(TransportKind::Tcp, fake.file(), 4000);
    let first = fake.memory(&pattern(1000, 1));
    fake.enter(1);
    let second = fake.memory(&pattern(1000, 2));
    let host = pattern(1000, 7);
    let base = pair.base();
    let ranges = [
        (second, 1000, base),
        (host.as_ptr() as usize, 1000, base + 1000),
        (first, 1000, base + 2000),
        (second, 500, base + 3000),
        (first + 500, 500, base + 3500),
    ];
    pair.transfer(Opcode::Write, &ranges).into_iter().for_each(|outcome| outcome.unwrap());
    let wanted = [pattern(1000, 2), host.clone(), pattern(1000, 1)].concat();
    let lent = pair.lent();
    assert_eq!(lent[..3000], wanted);
    assert_eq!(lent[3000..3500], pattern(1000, 2)[..500]);
    assert_eq!(lent[3500..], pattern(1000, 1)[500..]);
}

#[test]
fn write_on_stream_follows_earlier_work() {
    let fake = Fake::load();
    let pair = Pair::new(TransportKind::Memory, fake.file(), 100);
    let address = fake.memory(&[1; 100]);
    let stream = fake.stream();
    fake.fill(stream, address, 9, 100);
    assert_eq!(fake.bytes(address, 1), [1], "the stream has not run yet");
    pair.on_stream(stream, Opcode::Write, (address, 100, pair.base())).unwrap();
    assert_eq!(pair.lent(), [9; 100]);
}

#[test]
fn read_on_stream_follows_earlier_work() {
    let fake = Fake::load();
    let pair = Pair::new(TransportKind::Memory, fake.file(), 100);
    fake.enter(1);
    let (address, stream) = (fake.memory(&[1; 100]), fake.stream());
    fake.fill(stream, address, 9, 100);
    pair.on_stream(stream, Opcode::Read, (address, 100, pair.base())).unwrap();
    assert_eq!(fake.bytes(address, 100), [0; 100], "the fill came first");
}

#[test]
fn host_memory_waits_for_the_stream() {
    let fake = Fake::load();
    let pair = Pair::new(TransportKind::Tcp, fake.file(), 100);
    let (address, stream) = (fake.memory(&[1; 100]), fake.stream());
    let host = pattern(100, 5);
    fake.fill(stream, address, 9, 100);
    pair.on_stream(stream, Opcode::Write, (host.as_ptr() as usize, 100, pair.base())).unwrap();
    assert_eq!(fake.bytes(address, 100), [9; 100], "the transfer waited for the stream");
    assert_eq!(pair.lent(), host);
}

#[test]
fn default_stream_is_that_of_the_current_device() {
    let fake = Fake::load();
    let pair = Pair::new(TransportKind::Tcp, fake.file(), 100);
    let host = pattern(100, 5);
    for (round, stream) in [0, 1, 2].into_iter().enumerate() {
        fake.enter(1 - round as i32 % 2);
        let address = fake.memory(&[1; 100]);
        fake.fill(stream, address, 9, 100);
        pair.on_stream(stream, Opcode::Write, (host.as_ptr() as usize, 100, pair.base())).unwrap();
        assert_eq!(fake.bytes(address, 100), [9; 100], "the transfer waited for stream {stream}");
    }
}

#[test]
fn worker_without_context_moves_device_memory() {
    let fake = Fake::load();
    let length = MIB + 5;
    let pair = Pair::new(TransportKind::Tcp, fake.file(), length);
    let bytes = pattern(length, 11);
    let entries = entries(&[(fake.memory(&bytes), length, pair.base())]);
    let batch = pair.near.submit(Arc::clone(&pair.peer), Opcode::Write, entries, soon()).unwrap();
    let ended = pair.near.wait(&[batch]).unwrap();
    assert!(matches!(ended[..], [mooncake_transfer_engine::BatchStatus::Done]), "{ended:?}");
    assert!(pair.lent() == bytes);
}

#[test]
fn finds_a_driver_loaded_after_the_engine() {
    let (folder, file) = driver_file();
    for kind in KINDS {
        let copy = folder.path().join(format!("{kind:?}.so"));
        std::fs::copy(&file, &copy).unwrap();
        let pair = Pair::new(kind, copy.clone(), 100);
        let fake = Fake::load_from(tempfile::TempDir::new().unwrap(), &copy);
        let address = fake.memory(&[4; 100]);
        pair.transfer(Opcode::Write, &[(address, 100, pair.base())]).remove(0).unwrap();
        assert_eq!(pair.lent(), [4; 100], "{kind:?}");
    }
}

#[test]
fn stream_loads_the_driver_or_names_the_missing_one() {
    let (_folder, file) = driver_file();
    let pair = Pair::new(TransportKind::Memory, file, 100);
    pair.near.on_stream(Stream::DEFAULT).unwrap();
    let error = pair.far.on_stream(Stream::DEFAULT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotSupported);
    assert!(error.to_string().contains("no-driver.so"), "{error}");
}

#[test]
fn failed_entries_leave_the_others_alone() {
    let fake = Fake::load();
    let pair = Pair::new(TransportKind::Tcp, fake.file(), 300);
    let (good, base) = (fake.memory(&[5; 100]), pair.base());
    let outcomes = pair.transfer(Opcode::Write, &[(good, 100, base), (good, 100, base + 250)]);
    assert!(
        outcomes[0].is_ok() && outcomes[1].is_err(),
        "past the end of the lent memory: {outcomes:?}"
    );
    assert_eq!(pair.lent()[..100], [5; 100]);
    let outcomes = pair.transfer(Opcode::Write, &[(good, 101, base)]);
    assert!(outcomes[0].is_err(), "past the end of device memory");
    fake.refuse_copies(true);
    let error = pair.transfer(Opcode::Read, &[(good, 100, base)]).remove(0).unwrap_err();
    assert!(error.to_string().contains("CUDA_ERROR_INVALID_VALUE"), "{error}");
    assert!(pair.on_stream(0, Opcode::Write, (good, 100, base)).is_err());
    fake.refuse_copies(false);
    pair.on_stream(0, Opcode::Write, (good, 100, base)).unwrap();
    assert_eq!(fake.depth(), 1, "the thread has its earlier context");
}

#[test]
fn pinned_memory_is_bounded_and_freed_with_the_engine() {
    let fake = Fake::load();
    let pair = Pair::new(TransportKind::Memory, fake.file(), 20 * 2 * MIB);
    let before = (0..2).map(|device| fake.retained(device)).sum::<i32>();
    let from = fake.memory(&pattern(20 * 2 * MIB, 1));
    std::thread::scope(|scope| {
        for thread in 0..20 {
            let (pair, at) = (&pair, thread * 2 * MIB);
            scope.spawn(move || {
                let ranges = [(from + at, 2 * MIB, pair.base() + at as u64)];
                pair.transfer(Opcode::Write, &ranges).remove(0).unwrap();
            });
        }
    });
    assert!(pair.lent() == pattern(20 * 2 * MIB, 1));
    let (now, most) = fake.pinned();
    assert!(now > 0 && most <= 64 * MIB, "{now} {most}");
    let pinned = pair.near.snapshot().pinned;
    assert_eq!((pinned.open * 8 * MIB, pinned.idle, pinned.limit), (now, pinned.open, 8));
    assert_eq!(pair.far.snapshot().pinned.open, 0, "it never saw device memory");
    drop(pair);
    assert_eq!(fake.pinned().0, 0);
    assert_eq!((0..2).map(|device| fake.retained(device)).sum::<i32>(), before);
}
