//! Moves bytes between two processes:
//!
//! ```text
//! cargo run -p mooncake-transfer-engine --example two_processes
//! ```
//!
//! The program starts itself a second time as the process that exports memory. To do the same over
//! a network, run `two_processes export ADDRESS` on one host and `two_processes access SEGMENT
//! ADDRESS`, with the output of the first, on another.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program to read and to run")]

use std::{
    io::{BufRead, BufReader, Read},
    process::{Command, Stdio},
    time::Duration,
};

use mooncake_base::{Clock, Moment, SystemClock};
use mooncake_transfer_engine::{Engine, EngineConfig, LocalRange, Opcode, TransferEntry};
use tokio::runtime::Runtime;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => both(),
        ["export", address] => export(address),
        ["access", segment, address] => access(segment, address.parse().unwrap()),
        _ => println!("two_processes [export ADDRESS | access SEGMENT ADDRESS]"),
    }
}

/// Runs both sides on this host.
fn both() {
    let mut exporter = Command::new(std::env::current_exe().unwrap())
        .args(["export", "127.0.0.1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(exporter.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let (segment, address) = line.trim().split_once(' ').unwrap();
    access(segment, address.parse().unwrap());
    // The other process exits at the end of its input.
    drop(exporter.stdin.take());
    assert!(exporter.wait().unwrap().success());
}

/// Exports a mebibyte until the input ends.
fn export(address: &str) {
    let (engine, _runtime) = start(address);
    let memory = engine.allocate(1 << 20).unwrap();
    memory.write(0, b"hello from the target").unwrap();
    println!("{} {}", engine.segment_name(), memory.base());
    let _ = std::io::stdin().read(&mut [0]);
}

/// Reads and writes memory of the other process.
fn access(segment: &str, address: u64) {
    let (engine, _runtime) = start("127.0.0.1");
    let peer = engine.open(segment, soon()).unwrap();
    let mut bytes = [0_u8; 21];
    let transport = transfer(&engine, &peer, Opcode::Read, &mut bytes, address);
    println!("read {:?} over {transport}", String::from_utf8_lossy(&bytes));
    let transport = transfer(&engine, &peer, Opcode::Write, &mut [7; 4096], address + 4096);
    println!("wrote 4096 bytes over {transport}");
}

fn transfer(
    engine: &Engine,
    peer: &mooncake_transfer_engine::Peer,
    opcode: Opcode,
    bytes: &mut [u8],
    address: u64,
) -> &'static str {
    // SAFETY: the bytes are borrowed exclusively until the transfer has returned.
    let local = unsafe { LocalRange::held(bytes.as_mut_ptr(), bytes.len()) };
    let mut entries = [TransferEntry::new(local, address)];
    let transport = engine.transfer(peer, opcode, &mut entries, soon());
    let [entry] = entries;
    entry.outcome.unwrap().unwrap();
    transport.unwrap().name()
}

fn start(address: &str) -> (Engine, Runtime) {
    let runtime = Runtime::new().unwrap();
    let config = EngineConfig { name: address.to_owned(), ..EngineConfig::default() };
    (Engine::start(config, runtime.handle().clone()).unwrap(), runtime)
}

fn soon() -> Moment {
    SystemClock.now() + Duration::from_secs(10)
}
