//! Settings of a store: arguments override the environment, which overrides defaults.

use std::time::Duration;

use mooncake_base::{Endpoint, Error, Result, TenantId, Token};
use mooncake_master::MasterConfig;
use mooncake_settings::{
    client_config, disk_at, disks_of_environment, link_config, store_engine_config,
    use_rdma_for_store,
};
use mooncake_store_client::{
    ClientConfig, DaemonGreeting, DiskConfig, LinkConfig, PrefetchConfig, address::set_engine_host,
};
use mooncake_transfer_engine::EngineConfig;

/// The master address that asks for a master in this process.
pub(crate) const EMBEDDED: &str = "embedded";

/// Default listen address of an embedded master, and of the engine of a dummy client.
const LOOPBACK: &str = "127.0.0.1";

/// Arguments of `Store.connect`. An empty name or listen address is chosen automatically.
#[derive(Debug)]
pub(crate) struct Arguments {
    pub(crate) master: String,
    pub(crate) name: String,
    pub(crate) metadata: String,
    pub(crate) segment_bytes: u64,
    pub(crate) tenant: String,
    pub(crate) refuses_ignored_tenant: bool,
    /// Directories for copies of objects, with their capacities. An empty path stands for those that
    /// the environment names.
    pub(crate) disks: Vec<(String, Option<u64>)>,
    pub(crate) is_tcp_forced: Option<bool>,
    /// RDMA devices as for [`use_rdma_for_store`].
    pub(crate) rdma_devices: Option<String>,
    pub(crate) rpc_timeout_s: Option<f64>,
    pub(crate) connect_timeout_s: Option<f64>,
    pub(crate) transfer_timeout_s: Option<f64>,
    pub(crate) retry_s: Option<f64>,
    pub(crate) fails_as_upstream: bool,
    pub(crate) listen: String,
    pub(crate) has_checksums: Option<bool>,
    /// Port of the client's HTTP server; `None` disables it.
    pub(crate) http_port: Option<u16>,
    /// Token of the master; `None` uses the environment.
    pub(crate) token: Option<String>,
    pub(crate) prefetch: Option<PrefetchArguments>,
}

/// Whether probes may prefetch, and seconds: for which an object is not asked for again, for which it
/// is not after a failure, and for which a read waits.
pub(crate) type PrefetchArguments = (bool, f64, f64, f64);

/// Arguments of `Store.connect_daemon`; the daemon supplies the other settings.
#[derive(Debug, Default)]
pub(crate) struct DummyArguments {
    pub(crate) is_tcp_forced: Option<bool>,
    pub(crate) rpc_timeout_s: Option<f64>,
    pub(crate) connect_timeout_s: Option<f64>,
    pub(crate) transfer_timeout_s: Option<f64>,
    pub(crate) retry_s: Option<f64>,
    pub(crate) fails_as_upstream: bool,
    pub(crate) has_checksums: Option<bool>,
    pub(crate) http_port: Option<u16>,
}

/// Settings of each component.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) master: String,
    pub(crate) engine: EngineConfig,
    pub(crate) client: ClientConfig,
    pub(crate) link: LinkConfig,
    pub(crate) embedded: MasterConfig,
    pub(crate) http_port: Option<u16>,
}

impl Settings {
    /// Reads the settings.
    ///
    /// # Errors
    /// A value of the caller or the environment is invalid.
    pub(crate) fn read(arguments: Arguments) -> Result<Self> {
        let mut engine =
            store_engine_config(&arguments.name, &arguments.metadata, arguments.is_tcp_forced)?;
        use_rdma_for_store(&mut engine, arguments.rdma_devices.as_deref())?;
        set_engine_host(&mut engine, master_address(&arguments));
        let disks = disks(arguments.disks)?;
        let has_offload = !disks.is_empty();
        let mut client = ClientConfig {
            name: arguments.name,
            tenant: TenantId::new(&arguments.tenant),
            refuses_ignored_tenant: arguments.refuses_ignored_tenant,
            disks,
            awaits_master: !arguments.fails_as_upstream,
            reports_lost_holders: arguments.fails_as_upstream,
            segment_bytes: arguments.segment_bytes,
            ..client_config()?
        };
        if let Some(has_checksums) = arguments.has_checksums {
            client.has_checksums = has_checksums;
        }
        if let Some(given) = arguments.prefetch {
            client.prefetch = prefetch(given)?;
        }
        if let Some(timeout) = seconds("rpc_timeout_s", arguments.rpc_timeout_s)? {
            client.rpc_timeout = timeout;
        }
        if let Some(timeout) = seconds("transfer_timeout_s", arguments.transfer_timeout_s)? {
            client.transfer_timeout = timeout;
        }
        if let Some(patience) = arguments.retry_s {
            client.retry_patience = Duration::try_from_secs_f64(patience).map_err(|_| {
                let text = "the time for repetitions must be 0 seconds or more";
                Error::invalid(text).with("retry_s", patience)
            })?;
        }
        let mut link = link(arguments.connect_timeout_s)?;
        if let Some(token) = &arguments.token {
            link.token = Some(Token::new(token)?);
        }
        client.disk_token.clone_from(&link.token);
        // This process calls an embedded master without a socket. Others need the token.
        let rpc_token = link.token.clone();
        let embedded = MasterConfig { rpc_token, has_offload, ..embedded(&arguments.listen)? };
        let http_port = arguments.http_port;
        Ok(Self { master: arguments.master, engine, client, link, embedded, http_port })
    }

