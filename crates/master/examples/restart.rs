//! Measures the cost of the log and the duration of a restart: puts objects (1,000,000 by default)
//! into a master without a log and into one with a log, and restarts the second in another process,
//! whose memory it shows.
//!
//! `cargo run --release -p mooncake-master --example restart -- [OBJECTS]`
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a program that prints, for its author"
)]

use std::{
    process::Command,
    time::{Duration, Instant},
};

use bytes::Bytes;
use mooncake_base::{ClientId, SegmentId};
use mooncake_master::{
    LogSync, Master, MasterConfig, Origin, Service, config::StateDir, master::start,
};
use mooncake_proto::v1::{self, request::Call, response};

/// The number of keys per call, as in a large batch.
const BATCH: usize = 1000;
const OBJECT_BYTES: u64 = 4096;

/// The argument, with a state directory, that makes this program the restarted master.
const RESTARTED: &str = "--restarted";

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    match &arguments[..] {
        [mode, folder] if mode == RESTARTED => runtime.block_on(restart(folder)),
        [objects] => runtime.block_on(measure(objects.parse().unwrap())),
        _ => runtime.block_on(measure(1_000_000)),
    }
}

async fn measure(objects: usize) {
    let folder = tempfile::tempdir().unwrap();
    let at = StateDir::At(folder.path().to_owned());
    for (name, batch) in [("one at a time", 1), ("in batches of 1000", BATCH)] {
        for (log, state_dir) in [("without", StateDir::None), ("with", at.clone())] {
            let count = if batch == 1 { objects.min(50_000) } else { objects };
            let master = start(config(state_dir)).await.unwrap();
            let taken = fill(&master.service(), &format!("{batch}-{log}"), count, batch);
            let each = taken.as_nanos() as f64 / count as f64 / 1000.0;
            println!("puts {name}, {log} a log: {each:.2} us each");
            if let Some(status) = master.service().journal_status() {
                println!(
                    "  {} bytes in {} writes, {} records",
                    status.bytes_written, status.writes, status.records
                );
            }
            master.stop().await;
        }
    }
    let own = std::env::current_exe().unwrap();
    let status = Command::new(own).args([RESTARTED.as_ref(), folder.path().as_os_str()]).status();
    assert!(status.unwrap().success());
}

/// Starts a master on a state directory. Prints its time and its memory.
async fn restart(folder: &str) {
    let files = std::fs::read_dir(folder).unwrap();
    let bytes: u64 = files.map(|file| file.unwrap().metadata().unwrap().len()).sum();
    let before = memory("VmRSS");
    let begun = Instant::now();
    let master: Master = start(config(StateDir::At(folder.into()))).await.unwrap();
    let taken = begun.elapsed();
    let totals = master.service().totals();
    println!("restart with {} objects: serving after {} ms", totals.keys, taken.as_millis());
    println!(
        "  {} MiB of log and snapshot; {} MiB of memory, {} MiB at most",
        bytes >> 20,
        (memory("VmRSS") - before) >> 10,
        (memory("VmHWM") - before) >> 10
    );
    master.stop().await;
}

/// Returns a number of KiB that the kernel knows of this process.
fn memory(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn config(state_dir: StateDir) -> MasterConfig {
    MasterConfig {
        state_dir,
        log_sync: LogSync::Interval(Duration::from_secs(1)),
        // No client sends heartbeats here.
        client_ttl: Duration::from_secs(3600),
        ..MasterConfig::embedded()
    }
}

/// Puts this number of objects. Returns the duration.
fn fill(service: &Service, prefix: &str, count: usize, batch: usize) -> Duration {
    let origin = Origin::in_process();
    let caller = || {
        Some(v1::Caller {
            client: Bytes::copy_from_slice(&ClientId::from_bits(1).to_bytes()),
            tenant: String::new(),
        })
    };
    let ask = |call| {
        service
            .dispatch(v1::Request { call: Some(call), ..Default::default() }, &origin)
            .call
            .unwrap()
    };
    let register = v1::RegisterRequest {
        caller: caller(),
        name: "host:1".to_owned(),
        ..v1::RegisterRequest::default()
    };
    ask(Call::Register(register));
    let segment = v1::Segment {
        id: Bytes::copy_from_slice(&SegmentId::random().to_bytes()),
        incarnation: 1,
        name: "host:1".to_owned(),
        endpoint: "host:1".to_owned(),
        base: 1 << 40,
        length: 2 * OBJECT_BYTES * count as u64,
        protocol: "tcp".to_owned(),
        kind: v1::SegmentKind::Memory.into(),
    };
    let segments = vec![segment];
    ask(Call::Mount(v1::MountRequest {
        caller: caller(),
        segments,
        ..v1::MountRequest::default()
    }));
    let begun = Instant::now();
    for first in (0..count).step_by(batch) {
        // 64 bytes, like the hash of a KV cache block.
        let items =
            (first..first + batch).map(|at| (format!("{prefix:>32}{at:032}"), OBJECT_BYTES));
        let start = v1::PutStartRequest {
            caller: caller(),
            columns: Some(v1::PutColumns::pack(items)),
            ..v1::PutStartRequest::default()
        };
        let response::Call::PutStart(started) = ask(Call::PutStart(start)) else {
            panic!("another answer")
        };
        let v1::StartedColumns { versions, failures, .. } = started.columns.expect("columns");
        assert!(failures.is_empty(), "{failures:?}");
        let columns = Some(v1::PutRefColumns { versions, ..v1::PutRefColumns::default() });
        ask(Call::PutEnd(v1::PutEndRequest { caller: caller(), columns }));
    }
    begun.elapsed()
}
