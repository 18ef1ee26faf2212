//! Measures the latency that a client of a master sees over its socket: with few and with many
//! objects, and while another client removes, lists or puts a million keys.
//!
//! `cargo run --release -p mooncake-benches --bin stalls -- [OBJECTS]`
//!
//! On a machine with few processors run it under `taskset -c 0`: otherwise the choice of processor for
//! the threads of each master affects the first part more than the number of objects.
//!
//! Objects have keys of 64 bytes and one copy of 4 KiB, and masters keep their log. A line has p50, p99
//! and maximum of single calls. The first part alternates between a master with few objects and one
//! with many. In the second part one client makes single calls while another client does the work
//! named in the line; the first line, without other work, is the baseline.
#![allow(clippy::print_stdout, reason = "the program prints a table")]

use std::{
    hint::black_box,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use mooncake_base::{ClientId, Clock, SegmentId, SystemClock};
use mooncake_master::{Master, MasterConfig, config::StateDir, start};
use mooncake_proto::v1::{self, key_selector::By, request::Call, response};
use mooncake_store_client::{LinkConfig, MasterLink, SocketLink};
use tokio::runtime::Runtime;

const OBJECT_BYTES: u64 = 4096;
/// Keys per call while filling a pool.
const BATCH: u64 = 1000;
/// Keys that a bulk operation affects.
const BULK_KEYS: u64 = 1_000_000;
/// Objects in the smaller pool.
const FEW: u64 = 10_000;
/// Timed calls per line of the first part.
const CALLS: u64 = 50_000;
/// The deadline of each call.
const DEADLINE: Duration = Duration::from_secs(120);

fn main() -> Result<()> {
    let argument = std::env::args().nth(1).map(|word| word.parse()).transpose()?;
    let objects: u64 = argument.unwrap_or(5_000_000).max(FEW);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let small = Pool::start(&runtime, FEW)?;
    let large = Pool::start(&runtime, objects)?;
    compare(&small, &large)?;
    runtime.block_on(small.master.stop());

    let client = &large.client;
    client.fill("swept", 0..BULK_KEYS)?;
    println!("\nlatency of one client's single calls while another client …");
    let measure_during =
        |what: &str, work: &(dyn Fn() -> Result<u64> + Sync)| measure_during(&large, what, work);
    measure_during("… waits", &|| {
        std::thread::park_timeout(Duration::from_secs(2));
        Ok(0)
    })?;
    measure_during("… lists by a pattern", &|| client.list("swept.*f{3}"))?;
    measure_during("… puts in batches", &|| {
        client.fill("more", 0..BULK_KEYS).map(|()| BULK_KEYS)
    })?;
    measure_during("… removes by a pattern", &|| {
        client.remove(By::Regex("^ *swept".to_owned()))
    })?;
    measure_during("… removes by a prefix", &|| {
        client.remove(By::Prefix(Bytes::from(format!("{:>32}", "more"))))
    })?;
    measure_during("… removes everything", &|| client.remove(By::All(true)))?;
    runtime.block_on(large.master.stop());
    Ok(())
}

/// A master with a log, and a client that filled it with objects.
struct Pool {
    master: Master,
    client: Client,
    address: String,
    objects: u64,
    _folder: tempfile::TempDir,
}

impl Pool {
    fn start(runtime: &Runtime, objects: u64) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let config = MasterConfig {
            state_dir: StateDir::At(folder.path().to_owned()),
            // The clients here send no heartbeats.
            client_ttl: Duration::from_secs(3600),
            ..MasterConfig::embedded()
        };
        let master = runtime.block_on(start(config))?;
        let address = master.addresses().rpc.to_string();
        let client = Client::connect(&address, objects + 2 * BULK_KEYS + FEW)?;
        client.fill("kept", 0..objects)?;
        Ok(Self { master, client, address, objects, _folder: folder })
    }
}

