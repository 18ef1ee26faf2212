//! Many engines of two processes whose connections over RDMA devices all fail and come back at once.
//!
//! Runs in the virtual machine of `make test-rdma`: this process uses the devices rxe0 and rxe1, the other
//! one, this program again, those of the network namespace h0. The bridge ports sw0 and sw1 are the links
//! of this process.
#![allow(clippy::unwrap_used, reason = "tests, also in the functions that they share")]

use std::{
    env,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, ExitCode, Stdio},
    sync::{Arc, Barrier},
    thread,
    time::{Duration, Instant},
};

use libtest_mimic::Arguments;
use mooncake_base::{Clock, Moment, SystemClock, requirement::trial};
use mooncake_rdma::RdmaSettings;
use mooncake_transfer_engine::{
    Engine, EngineConfig, LocalRange, Opcode, Peer, TransferEntry, TransportKind,
};
use mooncake_verbs::Library;

const NAMESPACE: &str = "h0";
const OWNER: &str = "owner";
const CALLERS: usize = 20;
const OWNERS: usize = 40;
/// Bytes that each pair of engines moves, there and back.
const LENGTH: usize = 4096;
const TIMEOUT: Duration = Duration::from_secs(300);

fn main() -> ExitCode {
    if env::args().nth(1).as_deref() == Some(OWNER) {
        serve();
        return ExitCode::SUCCESS;
    }
    let name = "real::connections_of_800_pairs_come_back_at_once";
    let trials = vec![trial(missing(), name, connections_of_800_pairs_come_back_at_once)];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Returns why the test cannot run here.
fn missing() -> Option<String> {
    let count = Library::load().and_then(|library| Ok(library.devices()?.len())).unwrap_or(0);
    let has_namespace = Path::new("/run/netns").join(NAMESPACE).exists();
    (count < 4 || !has_namespace).then(|| "needs four RDMA devices: run make test-rdma".to_owned())
}

fn engine(address: &str, devices: &[&str], runtime: &tokio::runtime::Runtime) -> Engine {
    let devices = devices.iter().map(|name| (*name).to_owned()).collect();
    let config = EngineConfig {
        name: address.to_owned(),
        // Bytes that arrive have gone over RDMA.
        disabled: vec![TransportKind::Memory, TransportKind::Shm, TransportKind::Tcp],
        rdma: Some(RdmaSettings { devices, ..RdmaSettings::default() }),
        ..EngineConfig::default()
    };
    Engine::start(config, runtime.handle().clone()).unwrap()
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Starts the engines whose memory is written, prints their segments, and waits for the end of the input.
#[allow(clippy::print_stdout, reason = "the parent process reads the standard output")]
fn serve() {
    let runtime = runtime();
    let start = |_| {
        let engine = engine("10.77.1.1", &["rxe2", "rxe3"], &runtime);
        let memory = engine.allocate((CALLERS * LENGTH) as u64).unwrap();
        println!("{} {}", engine.segment_name(), memory.base());
        (engine, memory)
    };
    let engines: Vec<_> = (0..OWNERS).map(start).collect();
    std::io::stdin().lines().for_each(drop);
    drop(engines);
}

/// The process with the engines whose memory is written; killed on drop.
struct Owner {
    child: Child,
    /// Name of each segment, and the address of its memory.
    segments: Vec<(String, u64)>,
}

impl Owner {
    fn start() -> Self {
        let mut child = Command::new("ip")
            .args(["netns", "exec", NAMESPACE])
            .arg(env::current_exe().unwrap())
            .arg(OWNER)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let segment = |line: std::io::Result<String>| {
            let line = line.unwrap();
            let (name, address) = line.split_once(' ').unwrap();
            (name.to_owned(), address.parse().unwrap())
        };
        let segments = lines.take(OWNERS).map(segment).collect();
        Self { child, segments }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An engine of this process and one of the other.
struct Pair {
    engine: Engine,
    peer: Arc<Peer>,
    remote: u64,
    number: usize,
}

impl Pair {
    /// Moves bytes that depend on the pair and the round to the owner and back.
    fn exchange(&self, round: usize, deadline: Instant) {
        let byte = |index: usize| (index + self.number + 7 * round) as u8;
        let expected: Vec<u8> = (0..LENGTH).map(byte).collect();
        self.transfer(Opcode::Write, &mut expected.clone(), deadline);
        let mut found = vec![0; LENGTH];
        self.transfer(Opcode::Read, &mut found, deadline);
        assert!(found == expected, "pair {} in round {round}", self.number);
    }

    /// Moves bytes; tries again until that works.
    fn transfer(&self, opcode: Opcode, bytes: &mut [u8], deadline: Instant) {
        loop {
            // SAFETY: nothing else refers to the bytes.
            let local = unsafe { LocalRange::held(bytes.as_mut_ptr(), bytes.len()) };
            let mut entries = [TransferEntry::new(local, self.remote)];
            self.engine.transfer(&self.peer, opcode, &mut entries, soon());
            let [entry] = entries;
            match entry.outcome.unwrap() {
                Ok(()) => return,
                Err(error) => assert!(Instant::now() < deadline, "pair {}: {error}", self.number),
            }
        }
    }
}

fn soon() -> Moment {
    SystemClock.now() + Duration::from_secs(60)
}

/// Sets the links of the devices of this process up or down, and waits until all engines know.
fn set_links(engines: &[Engine], is_up: bool) {
    for port in ["sw0", "sw1"] {
        let state = if is_up { "up" } else { "down" };
        assert!(Command::new("ip").args(["link", "set", port, state]).status().unwrap().success());
    }
    let begun = Instant::now();
    let know =
        |engine: &Engine| engine.snapshot().devices.iter().all(|device| device.is_active == is_up);
    while !engines.iter().all(know) {
        assert!(begun.elapsed() < TIMEOUT, "an engine does not notice its links");
        thread::yield_now();
    }
}

fn connections_of_800_pairs_come_back_at_once() {
    let owner = Owner::start();
    let runtime = runtime();
    let engines: Vec<_> =
        (0..CALLERS).map(|_| engine("10.77.0.1", &["rxe0", "rxe1"], &runtime)).collect();
    let mut pairs = Vec::new();
    for (caller, engine) in engines.iter().enumerate() {
        for (name, base) in &owner.segments {
            let peer = engine.open(name, soon()).unwrap();
            let (engine, remote) = (engine.clone(), base + (caller * LENGTH) as u64);
            pairs.push(Pair { engine, peer, remote, number: pairs.len() });
        }
    }
    assert_eq!(pairs.len(), CALLERS * OWNERS);
    let barrier = Barrier::new(pairs.len() + 1);
    thread::scope(|scope| {
        for pair in &pairs {
            let exchange = || {
                pair.exchange(0, Instant::now() + TIMEOUT);
                barrier.wait();
                barrier.wait();
                pair.exchange(1, Instant::now() + TIMEOUT);
            };
            thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, exchange).unwrap();
        }
        barrier.wait();
        // All connections fail when the links go down.
        set_links(&engines, false);
        set_links(&engines, true);
        barrier.wait();
    });
    let failures = engines.iter().flat_map(|engine| engine.snapshot().devices);
    assert!(failures.into_iter().all(|device| device.link_failures == 1));
}
