//! The program `transfer_engine_bench`, which measures transfers between two processes.
//!
//! One process is the target and registers memory. The other is the initiator: each of its threads
//! moves batches from or to that memory, one after another, for some seconds.

mod circumstances;
mod latency;
mod options;
mod outcome;
mod plot;
mod worker;

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use mooncake_base::{
    Clock, Error, ErrorCode, Result, SystemClock,
    options::{help, resolve},
};
use mooncake_cli::{CliCommand, Program, Signals, print_flush};
use mooncake_settings::{engine_config, use_rdma};
use mooncake_transfer_engine::{Engine, SharedMemory};
use tokio::runtime::{Builder, Runtime};

use self::{
    circumstances::Circumstances,
    options::{BenchConfig, Mode, OPTIONS},
    outcome::Outcome,
    worker::{WorkerResult, Workload},
};

const PROGRAM: Program = Program {
    name: "transfer_engine_bench",
    version: env!("CARGO_PKG_VERSION"),
    error_prefix: "transfer_engine_bench",
};
const PURPOSE: &str = "measures throughput and latency of batches between two processes";

/// The timeout for opening the target's segment.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs the program with these arguments (without its own name) and returns its exit code: 0 when
/// the time is over, or after SIGTERM or SIGINT as a target; 1 after an error.
///
/// Must not be called from within a tokio runtime.
pub fn run(arguments: Vec<String>) -> u8 {
    let circumstances = Circumstances::now(&arguments);
    PROGRAM.run(
        from_arguments(arguments),
        || help(OPTIONS, PROGRAM.name, PURPOSE),
        |config| {
            let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build();
            let runtime = runtime.map_err(|source| {
                Error::internal("the threads of the engine could not be started").caused_by(source)
            })?;
            match config.mode {
                Mode::Target => run_target(&config, &runtime),
                Mode::Initiator => run_initiator(&config, circumstances, &runtime),
            }
        },
    )
}

fn from_arguments(arguments: Vec<String>) -> Result<CliCommand<BenchConfig>> {
    CliCommand::read(OPTIONS, arguments)?.and_then(|assignments| {
        let config: BenchConfig = resolve(OPTIONS, &[], |_| None, &assignments)?;
        config.check()?;
        Ok(config)
    })
}

/// Runs the target: registers memory until a signal ends the program.
fn run_target(config: &BenchConfig, runtime: &Runtime) -> Result<()> {
    let mut signals = Signals::new(runtime.handle())?;
    let (engine, _memory) = start(config, runtime)?;
    if config.metadata_server.trim().eq_ignore_ascii_case("P2PHANDSHAKE") {
        log(&format!(
            "Transfer Engine RPC using P2P handshake, listening on {}",
            engine.segment_name()
        ));
    } else {
        log(&format!("Transfer Engine listening as segment {}", engine.segment_name()));
    }
    runtime.block_on(signals.next());
    Ok(())
}

/// Runs the initiator: moves batches for the configured duration and reports the results.
fn run_initiator(
    config: &BenchConfig,
    circumstances: Circumstances,
    runtime: &Runtime,
) -> Result<()> {
    let (engine, memory) = start(config, runtime)?;
    let opened = engine.open(&config.segment_id, SystemClock.now() + OPEN_TIMEOUT);
    let peer = opened.inspect_err(|_| log("Unable to get target segment ID, please recheck"))?;
    let descriptor = peer.descriptor();
    let lent = descriptor.buffers.iter().max_by_key(|buffer| buffer.length).ok_or_else(|| {
        let text = "the target has no registered memory";
        Error::new(ErrorCode::SEGMENT_NOT_FOUND, text).with("segment", &config.segment_id)
    })?;
    let workload =
        Workload::new(config, (memory.base(), memory.length()), (lent.addr, lent.length))?;
    let (begin, is_failed) = (Instant::now(), AtomicBool::new(false));
    let results: Vec<Result<WorkerResult>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..config.threads)
            .map(|number| {
                let (engine, peer, workload, is_failed) = (&engine, &peer, &workload, &is_failed);
                scope.spawn(move || {
                    let result = worker::run(engine, peer, workload, number, begin, is_failed);
                    result.inspect_err(|_| is_failed.store(true, Ordering::Relaxed))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("workers do not panic")).collect()
    });
    let took = begin.elapsed();
    let results = results.into_iter().collect::<Result<Vec<_>>>()?;
    let transport = peer.transport().map_or("none", |kind| kind.name());
    let outcome = Outcome::new(config, circumstances, transport, took, &results);
    if !config.report.is_empty() {
        let path = &config.report;
        fs::write(path, plot::page(&outcome)).map_err(|source| {
            let text = "the report could not be written";
            Error::new(ErrorCode::FILE_WRITE_FAIL, text).with("path", path).caused_by(source)
        })?;
    }
    if config.is_json {
        print_flush(&format!("{}\n", outcome.json()));
    }
    log(&outcome.latency_line());
    log(&outcome.closing_line());
    Ok(())
}

/// Starts an engine with allocated and written memory.
fn start(config: &BenchConfig, runtime: &Runtime) -> Result<(Engine, SharedMemory)> {
    let mut settings =
        engine_config(config.local_server_name.trim(), &config.metadata_server, None)?;
    use_rdma(&mut settings, config.rdma_devices())?;
    let engine = Engine::start(settings, runtime.handle().clone())?;
    let memory = engine.allocate(config.buffer_bytes)?;
    // Written, so that the benchmark does not measure page faults.
    let ones = vec![1_u8; 1 << 20];
    for offset in (0..memory.length()).step_by(ones.len()) {
        let length = (memory.length() - offset).min(ones.len() as u64) as usize;
        memory.write(offset, &ones[..length])?;
    }
    Ok((engine, memory))
}

#[allow(clippy::print_stderr, reason = "a program; upstream's logs to standard error, too")]
fn log(line: &str) {
    eprintln!("{line}");
}
