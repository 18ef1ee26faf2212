//! The data listener: serves our memory to peers, on tokio, in both protocols.

mod connection;
mod established_side;
mod own_side;

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use mooncake_base::{EngineId, Result};
use socket2::SockRef;
use tokio::{runtime::Handle, time::Instant};

use self::connection::{Connection, Pace};
use super::{
    frame::{GREETING_BYTES, Greeting, MAGIC, VERSION},
    lane::tune,
};
use crate::{
    handshake::acceptor::{Accepted, Acceptor, Surplus},
    region::Regions,
};

/// How a data listener behaves.
#[derive(Debug, Clone)]
pub struct TcpServerSettings {
    /// Who we are. A peer that learned of another engine at this address is turned away, so that
    /// it does not touch memory of a process that took the place of the one it means.
    pub engine: Option<EngineId>,
    /// The most connections at a time; more are closed at once.
    pub connections_max: usize,
    /// How long a request under way may stand still before its connection is closed, since it
    /// keeps memory from being unregistered.
    pub progress_timeout: Duration,
}

impl Default for TcpServerSettings {
    fn default() -> Self {
        Self { engine: None, connections_max: 8192, progress_timeout: Duration::from_secs(30) }
    }
}

/// A running data listener. Dropping it closes it.
#[derive(Debug)]
pub struct TcpServer {
    acceptor: Acceptor,
}

#[derive(Debug)]
struct Shared {
    regions: Arc<Regions>,
    settings: TcpServerSettings,
}

impl TcpServer {
    /// Serves the listener out of `regions`.
    ///
    /// # Errors
    /// The listener cannot be handed to the runtime.
    pub fn start(
        listener: std::net::TcpListener,
        regions: Arc<Regions>,
        settings: TcpServerSettings,
        runtime: &Handle,
    ) -> Result<Self> {
        let limit = (settings.connections_max, Surplus::Close);
        let shared = Arc::new(Shared { regions, settings });
        let serve = move |accepted| serve(accepted, Arc::clone(&shared));
        Ok(Self { acceptor: Acceptor::start(listener, limit, runtime, serve)? })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.acceptor.address()
    }

    /// Stops listening and ends every connection. Idempotent, at most 0.2 s.
    pub fn close(&self) {
        self.acceptor.close();
    }
}

async fn serve(accepted: Accepted, shared: Arc<Shared>) -> io::Result<()> {
    tune(SockRef::from(&accepted.stream))?;
    let mut connection = Connection::new(accepted);
    // Whoever connects wants something; idle is a connection only after its first request.
    let pace = Pace::until(Instant::now() + shared.settings.progress_timeout);
    let mut first = [0; 8];
    connection.read(&mut first, pace).await?;
    if first != MAGIC {
        return established_side::serve(connection, &shared, first).await;
    }
    let mut greeting = [0; GREETING_BYTES];
    greeting[..8].copy_from_slice(&first);
    connection.read(&mut greeting[8..], pace).await?;
    let theirs = Greeting::decode(&greeting)?;
    let engine = shared.settings.engine.map_or(0, EngineId::bits);
    connection.wire.extend_from_slice(&Greeting { version: VERSION, engine }.encode());
    connection.send(pace).await?;
    let is_meant = theirs.engine == 0 || engine == 0 || theirs.engine == engine;
    if theirs.version != VERSION || !is_meant {
        return Ok(()); // our greeting has told the peer why
    }
    own_side::serve(connection, &shared).await
}