    /// Returns the settings of a dummy client of that daemon. Its engine moves bytes for this
    /// process only: it listens on loopback and is not registered with a metadata server.
    ///
    /// # Errors
    /// A value of the caller or the environment is invalid.
    pub(crate) fn dummy(daemon: &DaemonGreeting, arguments: &DummyArguments) -> Result<Self> {
        let mut settings = Self::read(Arguments {
            master: String::new(),
            name: LOOPBACK.to_owned(),
            metadata: daemon.metadata.clone(),
            segment_bytes: 0,
            // The daemon supplies the tenant.
            tenant: String::new(),
            refuses_ignored_tenant: true,
            disks: Vec::new(),
            is_tcp_forced: arguments.is_tcp_forced,
            // It reaches memory of its own host only.
            rdma_devices: None,
            rpc_timeout_s: arguments.rpc_timeout_s,
            connect_timeout_s: arguments.connect_timeout_s,
            transfer_timeout_s: arguments.transfer_timeout_s,
            retry_s: arguments.retry_s,
            fails_as_upstream: arguments.fails_as_upstream,
            listen: String::new(),
            has_checksums: arguments.has_checksums,
            http_port: arguments.http_port,
            token: None,
            prefetch: None,
        })?;
        settings.engine = EngineConfig {
            name: LOOPBACK.to_owned(),
            bind_address: None,
            is_port_fixed: false,
            is_unpublished: true,
            ..settings.engine
        };
        settings.client.name.clone_from(&daemon.name);
        Ok(settings)
    }
}

/// Returns the settings of a link, with the given connection timeout if there is one.
///
/// # Errors
/// A value of the caller or the environment is invalid.
pub(crate) fn link(connect_timeout_s: Option<f64>) -> Result<LinkConfig> {
    let mut link = link_config()?;
    if let Some(timeout) = seconds("connect_timeout_s", connect_timeout_s)? {
        link.connect_timeout = timeout;
    }
    Ok(link)
}

fn prefetch(given: PrefetchArguments) -> Result<PrefetchConfig> {
    let (is_enabled, dedup_ttl, cooldown, get_wait) = given;
    let time = |name: &'static str, seconds: f64| {
        Duration::try_from_secs_f64(seconds)
            .map_err(|_| Error::invalid("a time must be 0 seconds or more").with(name, seconds))
    };
    Ok(PrefetchConfig {
        is_enabled,
        dedup_ttl: time("dedup_ttl_s", dedup_ttl)?,
        cooldown: time("cooldown_s", cooldown)?,
        get_wait: time("get_wait_s", get_wait)?,
    })
}

fn disks(given: Vec<(String, Option<u64>)>) -> Result<Vec<DiskConfig>> {
    let mut disks = Vec::with_capacity(given.len());
    for (path, capacity) in given {
        if path.is_empty() {
            disks.append(&mut disks_of_environment()?);
        } else {
            disks.push(disk_at(&path, capacity)?);
        }
    }
    Ok(disks)
}

/// Returns the address of the master as far as it is known yet.
fn master_address(arguments: &Arguments) -> &str {
    match arguments.master.as_str() {
        EMBEDDED if arguments.listen.is_empty() => LOOPBACK,
        EMBEDDED => &arguments.listen,
        address => address,
    }
}

fn embedded(listen: &str) -> Result<MasterConfig> {
    let mut config = MasterConfig::embedded();
    if !listen.is_empty() {
        let endpoint: Endpoint = listen.parse()?;
        config.rpc_port = Some(endpoint.port.unwrap_or(0));
        config.rpc_address = endpoint.host;
    }
    Ok(config)
}

/// Reads a timeout.
///
/// # Errors
/// It is no positive number.
pub(crate) fn seconds(name: &'static str, seconds: Option<f64>) -> Result<Option<Duration>> {
    let Some(seconds) = seconds else { return Ok(None) };
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if !duration.is_zero() => Ok(Some(duration)),
        _ => {
            let text = "a timeout is a positive number of seconds; no call answers in no time";
            Err(Error::invalid(text).with(name, seconds))
        }
    }
}
