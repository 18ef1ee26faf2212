//! What a store is told when it opens: arguments over environment over defaults.

use std::time::Duration;

use mooncake_base::{Endpoint, Error, Result, TenantId};
use mooncake_daemon::environment;
use mooncake_master::MasterConfig;
use mooncake_store_client::{ClientConfig, DaemonGreeting, LinkConfig, address::face_master};
use mooncake_transfer_engine::EngineConfig;
use mooncake_transfer_tools::settings::engine_config;

/// The word that asks for a master in this process.
pub(crate) const EMBEDDED: &str = "embedded";

/// Where an embedded master listens if it was not told, and the engine of a guest.
const LOOPBACK: &str = "127.0.0.1";

/// What the caller says of a store. An empty name or listen address leaves the choice to us.
#[derive(Debug)]
pub(crate) struct Arguments {
    pub(crate) master: String,
    pub(crate) name: String,
    pub(crate) metadata: String,
    pub(crate) segment_bytes: u64,
    pub(crate) tenant: String,
    pub(crate) is_tcp_forced: Option<bool>,
    pub(crate) rpc_timeout_s: Option<f64>,
    pub(crate) connect_timeout_s: Option<f64>,
    pub(crate) listen: String,
    pub(crate) has_checksums: Option<bool>,
    /// Where the client's HTTP server listens; none: nowhere.
    pub(crate) http_port: Option<u16>,
}

/// What the caller says of a guest; the rest its daemon does.
#[derive(Debug, Default)]
pub(crate) struct DummyArguments {
    pub(crate) is_tcp_forced: Option<bool>,
    pub(crate) rpc_timeout_s: Option<f64>,
    pub(crate) connect_timeout_s: Option<f64>,
    pub(crate) has_checksums: Option<bool>,
    pub(crate) http_port: Option<u16>,
}

/// The settings of each part.
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
    /// # Errors
    /// A value, from the caller or the environment, that cannot be.
    pub(crate) fn read(arguments: Arguments) -> Result<Self> {
        let mut engine =
            engine_config(&arguments.name, &arguments.metadata, arguments.is_tcp_forced)?;
        engine.copies_own = environment::copies_own();
        face_master(&mut engine, master_address(&arguments));
        let mut client = ClientConfig {
            name: arguments.name,
            tenant: TenantId::new(&arguments.tenant),
            segment_bytes: arguments.segment_bytes,
            ..environment::client()?
        };
        if let Some(has_checksums) = arguments.has_checksums {
            client.has_checksums = has_checksums;
        }
        if let Some(timeout) = seconds("rpc_timeout_s", arguments.rpc_timeout_s)? {
            client.rpc_timeout = timeout;
        }
        let link = link(arguments.connect_timeout_s)?;
        let embedded = embedded(&arguments.listen)?;
        let http_port = arguments.http_port;
        Ok(Self { master: arguments.master, engine, client, link, embedded, http_port })
    }

    /// Those of a guest of that daemon. Its engine moves bytes for itself alone: it listens on
    /// loopback only, and nobody is told of it.
    ///
    /// # Errors
    /// A value, from the caller or the environment, that cannot be.
    pub(crate) fn dummy(daemon: &DaemonGreeting, arguments: &DummyArguments) -> Result<Self> {
        let mut settings = Self::read(Arguments {
            master: String::new(),
            name: LOOPBACK.to_owned(),
            metadata: daemon.metadata.clone(),
            segment_bytes: 0,
            // The daemon says whose keys they are.
            tenant: String::new(),
            is_tcp_forced: arguments.is_tcp_forced,
            rpc_timeout_s: arguments.rpc_timeout_s,
            connect_timeout_s: arguments.connect_timeout_s,
            listen: String::new(),
            has_checksums: arguments.has_checksums,
            http_port: arguments.http_port,
        })?;
        settings.engine = EngineConfig {
            name: LOOPBACK.to_owned(),
            bind_address: None,
            is_port_fixed: false,
            is_guest: true,
            ..settings.engine
        };
        settings.client.name.clone_from(&daemon.name);
        Ok(settings)
    }
}

/// Those of a link that may take so long to come about.
///
/// # Errors
/// A value, from the caller or the environment, that cannot be.
pub(crate) fn link(connect_timeout_s: Option<f64>) -> Result<LinkConfig> {
    let mut link = environment::link()?;
    if let Some(timeout) = seconds("connect_timeout_s", connect_timeout_s)? {
        link.connect_timeout = timeout;
    }
    Ok(link)
}

/// Where the master is, as far as that is known yet.
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

fn seconds(name: &'static str, seconds: Option<f64>) -> Result<Option<Duration>> {
    let Some(seconds) = seconds else { return Ok(None) };
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if !duration.is_zero() => Ok(Some(duration)),
        _ => Err(Error::invalid("a time-out is a positive number of seconds").with(name, seconds)),
    }
}
