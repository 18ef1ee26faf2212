//! Calls whose cost must not grow with the pool: puts into full pools of many segments, puts that are
//! refused, and clients that leave beside the puts of others.
//!
//! `cargo bench -p mooncake-benches --bench large_pools`
#![allow(clippy::unwrap_used, reason = "a benchmark that fails should stop")]

use std::{hint::black_box, time::Duration};

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use mooncake_base::{ClientId, Incarnation, KeyRef, Moment, SegmentId, TenantId};
use mooncake_master::state::{
    LocateOptions, Put, PutOptions, PutProgress, PutRef, PutStep, Rules, SegmentSpec, State,
};

const NOW: Moment = Moment::from_boot(Duration::from_secs(1000));
const OBJECT_BYTES: u64 = 4096;
const SEGMENT_BYTES: u64 = 8 * OBJECT_BYTES;

fn client(number: u64) -> ClientId {
    ClientId::from_bits(u128::from(number) + 1)
}

/// Creates a state with segments of one client each.
fn pool(segments: u64, length: u64) -> State {
    let mut state = State::new(Rules::default(), 1);
    for index in 0..segments {
        let name = format!("host-{index}:1");
        state.register(NOW, client(index), &name).unwrap();
        let spec = SegmentSpec {
            id: SegmentId::from_bits(u128::from(index)),
            incarnation: Incarnation(1),
            name: name.clone(),
            endpoint: name,
            base: 1 << 40,
            length,
            protocol: "tcp".to_owned(),
        };
        state.mount(NOW, client(index), spec).unwrap();
    }
    state
}

fn start(
    state: &mut State,
    owner: u64,
    key: &str,
    options: &PutOptions,
) -> mooncake_base::Result<PutStep> {
    let (tenant, key) = (TenantId::default(), KeyRef::new(key.as_bytes()).unwrap());
    let put = Put {
        key,
        length: OBJECT_BYTES,
        group: b"",
        options,
        is_replacing: false,
        if_version: None,
        request: 0,
    };
    state.puts().put_step(NOW, client(owner), &tenant, &put, &mut PutProgress::default())
}

fn put(state: &mut State, key: &str, options: &PutOptions) {
    let PutStep::Started(started) = start(state, 0, key, options).unwrap() else {
        panic!("it waits")
    };
    let version = started.version;
    let put = PutRef { key: key.as_bytes(), version, failed_replicas: &[], checksum: None };
    state.puts().put_end(NOW, client(0), &TenantId::default(), put).unwrap();
}

/// Fills the pool until the first eviction. Returns the number of puts.
fn fill(state: &mut State, options: &PutOptions) -> u64 {
    let mut index = 0;
    while state.totals().used + OBJECT_BYTES <= state.totals().capacity {
        // The sums are taken over all segments.
        for _ in 0..1000.min((state.totals().capacity - state.totals().used) / OBJECT_BYTES) {
            put(state, &format!("k{index}"), options);
            index += 1;
        }
    }
    index
}

fn full_pools(c: &mut Criterion) {
    let mut group = c.benchmark_group("large pools");
    group.sample_size(10);
    for segments in [10, 10_000] {
        let options = PutOptions::default();
        let mut state = pool(segments, SEGMENT_BYTES);
        let mut index = fill(&mut state, &options);
        group.bench_function(format!("put into {segments} full segments"), |b| {
            b.iter(|| {
                index += 1;
                put(&mut state, &format!("k{index}"), &options);
            });
        });
    }
    group.finish();
}

fn refused_puts(c: &mut Criterion) {
    let mut group = c.benchmark_group("large pools");
    group.sample_size(10);
    for segments in [100, 10_000] {
        let options = PutOptions { is_hard_pinned: true, ..PutOptions::default() };
        let mut state = pool(segments, SEGMENT_BYTES);
        fill(&mut state, &options);
        group.bench_function(format!("refused put, {segments} segments"), |b| {
            b.iter(|| black_box(start(&mut state, 0, "new", &options)).unwrap_err());
        });
    }
    group.finish();
}

fn clients(c: &mut Criterion) {
    let mut group = c.benchmark_group("large pools");
    group.sample_size(10);
    let options = PutOptions::default();
    for others in [0, 100_000] {
        // What the client leaves behind is not free at once, and no time passes.
        let mut state = pool(4, 1 << 36);
        for index in 0..others {
            start(&mut state, 0, &format!("other{index}"), &options).unwrap();
        }
        let (mut index, own) = (0, client(9));
        group.bench_function(format!("client with a put leaves, {others} puts of others"), |b| {
            let joined = |state: &mut State, index: u64| {
                state.register(NOW, own, "host-9:1").unwrap();
                start(state, 9, &format!("own{index}"), &options).unwrap();
            };
            b.iter_batched(
                || (),
                |()| {
                    index += 1;
                    joined(&mut state, index);
                    state.unregister(NOW, own);
                },
                BatchSize::SmallInput,
            );
        });
    }
    let mut state = pool(1, 1 << 30);
    let keys: Vec<String> = (0..1024).map(|index| format!("k{index}")).collect();
    keys.iter().for_each(|key| put(&mut state, key, &options));
    let grant = LocateOptions { has_lease: true, has_fence: true };
    // The longest hold of the lock by a call that reads.
    group.bench_function("locate of a slice of 1,024 keys", |b| {
        b.iter(|| black_box(state.locate(NOW, &TenantId::default(), &keys, grant)));
    });
    group.finish();
}

criterion_group!(benches, full_pools, refused_puts, clients);
criterion_main!(benches);