/// Times single calls, alternating between the pools so that other load affects both equally.
fn compare(small: &Pool, large: &Pool) -> Result<()> {
    let mut times = [(); 2].map(|()| ["probe", "locate", "put, end and remove"].map(Times::new));
    for at in 0..CALLS {
        for (pool, [probes, locates, puts]) in [small, large].into_iter().zip(&mut times) {
            let existing = key("kept", scattered(at) % pool.objects);
            probes.measure(|| pool.client.probe(existing.clone()))?;
            locates.measure(|| pool.client.locate(existing.clone()))?;
            puts.measure(|| pool.client.put_and_remove(key("single", at)))?;
        }
    }
    let [few, many] = times.map(|times| times.map(Times::sorted));
    print("few objects", small.objects, &few);
    print("many objects", large.objects, &many);
    for (few, many) in few.iter().zip(&many) {
        println!("  {:<20} p99 ratio {:.2}", few.name, many.at(0.99) / few.at(0.99));
    }
    Ok(())
}

/// A client that makes raw calls to a master.
struct Client {
    link: SocketLink,
    id: ClientId,
}

impl Client {
    /// Registers and mounts a segment with space for this many objects.
    fn connect(address: &str, objects: u64) -> Result<Self> {
        let client = Self::register(address, ClientId::from_bits(1))?;
        let segment = v1::Segment {
            id: Bytes::copy_from_slice(&SegmentId::random().to_bytes()),
            incarnation: 1,
            name: "host:1".to_owned(),
            endpoint: "host:1".to_owned(),
            base: 1 << 40,
            length: OBJECT_BYTES * objects,
            protocol: "tcp".to_owned(),
            kind: v1::SegmentKind::Memory.into(),
        };
        let segments = vec![segment];
        let caller = client.caller();
        client.call(Call::Mount(v1::MountRequest { caller, segments, ..Default::default() }))?;
        Ok(client)
    }

    /// Registers without a segment.
    fn register(address: &str, id: ClientId) -> Result<Self> {
        let client = Self { link: SocketLink::new(address, LinkConfig::default())?, id };
        let (caller, name) = (client.caller(), format!("{id}"));
        client.call(Call::Register(v1::RegisterRequest { caller, name, ..Default::default() }))?;
        Ok(client)
    }

    fn caller(&self) -> Option<v1::Caller> {
        let client = Bytes::copy_from_slice(&self.id.to_bytes());
        Some(v1::Caller { client, tenant: String::new() })
    }

    fn call(&self, call: Call) -> Result<response::Call> {
        let request = v1::Request { call: Some(call), ..Default::default() };
        let answer = self.link.call(request, SystemClock.now() + DEADLINE)?;
        match answer.call.context("unknown reply, from a newer master?")? {
            response::Call::Failure(failure) => bail!("the master refused: {}", failure.message),
            answer => Ok(answer),
        }
    }

    fn fill(&self, prefix: &str, which: std::ops::Range<u64>) -> Result<()> {
        for first in which.clone().step_by(BATCH as usize) {
            let last = which.end.min(first + BATCH);
            self.put((first..last).map(|at| key(prefix, at)).collect())?;
        }
        Ok(())
    }

    fn put(&self, keys: Vec<Bytes>) -> Result<()> {
        let columns = Some(v1::PutColumns::pack(keys.iter().map(|key| (key, OBJECT_BYTES))));
        let caller = self.caller();
        let start = v1::PutStartRequest { caller, columns, ..Default::default() };
        let response::Call::PutStart(started) = self.call(Call::PutStart(start))? else {
            bail!("unexpected reply");
        };
        let v1::StartedColumns { versions, failures, .. } = started.columns.unwrap_or_default();
        if let Some(failure) = failures.first() {
            bail!("a put failed: {failure:?}");
        }
        let columns = Some(v1::PutRefColumns { versions, ..Default::default() });
        self.call(Call::PutEnd(v1::PutEndRequest { caller: self.caller(), columns }))?;
        Ok(())
    }

    fn probe(&self, key: Bytes) -> Result<()> {
        let (caller, keys) = (self.caller(), vec![key]);
        self.call(Call::Probe(v1::ProbeRequest {
            caller,
            keys,
            lease: true,
            ..Default::default()
        }))?;
        Ok(())
    }

    fn locate(&self, key: Bytes) -> Result<()> {
        let (caller, keys) = (self.caller(), Some(v1::KeyColumn::pack([key])));
        let locate =
            v1::LocateRequest { caller, keys, fence: false, lease: true, ..Default::default() };
        black_box(self.call(Call::Locate(locate))?);
        Ok(())
    }

