//! Compares a call over TCP with a bare exchange of as many bytes between two sockets, in
//! alternating rounds, with the memory in another process:
//! `cargo run --release -p mooncake-transfer-engine --example tcp_beside_sockets [KIB…]`.
//!
//! The bare exchange sends 64 bytes and the payload and reads 16, or sends 64 and reads the
//! payload; a thread at the other end blocks in `read`. A ratio above 1 means that the engine is
//! faster. CPU time is that of both processes.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program for people who measure")]

use std::{
    io::{BufRead, BufReader, IoSlice, Read, Write},
    net::{TcpListener, TcpStream},
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use mooncake_base::{Clock, Moment, SystemClock};
use mooncake_transfer_engine::{Engine, EngineConfig, LocalRange, Opcode, Peer, TransferEntry};
use tokio::runtime::{Builder, Runtime};

const BYTES: usize = 64 << 20;
const ROUNDS: usize = 9;
const ROUND: Duration = Duration::from_millis(120);
const HEAD: usize = 64;
const DONE: usize = 16;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == "export") {
        return export();
    }
    let mut sizes: Vec<usize> =
        arguments.iter().map(|kib| kib.parse::<usize>().unwrap() << 10).collect();
    if sizes.is_empty() {
        sizes = vec![4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
    }
    let mut exporter = Command::new(std::env::current_exe().unwrap())
        .arg("export")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(exporter.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    let [segment, address, port] = words[..] else { panic!("{line:?}") };
    let (engine, _runtime) = start();
    let peer = engine.open(segment, soon()).unwrap();
    let socket = TcpStream::connect(("127.0.0.1", port.parse().unwrap())).unwrap();
    socket.set_nodelay(true).unwrap();
    let address = address.parse().unwrap();
    let child = exporter.id();
    let mut initiator = Initiator { engine, peer, address, socket, local: vec![7; BYTES], child };
    for size in sizes {
        for opcode in [Opcode::Write, Opcode::Read] {
            initiator.compare(opcode, size);
        }
    }
    drop(exporter.stdin.take());
    exporter.wait().unwrap();
}

/// Exports memory, and serves a bare socket, until the input ends.
fn export() {
    let (engine, _runtime) = start();
    // The same kind of memory as the bare socket uses.
    let memory = vec![1_u8; BYTES];
    let base = memory.as_ptr() as u64;
    engine.regions().register(base, BYTES as u64, "cpu:0").unwrap();
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        socket.set_nodelay(true).unwrap();
        let mut bytes = vec![1; BYTES];
        let mut head = [0; HEAD];
        while socket.read_exact(&mut head).is_ok() {
            let number = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().unwrap());
            let (offset, size) = (number(8) as usize, number(16) as usize);
            let payload = &mut bytes[offset..offset + size];
            if head[0] == 1 {
                socket.read_exact(payload).unwrap();
                socket.write_all(&head[..DONE]).unwrap();
            } else {
                socket.write_all(payload).unwrap();
            }
        }
    });
    println!("{} {base} {port}", engine.segment_name());
    let _ = std::io::stdin().read(&mut [0]);
}

struct Initiator {
    engine: Engine,
    peer: Arc<Peer>,
    address: u64,
    socket: TcpStream,
    local: Vec<u8>,
    child: u32,
}

/// Durations of one round.
#[derive(Clone, Copy)]
struct RoundTimes {
    median: f64,
    p99: f64,
    cpu_time: f64,
}

