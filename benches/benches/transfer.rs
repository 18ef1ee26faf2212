//! Transfers of one entry and of a batch of small entries over each local transport, compared with
//! `memcpy` and, for TCP, with two bare sockets without an engine.
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

/// Sizes of the header and the reply of an exchange between bare sockets.
const HEADER_BYTES: usize = 64;
const REPLY_BYTES: usize = 16;

/// Each transport, with the transports to disable so that the engine chooses it.
const TRANSPORTS: [(TransportKind, &[TransportKind]); 3] = [
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

fn deadline() -> Moment {
    SystemClock.now() + Duration::from_secs(30)
}

/// Writes `local` as one batch of contiguous entries of `size` bytes.
fn write(near: &Engine, far: &Engine, memory: &SharedMemory, local: &mut [u8], size: usize) {
    let peer = near.open(far.segment_name(), deadline()).unwrap();
    let mut entries: Vec<TransferEntry> = local
        .chunks_exact_mut(size)
        .zip((memory.base()..).step_by(size))
        .map(|(part, remote)| {
            // SAFETY: the slice is borrowed mutably until the transfer has returned.
            TransferEntry::new(unsafe { LocalRange::held(part.as_mut_ptr(), size) }, remote)
        })
        .collect();
    near.transfer(&peer, Opcode::Write, &mut entries, deadline());
    assert!(entries.iter().all(|entry| matches!(entry.outcome, Some(Ok(())))));
}

/// A bare connection to a thread that reads `size` bytes at a time and acknowledges them. The thread
/// ends with the connection.
struct BareConnection(TcpStream);

impl BareConnection {
    fn start(size: usize) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            socket.set_nodelay(true).unwrap();
            let (mut head, mut bytes) = ([0; HEADER_BYTES], vec![0; size]);
            while socket.read_exact(&mut head).is_ok() {
                socket.read_exact(&mut bytes).unwrap();
                socket.write_all(&head[..REPLY_BYTES]).unwrap();
            }
        });
        let socket = TcpStream::connect(address).unwrap();
        socket.set_nodelay(true).unwrap();
        Self(socket)
    }

    fn write(&mut self, bytes: &[u8]) {
        let mut head = [1; HEADER_BYTES];
        let parts = [IoSlice::new(&head), IoSlice::new(bytes)];
        let sent = self.0.write_vectored(&parts).unwrap();
        assert!(sent >= HEADER_BYTES);
        self.0.write_all(&bytes[sent - HEADER_BYTES..]).unwrap();
        self.0.read_exact(&mut head[..REPLY_BYTES]).unwrap();
    }
}

fn transfer(c: &mut Criterion) {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let far = start(&runtime, &[]);
    let memory = far.allocate(BYTES as u64).unwrap();
    let mut local = vec![7_u8; BYTES];
    for (transport, disabled) in TRANSPORTS {
        let near = start(&runtime, disabled);
        let peer = near.open(far.segment_name(), deadline()).unwrap();
        assert_eq!(peer.transport(), Some(transport));
        // Warms up, so that page faults are not measured.
        for _ in 0..3 {
            write(&near, &far, &memory, &mut local, 1 << 20);
        }
        let mut group = c.benchmark_group(transport.name());
        for size in [SMALL, 64 << 10, 1 << 20, 16 << 20] {
            group.throughput(Throughput::Bytes(size as u64));
            group.bench_function(format!("one entry of {} KiB", size >> 10), |b| {
                b.iter(|| write(&near, &far, &memory, &mut local[..size], size));
            });
        }
        group.throughput(Throughput::Bytes((BATCH * SMALL) as u64));
        group.bench_function(format!("{BATCH} entries of {} KiB", SMALL >> 10), |b| {
            b.iter(|| write(&near, &far, &memory, &mut local[..BATCH * SMALL], SMALL));
        });
        if transport == TransportKind::Tcp {
            for size in [SMALL, 64 << 10, 1 << 20] {
                let mut socket = BareConnection::start(size);
                group.throughput(Throughput::Bytes(size as u64));
                let name = format!("baseline: {} KiB between two bare sockets", size >> 10);
                group.bench_function(name, |b| b.iter(|| socket.write(&local[..size])));
            }
        }
        let mut plain = vec![0_u8; 1 << 20];
        group.throughput(Throughput::Bytes(1 << 20));
        group.bench_function("baseline: memcpy of 1024 KiB", |b| {
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
