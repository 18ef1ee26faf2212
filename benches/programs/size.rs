//! Measures the master with millions of objects: resident bytes per object, and latency of calls.
//!
//! `cargo run --profile bench -p mooncake-benches --bin size -- [OBJECTS] [--disk]`
//!
//! Objects have keys of 64 bytes and one copy of 4 KiB, with `--disk` a second one on a disk. For each
//! power of ten up to OBJECTS (default
//! 5,000,000) it prints the resident memory per object, and p50, p99 and maximum of single calls:
//! puts (start and end) since the previous line, and probes of random objects. At the end it removes
//! everything in slices, as the service does.
#![allow(clippy::print_stdout, reason = "the program prints a table")]

use std::{
    fs,
    time::{Duration, Instant},
};

use mooncake_base::{
    ClientId, Error, Incarnation, KeyRef, Moment, Result, SegmentId, TenantId, Version,
};
use mooncake_master::state::{
    DiskSpec, OffloadRules, Put, PutOptions, PutRef, RecordName, Removal, Rules, SegmentSpec,
    Selector, State,
};

const CLIENT: ClientId = ClientId::from_bits(1);
const NOW: Moment = Moment::from_boot(Duration::from_secs(1000));
const OBJECT_BYTES: u64 = 4096;
const DISK: SegmentId = SegmentId::from_bits(2);
/// Timed probes per line.
const PROBES: u64 = 200_000;

fn main() -> Result<()> {
    let has_disk = std::env::args().any(|word| word == "--disk");
    let objects = std::env::args().skip(1).find_map(|word| word.parse().ok());
    let objects: u64 = objects.unwrap_or(5_000_000);
    let offload = has_disk.then_some(OffloadRules { queue_max: 1, ..OffloadRules::default() });
    let mut state = State::new(Rules { offload, ..Rules::default() }, 1);
    state.register(NOW, CLIENT, "host:1")?;
    let segment = SegmentSpec {
        id: SegmentId::from_bits(1),
        incarnation: Incarnation(1),
        name: "host:1".to_owned(),
        endpoint: "host:1".to_owned(),
        base: 0,
        length: (objects + 1) * OBJECT_BYTES,
        protocol: "tcp".to_owned(),
    };
    state.mount(NOW, CLIENT, segment)?;
    if has_disk {
        let disk = DiskSpec {
            id: DISK,
            incarnation: Incarnation(1),
            name: "host:1".to_owned(),
            address: "host:1".to_owned(),
            capacity: u64::MAX,
        };
        state.disks().mount(CLIENT, disk, 0, false)?;
    }
    let empty = resident_bytes();
    let mut times = Times::default();
    let mut line = 10_000;
    for index in 0..objects {
        let version = times.measure(|| put(&mut state, index))?;
        if has_disk {
            store_on_disk(&mut state, index, version)?;
        }
        if index + 1 == line || index + 1 == objects {
            line *= 10;
            // Printing frees the times before the memory is measured.
            std::mem::take(&mut times).print("put");
            let bytes = resident_bytes().saturating_sub(empty) as f64 / (index + 1) as f64;
            println!("{:>9} objects  {bytes:6.0} resident bytes per object", index + 1);
            probe(&mut state, index + 1)?;
        }
    }
    let mut removal = Removal::new(TenantId::default(), Selector::All, true);
    let mut is_done = false;
    while !is_done {
        times.measure(|| {
            is_done = state.remove_matching(NOW, &mut removal);
            Ok(())
        })?;
    }
    println!("{:>9} objects removed in slices", removal.removed());
    times.print("slice");
    Ok(())
}

fn key(index: u64) -> [u8; 64] {
    let mut key = [b'k'; 64];
    let digits = format!("{:016x}", index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    key[48..].copy_from_slice(digits.as_bytes());
    key
}

fn put(state: &mut State, index: u64) -> Result<Version> {
    let named = key(index);
    let tenant = TenantId::default();
    let options = PutOptions::default();
    let key = KeyRef::new(&named)?;
    let put = Put {
        key,
        length: OBJECT_BYTES,
        group: b"",
        options: &options,
        is_replacing: false,
        if_version: None,
        request: 0,
    };
    let started = state.puts().put_start(NOW, CLIENT, &tenant, put)?;
    let put =
        PutRef { key: &named, version: started.version, failed_replicas: &[], checksum: None };
    state.puts().put_end(NOW, CLIENT, &tenant, put)?;
    Ok(started.version)
}

/// Reports that a disk has a copy of an object, as its owner does.
fn store_on_disk(state: &mut State, index: u64, version: Version) -> Result<()> {
    state.disks().take_over(NOW, CLIENT, DISK, 1, OBJECT_BYTES)?;
    let (tenant, key, length) = (&TenantId::default(), &key(index), OBJECT_BYTES);
    let record = RecordName { tenant, key, version, length };
    let is_present = state.disks().own(CLIENT, DISK)?.record_added(NOW, &record);
    if is_present { Ok(()) } else { Err(Error::internal("the record is refused")) }
}

fn probe(state: &mut State, objects: u64) -> Result<()> {
    let tenant = TenantId::default();
    let mut times = Times::default();
    let mut at = 1_u64;
    for _ in 0..PROBES {
        at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let key = key((at >> 33) % objects);
        times.measure(|| {
            std::hint::black_box(state.probe(NOW, &tenant, &key, true));
            Ok(())
        })?;
    }
    times.print("probe");
    Ok(())
}

/// Latencies in nanoseconds, capped at 4.2 seconds.
#[derive(Debug, Default)]
struct Times(Vec<u32>);

impl Times {
    fn measure<R>(&mut self, call: impl FnOnce() -> Result<R>) -> Result<R> {
        let start = Instant::now();
        let result = call();
        self.0.push(u32::try_from(start.elapsed().as_nanos()).unwrap_or(u32::MAX));
        result
    }

    fn print(mut self, what: &str) {
        self.0.sort_unstable();
        let at = |share: f64| {
            let nanos = self.0[((self.0.len() - 1) as f64 * share) as usize];
            f64::from(nanos) / 1000.0
        };
        println!(
            "          {what:<6} p50 {:8.2} us  p99 {:8.2} us  max {:9.1} us",
            at(0.5),
            at(0.99),
            at(1.0)
        );
    }
}

/// Returns the resident memory of this process.
fn resident_bytes() -> u64 {
    let text = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split(' ').nth(1).and_then(|word| word.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}