impl Initiator {
    fn compare(&mut self, opcode: Opcode, size: usize) {
        let mut with_sockets = Vec::new();
        let mut with_engine = Vec::new();
        for _ in 0..ROUNDS {
            with_sockets.push(
                self.round(size, |initiator, offset| initiator.with_sockets(opcode, offset, size)),
            );
            with_engine.push(
                self.round(size, |initiator, offset| initiator.with_engine(opcode, offset, size)),
            );
        }
        let middle =
            |rounds: &[RoundTimes], of: fn(&RoundTimes) -> f64| median(rounds.iter().map(of));
        let (b, o) = (middle(&with_sockets, |t| t.median), middle(&with_engine, |t| t.median));
        let ratio = median(with_sockets.iter().zip(&with_engine).map(|(b, o)| b.median / o.median));
        let p99 = (middle(&with_sockets, |t| t.p99), middle(&with_engine, |t| t.p99));
        let cpu = (middle(&with_sockets, |t| t.cpu_time), middle(&with_engine, |t| t.cpu_time));
        println!(
            "{opcode:?} {:>5} KiB  bare {b:>7.1} us  engine {o:>7.1} us  ratio {ratio:.2}  \
             p99 {:.0} {:.0} us  processor {:.1} {:.1} us a call",
            size >> 10,
            p99.0,
            p99.1,
            cpu.0,
            cpu.1,
        );
    }

    fn round(&mut self, size: usize, call: impl Fn(&mut Self, usize)) -> RoundTimes {
        for _ in 0..3 {
            call(self, 0);
        }
        let (start, cpu_time) = (Instant::now(), self.cpu_time());
        let mut times = Vec::new();
        let mut offset = 0;
        while start.elapsed() < ROUND {
            let begin = Instant::now();
            call(self, offset);
            times.push(begin.elapsed().as_secs_f64() * 1e6);
            offset = if offset + 2 * size > BYTES { 0 } else { offset + size };
        }
        let cpu_time = (self.cpu_time() - cpu_time) * 1e6 / times.len() as f64;
        times.sort_by(f64::total_cmp);
        RoundTimes { median: times[times.len() / 2], p99: times[times.len() * 99 / 100], cpu_time }
    }

    fn with_sockets(&mut self, opcode: Opcode, offset: usize, size: usize) {
        let mut head = [0; HEAD];
        head[0] = u8::from(opcode == Opcode::Write);
        head[8..16].copy_from_slice(&(offset as u64).to_le_bytes());
        head[16..24].copy_from_slice(&(size as u64).to_le_bytes());
        let payload = &mut self.local[offset..offset + size];
        if opcode == Opcode::Write {
            let parts = [IoSlice::new(&head), IoSlice::new(payload)];
            let sent = self.socket.write_vectored(&parts).unwrap();
            self.socket.write_all(&payload[sent - HEAD..]).unwrap();
            self.socket.read_exact(&mut head[..DONE]).unwrap();
        } else {
            self.socket.write_all(&head).unwrap();
            self.socket.read_exact(payload).unwrap();
        }
    }

    fn with_engine(&mut self, opcode: Opcode, offset: usize, size: usize) {
        let part = &mut self.local[offset..offset + size];
        // SAFETY: the bytes are borrowed exclusively until the transfer has returned.
        let local = unsafe { LocalRange::held(part.as_mut_ptr(), size) };
        let mut entries = [TransferEntry::new(local, self.address + offset as u64)];
        self.engine.transfer(&self.peer, opcode, &mut entries, soon());
        assert!(matches!(entries[0].outcome, Some(Ok(()))), "{entries:?}");
    }

    /// CPU time of both processes in seconds.
    fn cpu_time(&self) -> f64 {
        cpu_time_of(0) + cpu_time_of(self.child as libc::pid_t)
    }
}

fn cpu_time_of(process: libc::pid_t) -> f64 {
    let (mut clock, mut time) = (0, libc::timespec { tv_sec: 0, tv_nsec: 0 });
    // SAFETY: the call fills a live local.
    assert_eq!(unsafe { libc::clock_getcpuclockid(process, &raw mut clock) }, 0);
    // SAFETY: the call fills a live local.
    assert_eq!(unsafe { libc::clock_gettime(clock, &raw mut time) }, 0);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn start() -> (Engine, Runtime) {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let config = EngineConfig {
        name: "127.0.0.1".to_owned(),
        is_tcp_forced: true,
        ..EngineConfig::default()
    };
    (Engine::start(config, runtime.handle().clone()).unwrap(), runtime)
}

fn soon() -> Moment {
    SystemClock.now() + Duration::from_secs(30)
}
