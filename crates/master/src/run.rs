//! The whole program: arguments, logging, runtime, signals, exit code. The binary and the Python
//! package both call [`run`].

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    process::id,
    time::Duration,
};

use mooncake_base::{Error, Result, env};
use mooncake_cli::{PortsFile, Program, Signals, log, print_flush, variables};
use tokio::runtime::{Builder, Handle};

use crate::{
    addresses::Addresses,
    cluster::promotable,
    config::{MasterConfig, from_arguments, help},
    master::{Master, start},
    rlimit,
    service::VERSION,
};

const PROGRAM: Program =
    Program { name: "mooncake_master", version: VERSION, error_prefix: "ERROR" };

/// How long threads that wait for the disk may take to end.
const SHUTDOWN_DEADLINE: Duration = Duration::from_secs(2);

/// Runs the program with the given arguments (without the program name) and returns its exit code:
/// 0 after SIGTERM, SIGINT, `--help` or `--version`, 1 after an error.
///
/// Must not be called from within a tokio runtime.
pub fn run(arguments: Vec<String>) -> u8 {
    PROGRAM.run(from_arguments(arguments), || help::text(PROGRAM.name), |config| work(*config))
}

fn work(config: MasterConfig) -> Result<()> {
    log::install();
    if !config.check_promotable.is_empty() {
        return promotable::check(&config.check_promotable);
    }
    variables::warn_of_invalid([&env::MC_LOG_LEVEL, &env::MOONCAKE_LOG, &env::MC_BUSY_POLL]);
    for warning in config.warnings() {
        tracing::warn!("{warning}");
    }
    rlimit::raise();
    let cores = mooncake_os::cpu_count();
    let runtime = Builder::new_multi_thread()
        .worker_threads(config.effective_threads(cores))
        .thread_name("mooncake-master")
        .enable_all()
        .build()
        .map_err(|source| {
            Error::internal("cannot start the threads of the master").caused_by(source)
        })?;
    let ended = runtime.block_on(serve(config));
    // A thread that waits for the disk must not keep the program from its end.
    runtime.shutdown_timeout(SHUTDOWN_DEADLINE);
    ended
}

/// Serves until a signal ends the program.
async fn serve(config: MasterConfig) -> Result<()> {
    let mut signals = Signals::new(&Handle::current())?;
    let mut config = config;
    config.state_home = state_home();
    let ports_file = config.ports_file.clone();
    let master = start(config).await?;
    let _ports = PortsFile::write(&ports_file, &master.addresses().to_json())?;
    print_flush(&format!("{}\n", ready_line(master.addresses())));
    tracing::info!(version = VERSION, addresses = ?master.addresses(), "ready");
    serve_until(master, signals.next()).await
}

/// Serves until `signal` comes.
///
/// # Errors
/// The error that has ended the service.
async fn serve_until(master: Master, signal: impl Future<Output = &'static str>) -> Result<()> {
    let ended = tokio::select! {
        signal = signal => {
            tracing::info!(signal, "stopping");
            Ok(())
        }
        error = master.ended() => Err(error),
    };
    master.stop().await;
    ended
}

/// Returns the user's directory for persistent state.
fn state_home() -> Option<PathBuf> {
    let named = |variable: &env::EnvVar| {
        variable.read().map(PathBuf::from).filter(|path| path.is_absolute())
    };
    named(&env::XDG_STATE_HOME).or_else(|| Some(named(&env::HOME)?.join(".local/state")))
}

/// Formats the ready line, with the addresses that the master listens on.
fn ready_line(addresses: &Addresses) -> String {
    let mut line = format!("{} ready rpc={}", PROGRAM.name, addresses.rpc);
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
    if let Some(admin) = addresses.admin {
        line.push_str(&format!(" page=http://{}/", reachable(admin)));
    }
    line.push_str(&format!(" pid={}", id()));
    line
}

/// Returns an address that a browser on this host can open.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

#[cfg(test)]
mod tests {
    use mooncake_base::ErrorCode;

    use super::*;
    use crate::config::StateDir;

    #[tokio::test]
    async fn panic_inside_state_ends_program_with_error() {
        let config = MasterConfig { state_dir: StateDir::None, ..MasterConfig::embedded() };
        let master = start(config).await.unwrap();
        let service = master.service();
        let panicked = std::thread::spawn(move || service.panic_inside_state()).join();
        panicked.expect_err("it panics");
        let error = serve_until(master, std::future::pending()).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::INTERNAL_ERROR);
        assert!(error.to_string().contains("clients keep running"), "{error}");
    }

    #[test]
    fn ready_line_names_only_bound_addresses() {
        let rpc = "127.0.0.1:1".parse().unwrap();
        let line = ready_line(&Addresses { rpc, admin: None, metadata: Some(rpc), events: None });
        assert!(
            line.starts_with("mooncake_master ready rpc=127.0.0.1:1 metadata=127.0.0.1:1 pid=")
        );
        let admin = Some("0.0.0.0:9003".parse().unwrap());
        let line = ready_line(&Addresses { rpc, admin, metadata: None, events: None });
        assert!(line.contains(" admin=0.0.0.0:9003 page=http://127.0.0.1:9003/ pid="), "{line}");
    }
}
