//! The overhead of a client: small gets and puts with the master in the same process, and puts with
//! two copies.
//!
//! `cargo bench -p mooncake-benches --bench client`
#![allow(clippy::unwrap_used, reason = "a benchmark that fails should stop")]

use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use mooncake_base::ObjectKey;
use mooncake_master::{Master, MasterConfig, Origin};
use mooncake_store_client::{Client, ClientConfig, InProcessLink, PutOptions};
use mooncake_transfer_engine::{Engine, EngineConfig, TransportKind};
use tokio::runtime::{Builder, Runtime};

const SMALL: usize = 4 << 10;
const SEGMENT_BYTES: u64 = 64 << 20;
const VALUE_BYTES: [usize; 5] = [4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];

/// A master in this process.
struct Pool {
    runtime: Runtime,
    master: Option<Master>,
}

impl Pool {
    fn start() -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let master = runtime.block_on(mooncake_master::start(MasterConfig::embedded())).unwrap();
        Self { runtime, master: Some(master) }
    }

    /// Connects a client with a segment of this size, without the disabled transports.
    fn connect(&self, segment_bytes: u64, disabled: &[TransportKind]) -> Client {
        let engine = EngineConfig {
            name: "127.0.0.1".to_owned(),
            disabled: disabled.to_vec(),
            ..EngineConfig::default()
        };
        let engine = Engine::start(engine, self.runtime.handle().clone()).unwrap();
        let service = self.master.as_ref().unwrap().service();
        let origin = Origin::in_process();
        let link =
            InProcessLink::new("here", move |request| Ok(service.dispatch(request, &origin)));
        let config = ClientConfig { segment_bytes, ..ClientConfig::default() };
        Client::connect(config, engine, Arc::new(link)).unwrap()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let master = self.master.take().unwrap();
        self.runtime.block_on(master.stop());
    }
}

fn small(criterion: &mut Criterion) {
    let pool = Pool::start();
    let client = pool.connect(SEGMENT_BYTES, &[]);
    let key = ObjectKey::new(b"key".to_vec()).unwrap();
    let value = vec![7; SMALL];
    client.put_bytes(&key, &value, &PutOptions::default()).unwrap();
    let mut group = criterion.benchmark_group("client");
    group.throughput(Throughput::Bytes(SMALL as u64));
    group.bench_function("get 4 KiB from own memory", |bencher| {
        bencher.iter(|| client.get_bytes(&key).unwrap().unwrap());
    });
    let upsert = PutOptions { is_upsert: true, ..PutOptions::default() };
    group.bench_function("replace 4 KiB in own memory", |bencher| {
        bencher.iter(|| client.put_bytes(&key, &value, &upsert).unwrap());
    });
    group.finish();
}

fn copies(criterion: &mut Criterion) {
    for (transport, disabled) in
        [("memory", &[][..]), ("tcp", &[TransportKind::Memory, TransportKind::Shm])]
    {
        let pool = Pool::start();
        let _holders = [pool.connect(SEGMENT_BYTES, &[]), pool.connect(SEGMENT_BYTES, &[])];
        let writer = pool.connect(0, disabled);
        let options = PutOptions { is_upsert: true, replicas: 2, ..PutOptions::default() };
        let key = ObjectKey::new(b"key".to_vec()).unwrap();
        let mut group = criterion.benchmark_group(format!("two copies over {transport}"));
        for length in VALUE_BYTES {
            let value = vec![7; length];
            group.throughput(Throughput::Bytes(2 * length as u64));
            group.bench_function(BenchmarkId::from_parameter(length), |bencher| {
                bencher.iter(|| writer.put_bytes(&key, &value, &options).unwrap());
            });
        }
        group.finish();
    }
}

criterion_group!(benches, small, copies);
criterion_main!(benches);
