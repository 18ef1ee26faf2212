//! Lent device memory: the target of peers, which its owner copies for them.

use std::{
    io::{Read, Write},
    net::TcpStream,
    path::PathBuf,
    sync::Arc,
};

use mooncake_base::{Endpoint, Error, Result};
use mooncake_transfer_engine::{
    BatchStatus, Engine, Opcode, Peer, SegmentDescriptor, TransportKind, discovery::handshake,
};
use tokio::runtime::Runtime;

use crate::{MIB, entries, fake::Fake, outcomes, pattern, runtime, soon, start, start_with};

/// The transports that reach device memory of an owner.
const KINDS: [TransportKind; 2] = [TransportKind::Memory, TransportKind::Tcp];

/// An engine that lends device memory, and one that reads and writes it.
struct Lending {
    near: Engine,
    far: Engine,
    peer: Arc<Peer>,
    _runtime: Runtime,
}

impl Lending {
    fn new(kind: TransportKind, near_driver: PathBuf, fake: &Fake) -> Self {
        let runtime = runtime();
        let (near, far) = (start(kind, near_driver, &runtime), start(kind, fake.file(), &runtime));
        let peer = near.open(far.segment_name(), soon()).unwrap();
        assert_eq!(peer.transport(), Some(kind));
        Self { near, far, peer, _runtime: runtime }
    }

    fn without_near_driver(kind: TransportKind, fake: &Fake) -> Self {
        Self::new(kind, PathBuf::from("no-driver.so"), fake)
    }

    fn lend(&self, address: usize, length: usize) {
        self.far.regions().register(address as u64, length as u64, "*").unwrap();
    }

    fn transfer(&self, opcode: Opcode, ranges: &[(usize, usize, u64)]) -> Vec<Result<()>> {
        let mut entries = entries(ranges);
        self.near.transfer(&self.peer, opcode, &mut entries, soon());
        outcomes(entries)
    }

    fn one(&self, opcode: Opcode, here: &[u8], there: usize) -> Result<()> {
        let range = (here.as_ptr() as usize, here.len(), there as u64);
        self.transfer(opcode, &[range]).remove(0)
    }

    fn descriptor(&self) -> SegmentDescriptor {
        let at: Endpoint = self.far.segment_name().parse().unwrap();
        handshake::fetch_descriptor(&at, &SegmentDescriptor::default(), None, soon()).unwrap()
    }
}

/// Returns bytes that a transfer wrote unseen by the compiler.
fn written(bytes: &[u8]) -> Vec<u8> {
    std::hint::black_box(bytes).to_vec()
}

#[test]
fn peers_write_and_read_lent_device_memory() {
    for (kind, length) in KINDS
        .into_iter()
        .flat_map(|kind| [1, 4096, 8 * MIB, 8 * MIB + 1, 35 * MIB + 3].map(|length| (kind, length)))
    {
        let fake = Fake::load();
        let pair = Lending::without_near_driver(kind, &fake);
        let there = fake.memory(&vec![0; length]);
        pair.lend(there, length);
        let (bytes, back) = (pattern(length, 3), vec![0; length]);
        pair.one(Opcode::Write, &bytes, there).unwrap();
        assert!(fake.bytes(there, length) == bytes, "{kind:?} {length}");
        pair.one(Opcode::Read, &back, there).unwrap();
        assert!(written(&back) == bytes, "{kind:?} {length}");
        // The owner returns a buffer to its pool shortly after its answer.
        let give_up = std::time::Instant::now() + std::time::Duration::from_secs(20);
        loop {
            let pinned = pair.far.snapshot().pinned;
            if pinned.open >= 1 && pinned.open == pinned.idle {
                break;
            }
            assert!(std::time::Instant::now() < give_up, "{pinned:?}");
            std::thread::yield_now();
        }
    }
}

#[test]
fn both_sides_are_devices() {
    for kind in KINDS {
        let fake = Fake::load();
        let pair = Lending::new(kind, fake.file(), &fake);
        let length = 9 * MIB + 5;
        let here = fake.memory(&pattern(length, 7));
        fake.enter(1);
        let there = fake.memory(&vec![0; length]);
        pair.lend(there, length);
        let range = (here, length, there as u64);
        pair.transfer(Opcode::Write, &[range]).remove(0).unwrap();
        assert!(fake.bytes(there, length) == pattern(length, 7), "{kind:?}");
        let back = fake.memory(&vec![0; length]);
        pair.transfer(Opcode::Read, &[(back, length, there as u64)]).remove(0).unwrap();
        assert!(fake.bytes(back, length) == pattern(length, 7), "{kind:?}");
    }
}

