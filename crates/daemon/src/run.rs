//! The whole program: arguments, log, runtime, signals, exit code. The binary and the Python
//! package both call [`run`].

use std::process::id;

use mooncake_base::{Error, Result, options::help};
use mooncake_cli::{PortsFile, Program, Signals, log, print_flush, variables};
use mooncake_os::rlimit;
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};

use crate::{
    config::{DaemonConfig, OPTIONS, from_arguments},
    daemon::Daemon,
};

const PROGRAM: Program =
    Program { name: "mooncake_client", version: env!("CARGO_PKG_VERSION"), error_prefix: "ERROR" };
const PURPOSE: &str = "lends memory to the pool and connects processes of this host to it";

/// Threads that serve TCP transfers of the memory.
const WORKERS: usize = 4;

/// Runs the program with these arguments (without its own name) and returns its exit code: 0 after
/// SIGTERM, SIGINT, `--help` or `--version`, 1 after an error.
///
/// Must not be called from within a tokio runtime.
pub fn run(arguments: Vec<String>) -> u8 {
    PROGRAM.run(from_arguments(arguments), || help(OPTIONS, PROGRAM.name, PURPOSE), work)
}

fn work(config: DaemonConfig) -> Result<()> {
    log::install();
    variables::warn_of_every_invalid();
    for warning in config.warnings() {
        tracing::warn!("{warning}");
    }
    // A dummy client needs up to 17 file descriptors.
    rlimit::raise();
    let cores = mooncake_os::cpu_count();
    let runtime = Builder::new_multi_thread()
        .worker_threads(cores.clamp(1, WORKERS))
        .thread_name("mooncake-io")
        .enable_all()
        .build()
        .map_err(|source| Error::internal("cannot start the daemon's runtime").caused_by(source))?;
    serve(&config, &runtime)
}

/// Serves until a termination signal.
fn serve(config: &DaemonConfig, runtime: &Runtime) -> Result<()> {
    let mut signals = Signals::new(runtime.handle())?;
    let daemon = Daemon::start(config, runtime.handle().clone())?;
    let _ports = PortsFile::write(&config.ports_file, &bound(&daemon))?;
    let (address, name) = (daemon.address(), daemon.client().name());
    let http = daemon.http_address().map(|http| format!(" http={http}")).unwrap_or_default();
    print_flush(&format!("{} ready rpc={address}{http} name={name} pid={}\n", PROGRAM.name, id()));
    tracing::info!(%address, name, master = config.master, "ready");
    let signal = runtime.block_on(signals.next());
    tracing::info!(signal, dummy_clients = daemon.dummy_clients(), "stopping");
    daemon.close();
    Ok(())
}

/// The bound addresses, for callers that asked for free ports.
fn bound(daemon: &Daemon) -> Value {
    json!({
        "pid": id(),
        "rpc": daemon.address().to_string(),
        "rpc_port": daemon.address().port(),
        "name": daemon.client().name(),
        "http": daemon.http_address().map(|address| address.to_string()),
        "http_port": daemon.http_address().map(|address| address.port()),
    })
}
