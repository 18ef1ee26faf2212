//! A running daemon: its own client, which lends memory, and the relay for dummy clients.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use mooncake_base::{Clock, Endpoint, Result, SystemClock, TenantId};
use mooncake_proto::native_frame::DaemonGreeting;
use mooncake_settings::{
    client_config, disks_of_environment, link_config, store_engine_config, use_rdma_for_store,
};
use mooncake_store_client::{
    Client, ClientConfig, HttpServer, LinkConfig, address::host_facing, open_link,
};
use mooncake_transfer_engine::Engine;
use tokio::runtime::Handle;

use crate::{
    config::DaemonConfig,
    limits::RelayLimits,
    listeners::Listeners,
    relay::{Relay, RelaySettings},
};

/// Maximum connections to the master, shared by all dummy clients.
const CONNECTIONS_MAX: usize = 256;

/// Listen address of the HTTP server.
const HTTP_HOST: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

/// Time limit for the metadata server while the engine closes.
const ENGINE_CLOSE_MAX: Duration = Duration::from_secs(1);

/// A running daemon. Closed when dropped.
#[derive(Debug)]
pub struct Daemon {
    relay: Relay,
    http: Option<HttpServer>,
    client: Client,
    engine: Engine,
}

impl Daemon {
    /// Joins the pool, mounts memory and serves dummy clients. Blocks, so must not be called from
    /// an async task.
    ///
    /// # Errors
    /// The port is taken, the master or the metadata server cannot be reached or refuses, or the
    /// memory cannot be allocated. Nothing is left behind.
    pub fn start(config: &DaemonConfig, runtime: Handle) -> Result<Self> {
        let listeners = Listeners::bind(config.port)?;
        let name = advertised_name(config, listeners.address().port())?;
        let mut settings = store_engine_config(&name, &config.metadata, None)?;
        use_rdma_for_store(&mut settings, config.rdma_devices())?;
        let is_p2p = settings.is_p2p();
        let engine = Engine::start(settings, runtime.clone())?;
        let tenant = TenantId::new(&config.tenant);
        let own = ClientConfig {
            // In peer-to-peer mode, the engine chooses a port and includes it in its name.
            name: if is_p2p { String::new() } else { name },
            tenant: tenant.clone(),
            // As upstream's daemon, which joins any master.
            refuses_ignored_tenant: false,
            segment_bytes: config.segment.bytes(),
            disks: if config.has_offload { disks_of_environment()? } else { Vec::new() },
            ..client_config()?
        };
        let rpc_timeout = own.rpc_timeout;
        let to_master = link_config()?;
        let link = open_link(&config.master, to_master.clone())?;
        let client = Client::connect(own, engine.clone(), link)?;
        let to_master =
            LinkConfig { connections_max: CONNECTIONS_MAX, passes_on_calls: true, ..to_master };
        let name = client.name().to_owned();
        let relay = Relay::start(
            listeners,
            RelaySettings {
                limits: RelayLimits {
                    own_user_only: config.is_unix_only,
                    ..RelayLimits::default()
                },
                link: open_link(&config.master, to_master)?,
                host: name.parse::<Endpoint>()?.host,
                daemon: DaemonGreeting { name, metadata: config.metadata.clone() },
                tenant,
                rpc_timeout,
            },
        )?;
        let serve = |port| client.serve_with(HTTP_HOST, port, &runtime, relay.metrics());
        let http = config.http().map(serve).transpose();
        let http = http.map_err(|error| error.with("option", "--http_port"))?;
        Ok(Self { relay, http, client, engine })
    }

    /// The address of the HTTP server, if enabled.
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http.as_ref().map(HttpServer::address)
    }

    /// The address for processes of this host.
    pub fn address(&self) -> SocketAddr {
        self.relay.address()
    }

    /// The daemon's own client, which lends the memory and whose metrics the daemon reports.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The number of dummy clients.
    pub fn dummy_clients(&self) -> usize {
        self.relay.dummy_clients()
    }

    /// Stops serving and leaves the pool. Idempotent.
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

/// Returns the name under which peers know this host. It includes a port, since a metadata server
/// requires unique names.
fn advertised_name(config: &DaemonConfig, port: u16) -> Result<String> {
    let host = match config.host.as_str() {
        "" | "0.0.0.0" | "::" | "[::]" => {
            host_facing(&config.master).unwrap_or_else(|| Ipv4Addr::LOCALHOST.to_string())
        }
        host => host.to_owned(),
    };
    Ok(host.parse::<Endpoint>()?.or_port(port).to_string())
}