#[test]
fn batch_fails_only_its_bad_entries() {
    for kind in KINDS {
        let fake = Fake::load();
        let pair = Lending::without_near_driver(kind, &fake);
        let first = fake.memory(&[0; 3000]);
        fake.enter(1);
        let second = fake.memory(&[0; 3000]);
        let host = vec![0_u8; 3000];
        let host_base = host.as_ptr() as usize;
        [first, second, host_base].iter().for_each(|base| pair.lend(*base, 3000));
        let bytes = pattern(3000, 1);
        let from = bytes.as_ptr() as usize;
        let mut ranges: Vec<_> = (0..900)
            .map(|i| {
                (from + (i / 3) * 10, 10, ([first, second, host_base][i % 3] + i / 3 * 10) as u64)
            })
            .collect();
        ranges.push((from, 11, first as u64 + 2990));
        ranges.push((16, 10, second as u64));
        let outcomes = pair.transfer(Opcode::Write, &ranges);
        assert!(outcomes[..900].iter().all(|one| one.is_ok()), "{kind:?}");
        assert!(outcomes[900].is_err() && outcomes[901].is_err(), "{kind:?} {outcomes:?}");
        for device in [first, second] {
            assert!(fake.bytes(device, 3000) == bytes, "{kind:?}");
        }
        assert!(written(&host) == bytes, "{kind:?}");
        let back = vec![0_u8; 3000];
        let to = back.as_ptr() as usize;
        let ranges: Vec<_> = (0..300)
            .map(|i| (to + i * 10, 10, ([first, second, host_base][i % 3] + i * 10) as u64))
            .collect();
        assert!(pair.transfer(Opcode::Read, &ranges).iter().all(|one| one.is_ok()), "{kind:?}");
        assert!(written(&back) == bytes, "{kind:?}");
    }
}

#[test]
fn shm_leaves_device_memory_to_tcp_without_an_error() {
    let fake = Fake::load();
    let runtime = runtime();
    let transports = [TransportKind::Shm, TransportKind::Tcp];
    let near = start_with(&transports, PathBuf::from("no-driver.so"), &runtime);
    let far = start_with(&transports, fake.file(), &runtime);
    let peer = near.open(far.segment_name(), soon()).unwrap();
    assert_eq!(peer.transport(), Some(TransportKind::Shm));
    let (there, host) = (fake.memory(&[0; 100]), vec![0_u8; 100]);
    let host_base = host.as_ptr() as usize;
    [there, host_base].iter().for_each(|base| {
        far.regions().register(*base as u64, 100, "*").unwrap();
    });
    let bytes = pattern(100, 2);
    let from = bytes.as_ptr() as usize;
    // Entries to host memory in the same batch are not delayed.
    for _ in 0..3 {
        let to = [there, host_base];
        let mut batch = entries(&to.map(|to| (from, 100, to as u64)));
        near.transfer(&peer, Opcode::Write, &mut batch, soon());
        outcomes(batch).into_iter().for_each(|one| one.unwrap());
    }
    let mut beyond = entries(&[(from, 100, there as u64 + 1)]);
    near.transfer(&peer, Opcode::Write, &mut beyond, soon());
    outcomes(beyond).remove(0).unwrap_err();
    assert!(fake.bytes(there, 100) == bytes && written(&host) == bytes);
    let snapshot = near.snapshot();
    let of = |kind| snapshot.transports.iter().find(|one| one.kind == kind).unwrap();
    let (shm, tcp) = (of(TransportKind::Shm), of(TransportKind::Tcp));
    // The range that is not lent is an error of both transports.
    assert_eq!((shm.entries, shm.unserved, shm.errors), (3, 3, 1));
    assert_eq!((tcp.entries, tcp.unserved, tcp.errors), (3, 0, 1));
    // Host memory may be mapped at the same address later.
    far.regions().unregister(there as u64).unwrap();
    let mut gone = entries(&[(from, 100, there as u64)]);
    near.transfer(&peer, Opcode::Write, &mut gone, soon());
    outcomes(gone).remove(0).unwrap_err();
}

#[test]
fn engine_reaches_its_own_devices_from_many_threads() {
    let fake = Fake::load();
    let pair = Lending::new(TransportKind::Memory, fake.file(), &fake);
    let peer = pair.far.open(pair.far.segment_name(), soon()).unwrap();
    let (from, to) = (fake.memory(&pattern(16 * MIB, 5)), fake.memory(&vec![0; 16 * MIB]));
    pair.lend(to, 16 * MIB);
    std::thread::scope(|scope| {
        for thread in 0..16 {
            let (far, peer, at) = (&pair.far, &peer, thread * MIB);
            scope.spawn(move || {
                let mut entries = entries(&[(from + at, MIB, (to + at) as u64)]);
                far.transfer(peer, Opcode::Write, &mut entries, soon());
                outcomes(entries).remove(0).unwrap();
            });
        }
    });
    assert!(fake.bytes(to, 16 * MIB) == pattern(16 * MIB, 5));
}

