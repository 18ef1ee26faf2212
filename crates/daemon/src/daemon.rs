//! A running daemon: one client of its own, which lends the memory, and the relay for guests.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use mooncake_base::{Clock, Endpoint, Result, SystemClock, TenantId};
use mooncake_proto::native_frame::DaemonGreeting;
use mooncake_store_client::{
    Client, ClientConfig, HttpServer, LinkConfig, SocketLink, address::host_facing,
};
use mooncake_transfer_engine::{Engine, EngineConfig};
use mooncake_transfer_tools::settings::engine_config;
use tokio::runtime::Handle;

use crate::{
    config::DaemonConfig,
    environment,
    listeners::Listeners,
    relay::{Relay, RelaySettings},
};

/// The most connections to the master that guests share.
const CONNECTIONS_MAX: usize = 256;

/// Where its HTTP server listens.
const HTTP_HOST: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

/// How long the engine may wait for a metadata server when it ends.
const ENGINE_CLOSE_MAX: Duration = Duration::from_secs(1);

/// A daemon that serves. Closed when dropped.
#[derive(Debug)]
pub struct Daemon {
    relay: Relay,
    http: Option<HttpServer>,
    client: Client,
    engine: Engine,
}

impl Daemon {
    /// Joins the pool, lends the memory, and serves guests. Blocks; not to be called from a task.
    ///
    /// # Errors
    /// The port is taken, the master or the metadata server cannot be reached or refuses, or there
    /// is no memory. Nothing is left behind.
    pub fn start(config: &DaemonConfig, runtime: Handle) -> Result<Self> {
        let listeners = Listeners::bind(config.port)?;
        let name = advertised_name(config, listeners.address().port())?;
        let settings = EngineConfig {
            copies_own: environment::copies_own(),
            ..engine_config(&name, &config.metadata, None)?
        };
        let is_p2p = settings.is_p2p();
        let engine = Engine::start(settings, runtime.clone())?;
        let tenant = TenantId::new(&config.tenant);
        let own = ClientConfig {
            // Peer to peer the engine finds a port and names itself by it.
            name: if is_p2p { String::new() } else { name },
            tenant: tenant.clone(),
            segment_bytes: config.segment.bytes(),
            ..environment::client()?
        };
        let rpc_timeout = own.rpc_timeout;
        let to_master = environment::link()?;
        let link = Arc::new(SocketLink::new(&config.master, to_master.clone())?);
        let client = Client::connect(own, engine.clone(), link)?;
        let to_master = LinkConfig { connections_max: CONNECTIONS_MAX, ..to_master };
        let name = client.name().to_owned();
        let relay = Relay::start(
            listeners,
            RelaySettings {
                link: Arc::new(SocketLink::new(&config.master, to_master)?),
                host: name.parse::<Endpoint>()?.host,
                daemon: DaemonGreeting { name, metadata: config.metadata.clone() },
                tenant,
                rpc_timeout,
            },
        )?;
        let serve = |port| client.serve_with(HTTP_HOST, port, &runtime, relay.metrics());
        let http = config.http().map(serve).transpose()?;
        Ok(Self { relay, http, client, engine })
    }

    /// Where its health and metrics are shown, if anywhere.
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http.as_ref().map(HttpServer::address)
    }

    /// Where processes of this host connect.
    pub fn address(&self) -> SocketAddr {
        self.relay.address()
    }

    /// The daemon's own client, which lends the memory: what it has done is what the daemon reports.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// How many processes it serves.
    pub fn dummy_clients(&self) -> usize {
        self.relay.dummy_clients()
    }

    /// Takes the memory out of the pool and ends. Closing again does nothing.
    pub fn close(&self) {
        self.relay.stop();
        self.client.close();
        self.engine.close(SystemClock.now() + ENGINE_CLOSE_MAX);
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.close();
    }
}

/// The name that peers know this host by; with a metadata server, where it must be nobody else's,
/// with a port.
fn advertised_name(config: &DaemonConfig, port: u16) -> Result<String> {
    let host = match config.host.as_str() {
        "" | "0.0.0.0" | "::" | "[::]" => {
            host_facing(&config.master).unwrap_or_else(|| Ipv4Addr::LOCALHOST.to_string())
        }
        host => host.to_owned(),
    };
    Ok(host.parse::<Endpoint>()?.or_port(port).to_string())
}
