//! The whole program: arguments, log, runtime, signals, exit code. The binary and the Python
//! package both call [`run`].

use std::{io::Write as _, process::id};

use mooncake_base::{Error, Result, env, options::help};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{
    runtime::{Builder, Runtime},
    signal::unix::{SignalKind, signal},
};
use tracing_subscriber::EnvFilter;

use crate::{
    config::{Asked, DaemonConfig, OPTIONS, from_arguments},
    daemon::Daemon,
    ports::PortsFile,
};

const PROGRAM: &str = "mooncake_client";
const PURPOSE: &str =
    "lends memory to the pool, and is the way to it of the processes of this host";

/// Threads that answer peers which reach the memory over TCP.
const WORKERS: usize = 4;

/// Runs the program with these arguments (without its own name) and returns its exit code: 0 after
/// SIGTERM, SIGINT, `--help` or `--version`, 1 after an error.
///
/// Must not be called from within a tokio runtime.
pub fn run(arguments: Vec<String>) -> u8 {
    let config = match from_arguments(arguments) {
        Ok(Asked::Serve(config)) => config,
        Ok(Asked::Help) => return say(&help(OPTIONS, PROGRAM, PURPOSE)),
        Ok(Asked::Version) => return say(&format!("{PROGRAM} {}\n", env!("CARGO_PKG_VERSION"))),
        Err(error) => return fail(&error),
    };
    install_log();
    for warning in config.warnings() {
        tracing::warn!("{warning}");
    }
    raise_descriptors();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let runtime = Builder::new_multi_thread()
        .worker_threads(cores.clamp(1, WORKERS))
        .thread_name("mooncake-io")
        .enable_all()
        .build();
    let served = match runtime {
        Ok(runtime) => serve(&config, &runtime),
        Err(source) => {
            Err(Error::internal("the threads of the daemon cannot start").caused_by(source))
        }
    };
    match served {
        Ok(()) => 0,
        Err(error) => fail(&error),
    }
}

/// Serves until a signal asks to end.
fn serve(config: &DaemonConfig, runtime: &Runtime) -> Result<()> {
    let failed = |source| Error::internal("signals cannot be waited for").caused_by(source);
    // Before anything is announced, so that no signal finds us without a handler.
    let (mut terminate, mut interrupt) = {
        let _inside = runtime.enter();
        (
            signal(SignalKind::terminate()).map_err(failed)?,
            signal(SignalKind::interrupt()).map_err(failed)?,
        )
    };
    let daemon = Daemon::start(config, runtime.handle().clone())?;
    let _ports = PortsFile::write(&config.ports_file, &daemon)?;
    let (address, name) = (daemon.address(), daemon.client().name());
    let http = daemon.http_address().map(|http| format!(" http={http}")).unwrap_or_default();
    say(&format!("{PROGRAM} ready rpc={address}{http} name={name} pid={}\n", id()));
    tracing::info!(%address, name, master = config.master, "ready");
    let signal = runtime.block_on(async {
        tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        }
    });
    tracing::info!(signal, guests = daemon.guests(), "stopping");
    daemon.close();
    Ok(())
}

/// Takes as many descriptors as the process may have: a guest needs up to seventeen.
fn raise_descriptors() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        tracing::warn!(%error, ?current, "the limit of descriptors cannot be raised");
    }
}

/// Our log goes to stderr, unless the process has one already (inside Python it may).
fn install_log() {
    let level = env::MC_LOG_LEVEL.read();
    let level = level_of(level.as_deref().unwrap_or(env::MC_LOG_LEVEL.default));
    let filter = match env::MOONCAKE_LOG.read().filter(|text| !text.is_empty()) {
        Some(text) => EnvFilter::try_new(&text).unwrap_or_else(|_| EnvFilter::new(level)),
        None => EnvFilter::new(level),
    };
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .try_init();
}

fn level_of(text: &str) -> &'static str {
    match text.trim().to_ascii_lowercase().as_str() {
        "trace" => "trace",
        "debug" => "debug",
        "info" | "0" => "info",
        "error" | "fatal" | "2" | "3" => "error",
        _ => "warn",
    }
}

fn say(text: &str) -> u8 {
    let mut stdout = std::io::stdout().lock();
    // A closed stdout is the reader's choice; the daemon serves all the same.
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    0
}

fn fail(error: &Error) -> u8 {
    let _ = writeln!(std::io::stderr().lock(), "ERROR: {error}");
    1
}