#[test]
fn transfers_wait_for_pinned_buffers() {
    let fake = Fake::load();
    let pair = Lending::without_near_driver(TransportKind::Tcp, &fake);
    let there = fake.memory(&vec![0; 40 * MIB]);
    pair.lend(there, 40 * MIB);
    let bytes = pattern(40 * MIB, 9);
    let batches: Vec<_> = (0..20)
        .map(|i| {
            let range =
                (bytes.as_ptr() as usize + 2 * i * MIB, 2 * MIB, (there + 2 * i * MIB) as u64);
            let peer = Arc::clone(&pair.peer);
            pair.near.submit(peer, Opcode::Write, entries(&[range]), soon()).unwrap()
        })
        .collect();
    let ends = pair.near.wait(&batches).unwrap();
    assert!(ends.iter().all(|end| matches!(end, BatchStatus::Done)), "{ends:?}");
    assert!(fake.bytes(there, 40 * MIB) == bytes);
    let (now, most) = fake.pinned();
    assert!(now > 0 && most <= 64 * MIB, "{now} {most}");
}

#[test]
fn refused_copy_fails_only_its_transfer() {
    for kind in KINDS {
        let fake = Fake::load();
        let pair = Lending::without_near_driver(kind, &fake);
        let there = fake.memory(&[0; 100]);
        pair.lend(there, 100);
        fake.refuse_copies(true);
        for opcode in [Opcode::Write, Opcode::Read] {
            assert!(pair.one(opcode, &[5; 100], there).is_err(), "{kind:?}");
        }
        fake.refuse_copies(false);
        pair.one(Opcode::Write, &[5; 100], there).unwrap();
        assert_eq!(fake.bytes(there, 100), [5; 100], "{kind:?}");
        pair.far.regions().unregister(there as u64).unwrap();
        assert!(pair.one(Opcode::Write, &[6; 100], there).is_err(), "{kind:?}");
        assert_eq!(fake.bytes(there, 100), [5; 100], "{kind:?}");
    }
}

#[test]
fn refuses_to_lend_memory_partly_of_a_device() {
    let fake = Fake::load();
    let pair = Lending::without_near_driver(TransportKind::Tcp, &fake);
    fake.enter(1);
    let there = fake.memory(&[0; 100]);
    pair.lend(there, 100);
    let buffer = pair.descriptor().buffers.remove(0);
    assert_eq!((buffer.name.as_str(), buffer.addr, buffer.length), ("cuda:1", there as u64, 100));
    let other = fake.memory(&[0; 100]) as u64;
    let error: Error = pair.far.regions().register(other, 101, "*").unwrap_err();
    assert!(error.to_string().contains("partly"), "{error}");
    assert_eq!(pair.far.regions().all().len(), 1);
}

#[test]
fn upstream_frames_reach_device_memory() {
    let fake = Fake::load();
    let pair = Lending::without_near_driver(TransportKind::Tcp, &fake);
    let length = 17 * MIB + 1;
    let there = fake.memory(&vec![0; length]);
    pair.lend(there, length);
    let descriptor = pair.descriptor();
    let mut stream = TcpStream::connect(("127.0.0.1", descriptor.tcp_data_port)).unwrap();
    stream.set_read_timeout(Some(std::time::Duration::from_secs(30))).unwrap();
    let header = |opcode: u8| {
        let mut header = [0; 24];
        header[..8].copy_from_slice(&(length as u64).to_le_bytes());
        header[8..16].copy_from_slice(&(there as u64).to_le_bytes());
        header[16] = opcode | 0x80;
        header
    };
    let done = (0x4D43_5456_u64 << 32).to_le_bytes();
    let (bytes, mut status, mut back) = (pattern(length, 4), [0; 8], vec![0; length]);
    stream.write_all(&header(1)).unwrap();
    stream.write_all(&bytes).unwrap();
    stream.read_exact(&mut status).unwrap();
    assert_eq!(status, done);
    assert!(fake.bytes(there, length) == bytes);
    stream.write_all(&header(0)).unwrap();
    stream.read_exact(&mut status).unwrap();
    assert_eq!(status, done);
    stream.read_exact(&mut back).unwrap();
    assert!(back == bytes);
}