    fn put_and_remove(&self, key: Bytes) -> Result<()> {
        self.put(vec![key.clone()])?;
        let (caller, keys) = (self.caller(), vec![key]);
        self.call(Call::Remove(v1::RemoveRequest {
            caller,
            keys,
            force: true,
            if_versions: vec![],
            spare_hard_pinned: false,
        }))?;
        Ok(())
    }

    /// Lists the keys that match a pattern page by page, and returns their number.
    fn list(&self, pattern: &str) -> Result<u64> {
        let (mut after, mut count) = (Bytes::new(), 0);
        loop {
            let selector = Some(v1::KeySelector { by: Some(By::Regex(pattern.to_owned())) });
            let caller = self.caller();
            let list = v1::ListObjectsRequest { caller, selector, after, limit: 0 };
            let response::Call::ListObjects(page) = self.call(Call::ListObjects(list))? else {
                bail!("unexpected reply");
            };
            count += page.objects.len() as u64;
            match page.objects.last() {
                Some(last) if !page.is_last => after = last.key.clone(),
                _ => return Ok(count),
            }
        }
    }

    fn remove(&self, by: By) -> Result<u64> {
        let (caller, selector) = (self.caller(), Some(v1::KeySelector { by: Some(by) }));
        let remove =
            v1::RemoveMatchingRequest { caller, selector, force: true, spare_hard_pinned: false };
        match self.call(Call::RemoveMatching(remove))? {
            response::Call::RemoveMatching(answer) => Ok(answer.removed),
            _ => bail!("unexpected reply"),
        }
    }
}

/// Prints the latency of one client's calls while `work` runs.
fn measure_during(pool: &Pool, what: &str, work: &(dyn Fn() -> Result<u64> + Sync)) -> Result<()> {
    let client = Client::register(&pool.address, ClientId::from_bits(2))?;
    let is_over = AtomicBool::new(false);
    let (count, took, times) = std::thread::scope(|scope| {
        let single = scope.spawn(|| {
            let mut probes = Times::new("probe");
            let mut puts = Times::new("put, end and remove");
            let mut at = 0;
            while !is_over.load(Ordering::Acquire) {
                at += 1;
                probes.measure(|| client.probe(key("kept", scattered(at) % pool.objects)))?;
                puts.measure(|| client.put_and_remove(key("quick", at)))?;
            }
            anyhow::Ok([probes, puts].map(Times::sorted))
        });
        let begun = Instant::now();
        let count = work();
        let took = begun.elapsed();
        is_over.store(true, Ordering::Release);
        let times = single.join().ok().context("the client with single calls panicked")??;
        anyhow::Ok((count?, took, times))
    })?;
    print(&format!("{what}, {} ms", took.as_millis()), count, &times);
    Ok(())
}

fn print(what: &str, count: u64, times: &[Times]) {
    println!("{what}: {count}");
    for times in times {
        let (name, calls) = (times.name, times.micros.len());
        let [half, most, all] = [0.5, 0.99, 1.0].map(|share| times.at(share));
        println!("  {name:<20} p50 {half:7.1} us  p99 {most:7.1} us  max {all:9.1} us  ({calls})");
    }
}

fn key(prefix: &str, at: u64) -> Bytes {
    // 64 bytes, like the hash of a block.
    Bytes::from(format!("{prefix:>32}{at:032x}"))
}

fn scattered(at: u64) -> u64 {
    at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16
}

/// Latencies of one kind of call.
struct Times {
    name: &'static str,
    micros: Vec<f32>,
}

impl Times {
    fn new(name: &'static str) -> Self {
        Self { name, micros: Vec::new() }
    }

    fn measure(&mut self, call: impl FnOnce() -> Result<()>) -> Result<()> {
        let start = Instant::now();
        call()?;
        self.micros.push(start.elapsed().as_secs_f32() * 1e6);
        Ok(())
    }

    fn sorted(mut self) -> Self {
        self.micros.sort_unstable_by(f32::total_cmp);
        self
    }

    fn at(&self, share: f64) -> f32 {
        let last = self.micros.len().saturating_sub(1);
        self.micros.get((last as f64 * share) as usize).copied().unwrap_or_default()
    }
}
