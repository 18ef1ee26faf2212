//! The state machine of the master: the allocator, puts from start to end, evictions and locates.
//!
//! `cargo bench -p mooncake-benches --bench state`
#![allow(clippy::unwrap_used, reason = "a benchmark that fails should stop")]

use std::{hint::black_box, time::Duration};

use criterion::{Criterion, criterion_group, criterion_main};
use mooncake_base::{ClientId, Incarnation, Moment, ObjectKey, SegmentId, TenantId};
use mooncake_master::state::{
    LocateOptions, Put, PutOptions, PutRef, Rules, SegmentSpec, State, allocator::Allocator,
};

const CLIENT: ClientId = ClientId::from_bits(1);
const NOW: Moment = Moment::from_boot(Duration::from_secs(1000));
/// Two sizes of KV blocks that a pool may hold together.
const SIZES: [u64; 2] = [3_274_752, 658_432];

/// Creates a state with segments of `length` bytes each.
fn pool(segments: u64, length: u64) -> State {
    let mut state = State::new(Rules::default(), 1);
    state.register(NOW, CLIENT, "host-a:1").unwrap();
    for index in 0..segments {
        let spec = SegmentSpec {
            id: SegmentId::from_bits(u128::from(index)),
            incarnation: Incarnation(1),
            name: format!("host-{index}:1"),
            endpoint: format!("host-{index}:1"),
            base: index << 40,
            length,
            protocol: "tcp".to_owned(),
        };
        state.mount(NOW, CLIENT, spec).unwrap();
    }
    state
}

fn key(index: u64) -> ObjectKey {
    ObjectKey::new(format!("{index:064}").into_bytes()).unwrap()
}

fn put(state: &mut State, index: u64, length: u64) {
    let tenant = TenantId::default();
    let options = PutOptions::default();
    let named = key(index);
    let key = (&named).into();
    let put = Put {
        key,
        length,
        group: b"",
        options: &options,
        is_replacing: false,
        if_version: None,
        request: 0,
    };
    let started = state.puts().put_start(NOW, CLIENT, &tenant, put).unwrap();
    let put = PutRef {
        key: named.as_bytes(),
        version: started.version,
        failed_replicas: &[],
        checksum: None,
    };
    state.puts().put_end(NOW, CLIENT, &tenant, put).unwrap();
}

/// Measures the allocator in a full pool. The case in random order is a worst case: the records of a
/// million blocks take 23 MiB, and each `free` has two cache misses, one for the record of the block
/// and one for its neighbours. Evictions free by age, where both records are usually cached.
fn allocator(c: &mut Criterion) {
    let mut group = c.benchmark_group("allocator");
    let large = 64 << 30;
    for (name, sizes, length, is_random) in [
        ("one size", &SIZES[..1], large, false),
        ("two sizes", &SIZES[..], large, false),
        ("a million of 4 KiB", &[4096][..], 4_096_000_000, false),
        ("a million of 4 KiB in random order", &[4096][..], 4_096_000_000, true),
    ] {
        // Full, as a pool under eviction: the oldest block is freed before a new one is allocated.
        let mut allocator = Allocator::new(length);
        let mut held = std::collections::VecDeque::new();
        let mut sizes = sizes.iter().copied().cycle();
        while let Some(block) = allocator.allocate(sizes.next().unwrap()) {
            held.push_back(block);
        }
        let mut next = sizes.next().unwrap();
        let mut chance = 1_u64;
        let mut step = || {
            if is_random {
                chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let at = (chance >> 33) as usize % held.len();
                held.swap(0, at);
            }
            allocator.free(held.pop_front().unwrap());
            while let Some(block) = allocator.allocate(next) {
                held.push_back(block);
                next = sizes.next().unwrap();
            }
        };
        // Warms up until neighbours in memory are no longer neighbours in the table of records.
        for _ in 0..2_000_000 {
            step();
        }
        group.bench_function(format!("free and allocate, {name}"), |b| b.iter(&mut step));
    }
    group.finish();
}

fn puts(c: &mut Criterion) {
    let tenant = TenantId::default();
    let mut group = c.benchmark_group("state");
    for segments in [1, 64] {
        let mut state = pool(segments, 64 << 30);
        for index in 0..100_000 {
            put(&mut state, index, 4096);
        }
        let mut index = 1 << 40;
        group.bench_function(format!("put start, end, remove; {segments} segments"), |b| {
            b.iter(|| {
                index += 1;
                put(&mut state, index, 65_536);
                state.remove(NOW, &tenant, key(index).as_bytes(), false).unwrap();
            });
        });
    }
    group.finish();
}

/// Measures puts into a full pool, where each put evicts the oldest object.
fn evictions(c: &mut Criterion) {
    let mut group = c.benchmark_group("state");
    for objects in [10_000, 1_000_000, 10_000_000] {
        let mut state = pool(1, objects * 4096);
        let mut index = 0;
        while state.totals().counters.evicted_keys == 0 {
            put(&mut state, index, 4096);
            index += 1;
        }
        group.bench_function(format!("put start, end, evict; full of {objects} objects"), |b| {
            b.iter(|| {
                index += 1;
                put(&mut state, index, 4096);
            });
        });
    }
    group.finish();
}

fn locate(c: &mut Criterion) {
    let tenant = TenantId::default();
    let mut state = pool(1, 64 << 30);
    let objects = 1_000_000;
    for index in 0..objects {
        put(&mut state, index, 4096);
    }
    let grant = LocateOptions { has_lease: true, has_fence: true };
    let keys: Vec<[ObjectKey; 1]> = (0..4096).map(|index| [key(index * 7919 % objects)]).collect();
    let mut next = 0;
    c.bench_function("state/locate with lease and fence, 1M objects", |b| {
        b.iter(|| {
            next = (next + 1) % keys.len();
            let keys = [keys[next][0].as_bytes()];
            black_box(state.locate(NOW, &tenant, &keys, grant))
        });
    });
    let mut next = 0;
    c.bench_function("state/probe with lease, 1M objects", |b| {
        b.iter(|| {
            next = (next + 1) % keys.len();
            black_box(state.probe(NOW, &tenant, keys[next][0].as_bytes(), true))
        });
    });
}

criterion_group!(benches, allocator, puts, evictions, locate);
criterion_main!(benches);
