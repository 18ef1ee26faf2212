//! The whole program: arguments, log, runtime, signals, exit code. The binary and the Python
//! package both call [`run`].

use std::{io::Write as _, path::PathBuf, process::id};

use mooncake_base::{Error, Result, env};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::EnvFilter;

use crate::{
    addresses::Addresses,
    config::{Asked, MasterConfig, from_arguments, help},
    descriptors,
    master::start,
    ports::PortsFile,
    service::VERSION,
};

const PROGRAM: &str = "mooncake_master";

/// Runs the program with these arguments (without its own name) and returns its exit code: 0 after
/// SIGTERM, SIGINT, `--help` or `--version`, 1 after an error.
///
/// Must not be called from within a tokio runtime.
pub fn run(arguments: Vec<String>) -> u8 {
    let config = match from_arguments(arguments) {
        Ok(Asked::Serve(config)) => config,
        Ok(Asked::Help) => return say(&help::text(PROGRAM)),
        Ok(Asked::Version) => return say(&format!("{PROGRAM} {VERSION}\n")),
        Err(error) => return fail(&error),
    };
    install_log();
    for warning in config.warnings() {
        tracing::warn!("{warning}");
    }
    descriptors::raise();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(config.effective_threads(cores))
        .thread_name("mooncake-master")
        .enable_all()
        .build();
    let served = match runtime {
        Ok(runtime) => runtime.block_on(serve(*config)),
        Err(source) => {
            Err(Error::internal("the threads of the master cannot start").caused_by(source))
        }
    };
    match served {
        Ok(()) => 0,
        Err(error) => fail(&error),
    }
}

/// Serves until a signal asks to end.
async fn serve(config: MasterConfig) -> Result<()> {
    // Before anything is announced, so that no signal finds us without a handler.
    let mut terminate = on(SignalKind::terminate())?;
    let mut interrupt = on(SignalKind::interrupt())?;
    let mut config = config;
    config.state_home = state_home();
    let ports_file = config.ports_file.clone();
    let master = start(config).await?;
    let _ports = PortsFile::write(&ports_file, master.addresses())?;
    say(&format!("{}\n", ready_line(master.addresses())));
    tracing::info!(version = VERSION, addresses = ?master.addresses(), "ready");
    let name = tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    };
    tracing::info!(signal = name, "stopping");
    master.stop().await;
    Ok(())
}

/// Where the user keeps state that is worth keeping over a restart.
fn state_home() -> Option<PathBuf> {
    let named = |variable: &env::EnvVar| {
        variable.read().map(PathBuf::from).filter(|path| path.is_absolute())
    };
    named(&env::XDG_STATE_HOME).or_else(|| Some(named(&env::HOME)?.join(".local/state")))
}

/// The one line that tells a person or a script where the master listens.
fn ready_line(addresses: &Addresses) -> String {
    let mut line = format!("{PROGRAM} ready rpc={}", addresses.rpc);
    let others = [
        ("admin", addresses.admin),
        ("metadata", addresses.metadata),
        ("events", addresses.events),
    ];
    for (name, address) in others {
        if let Some(address) = address {
            line.push_str(&format!(" {name}={address}"));
        }
    }
    line.push_str(&format!(" pid={}", id()));
    line
}

fn on(kind: SignalKind) -> Result<Signal> {
    signal(kind).map_err(|source| Error::internal("signals cannot be waited for").caused_by(source))
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
    // A closed stdout is the reader's choice; the master serves all the same.
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    0
}

fn fail(error: &Error) -> u8 {
    let _ = writeln!(std::io::stderr().lock(), "ERROR: {error}");
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_a_level_is_read() {
        for (text, level) in [("INFO", "info"), ("1", "warn"), ("0", "info"), ("ERROR", "error")] {
            assert_eq!(level_of(text), level, "{text}");
        }
    }

    #[test]
    fn the_ready_line_names_what_is_bound_and_nothing_else() {
        let rpc = "127.0.0.1:1".parse().unwrap();
        let line = ready_line(&Addresses { rpc, admin: None, metadata: Some(rpc), events: None });
        assert!(
            line.starts_with("mooncake_master ready rpc=127.0.0.1:1 metadata=127.0.0.1:1 pid=")
        );
    }
}
