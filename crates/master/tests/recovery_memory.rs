//! Memory of a recovery: its peak stays near the size of the state, and the state is no larger than
//! one that the same puts made. Bytes are counted by the allocator of this process, so this file has
//! one test.

#![allow(clippy::unwrap_used, reason = "helpers of tests, which may panic")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use mooncake_base::{ClientId, Incarnation, KeyRef, Moment, SegmentId, TenantId};
use mooncake_master::state::{Image, Put, PutOptions, PutRef, Rules, SegmentSpec, State};

const CLIENT: ClientId = ClientId::from_bits(1);
const NOW: Moment = Moment::from_boot(Duration::from_secs(1000));
const OBJECT_BYTES: u64 = 4096;
/// Peak of a recovery, as a share of the bytes of the state that it returns.
const PEAK_MAX: f64 = 1.15;
/// Size of a recovered state, as a share of that of a state that the same puts made.
const SIZE_MAX: f64 = 1.01;

#[global_allocator]
static ALLOCATED: CountingAllocator =
    CountingAllocator { bytes: AtomicUsize::new(0), peak: AtomicUsize::new(0) };

/// The allocator of the system. Counts the bytes that are allocated, and their maximum.
struct CountingAllocator {
    bytes: AtomicUsize,
    peak: AtomicUsize,
}

impl CountingAllocator {
    fn add(&self, bytes: usize) {
        let bytes = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(bytes, Ordering::Relaxed);
    }

    fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    fn restart_peak(&self) {
        self.peak.store(self.bytes(), Ordering::Relaxed);
    }

    fn peak(&self) -> usize {
        self.peak.load(Ordering::Relaxed)
    }
}

// SAFETY: each call is passed on as it is, and `System` keeps the contract.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        self.bytes.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`, which is the same.
        unsafe { System.dealloc(block, layout) };
    }

    // The kernel moves the pages of a large block, which is not in memory twice.
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        self.bytes.fetch_sub(layout.size(), Ordering::Relaxed);
        self.add(size);
        // SAFETY: the caller keeps the contract of `realloc`, which is the same.
        unsafe { System.realloc(block, layout, size) }
    }
}

#[test]
fn recovery_needs_little_more_memory_than_the_state_before() {
    // Vectors double at other numbers of objects than hash tables.
    for objects in [20_000, 30_000, 40_000, 48_000] {
        let (log, snapshot) = log_and_snapshot(objects);
        let direct = bytes_of_state(objects);
        for (name, frames) in [("log", log), ("snapshot", snapshot)] {
            let before = ALLOCATED.bytes();
            ALLOCATED.restart_peak();
            let mut image = Image::default();
            frames.iter().for_each(|frame| image.replay(frame).unwrap());
            let (state, restored) = State::restore(Rules::default(), 2, NOW, image, Duration::ZERO);
            assert_eq!((restored.objects, restored.conflicts), (objects, 0));
            let (peak, held) = (ALLOCATED.peak() - before, ALLOCATED.bytes() - before);
            drop(state);
            let share = peak as f64 / held as f64;
            let each = |bytes: usize| bytes as f64 / objects as f64;
            assert!(
                share <= PEAK_MAX,
                "{name} of {objects} objects: {:.0} bytes each at the peak, {:.0} in the state",
                each(peak),
                each(held)
            );
            assert!(
                held as f64 <= direct as f64 * SIZE_MAX,
                "{name} of {objects} objects: {:.0} bytes each, {:.0} before the recovery",
                each(held),
                each(direct)
            );
        }
    }
}

/// Returns the effects of so many puts, and a snapshot of the objects, in frames.
fn log_and_snapshot(objects: u64) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let mut state = State::new(Rules::default(), 1);
    state.record_effects();
    lend(&mut state, objects);
    let mut log = Vec::new();
    for index in 0..objects {
        put(&mut state, index);
        if index % 1000 == 0 || index + 1 == objects {
            log.push(Vec::new());
            state.log_mut().take_effects(log.last_mut().unwrap());
        }
    }
    let mut snapshot = vec![Vec::new()];
    let mut cursor = state.begin_snapshot(NOW, &mut snapshot[0]);
    let mut is_last = false;
    while !is_last {
        let mut frame = Vec::new();
        is_last = state.snapshot_slice(&mut cursor, 1000, &mut frame);
        snapshot.push(frame);
    }
    (log, snapshot)
}

/// Returns the bytes of a state that so many puts made.
fn bytes_of_state(objects: u64) -> usize {
    let before = ALLOCATED.bytes();
    let mut state = State::new(Rules::default(), 2);
    lend(&mut state, objects);
    (0..objects).for_each(|index| put(&mut state, index));
    ALLOCATED.bytes() - before
}

/// Registers a client that lends memory for so many objects.
fn lend(state: &mut State, objects: u64) {
    state.register(NOW, CLIENT, "host:1").unwrap();
    let segment = SegmentSpec {
        id: SegmentId::from_bits(1),
        incarnation: Incarnation(1),
        name: "host:1".to_owned(),
        endpoint: "host:1".to_owned(),
        base: 0,
        length: (objects + objects / 4) * OBJECT_BYTES,
        protocol: "tcp".to_owned(),
    };
    state.mount(NOW, CLIENT, segment).unwrap();
}

fn put(state: &mut State, index: u64) {
    let named = format!("{:k>64}", format_args!("{index:016x}").to_string());
    let (tenant, options) = (TenantId::default(), PutOptions::default());
    let put = Put {
        key: KeyRef::new(named.as_bytes()).unwrap(),
        length: OBJECT_BYTES,
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
        checksum: Some(index),
    };
    state.puts().put_end(NOW, CLIENT, &tenant, put).unwrap();
}
