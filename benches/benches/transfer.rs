//! What moving bytes costs: one piece and a batch of small ones, over each way there is here, beside
//! a plain copy and, over TCP, beside two sockets without an engine.
//!
//! `cargo bench -p mooncake-benches --bench transfer`
#![allow(clippy::unwrap_used, reason = "a benchmark that fails should stop")]

use std::{
    io::{IoSlice, Read, Write},
    net::{TcpListener, TcpStream},
    thread,
    time::Duration,
};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use mooncake_base::{Clock, Moment, SystemClock};
use mooncake_transfer_engine::{
    Engine, EngineConfig, LocalRange, Opcode, SharedMemory, TransferEntry, TransportKind,
};
use tokio::runtime::{Builder, Runtime};

const BYTES: usize = 32 << 20;
const SMALL: usize = 4 << 10;
const BATCH: usize = 256;

/// What a bare exchange sends before the bytes, and gets after them.
const HEAD: usize = 64;
const DONE: usize = 16;

/// The ways, each with those that must be closed for it to be taken.
const WAYS: [(TransportKind, &[TransportKind]); 3] = [
    (TransportKind::Memory, &[]),
    (TransportKind::Shm, &[TransportKind::Memory]),
    (TransportKind::Tcp, &[TransportKind::Memory, TransportKind::Shm]),
];

fn start(runtime: &Runtime, disabled: &[TransportKind]) -> Engine {
    let config = EngineConfig {
        name: "127.0.0.1".to_owned(),
        disabled: disabled.to_vec(),
        ..EngineConfig::default()
    };
    Engine::start(config, runtime.handle().clone()).unwrap()
}

fn soon() -> Moment {
    SystemClock.now() + Duration::from_secs(30)
}

/// Writes `count` pieces of `size` bytes, one behind the other, as one batch.
fn write(near: &Engine, far: &Engine, memory: &SharedMemory, local: &mut [u8], size: usize) {
    let peer = near.open(far.segment_name(), soon()).unwrap();
    let mut pieces: Vec<TransferEntry> = local
        .chunks_exact_mut(size)
        .zip((memory.base()..).step_by(size))
        .map(|(part, remote)| {
            // SAFETY: the slice is borrowed, alone, until the transfer has returned.
            TransferEntry::new(unsafe { LocalRange::held(part.as_mut_ptr(), size) }, remote)
        })
        .collect();
    near.transfer(&peer, Opcode::Write, &mut pieces, soon());
    assert!(pieces.iter().all(|piece| matches!(piece.outcome, Some(Ok(())))));
}

/// A connection to a thread that takes so many bytes at a time and says that it has them. It ends
/// with the connection.
struct Bare(TcpStream);

impl Bare {
    fn start(size: usize) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            socket.set_nodelay(true).unwrap();
            let (mut head, mut bytes) = ([0; HEAD], vec![0; size]);
            while socket.read_exact(&mut head).is_ok() {
                socket.read_exact(&mut bytes).unwrap();
                socket.write_all(&head[..DONE]).unwrap();
            }
        });
        let socket = TcpStream::connect(address).unwrap();
        socket.set_nodelay(true).unwrap();
        Self(socket)
    }

    fn write(&mut self, bytes: &[u8]) {
        let mut head = [1; HEAD];
        let parts = [IoSlice::new(&head), IoSlice::new(bytes)];
        let sent = self.0.write_vectored(&parts).unwrap();
        assert!(sent >= HEAD);
        self.0.write_all(&bytes[sent - HEAD..]).unwrap();
        self.0.read_exact(&mut head[..DONE]).unwrap();
    }
}

fn transfer(c: &mut Criterion) {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let far = start(&runtime, &[]);
    let memory = far.allocate(BYTES as u64).unwrap();
    let mut local = vec![7_u8; BYTES];
    for (way, disabled) in WAYS {
        let near = start(&runtime, disabled);
        let peer = near.open(far.segment_name(), soon()).unwrap();
        assert_eq!(peer.transport(), Some(way));
        // Pages that are touched for the first time would be measured instead.
        for _ in 0..3 {
            write(&near, &far, &memory, &mut local, 1 << 20);
        }
        let mut group = c.benchmark_group(way.name());
        for size in [SMALL, 64 << 10, 1 << 20, 16 << 20] {
            group.throughput(Throughput::Bytes(size as u64));
            group.bench_function(format!("one piece of {} KiB", size >> 10), |b| {
                b.iter(|| write(&near, &far, &memory, &mut local[..size], size));
            });
        }
        group.throughput(Throughput::Bytes((BATCH * SMALL) as u64));
        group.bench_function(format!("{BATCH} pieces of {} KiB", SMALL >> 10), |b| {
            b.iter(|| write(&near, &far, &memory, &mut local[..BATCH * SMALL], SMALL));
        });
        if way == TransportKind::Tcp {
            for size in [SMALL, 64 << 10, 1 << 20] {
                let mut socket = Bare::start(size);
                group.throughput(Throughput::Bytes(size as u64));
                let name = format!("beside it: {} KiB between two bare sockets", size >> 10);
                group.bench_function(name, |b| b.iter(|| socket.write(&local[..size])));
            }
        }
        let mut plain = vec![0_u8; 1 << 20];
        group.throughput(Throughput::Bytes(1 << 20));
        group.bench_function("beside it: a plain copy of 1024 KiB", |b| {
            b.iter(|| plain.copy_from_slice(&local[..1 << 20]));
        });
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = transfer
}
criterion_main!(benches);
