//! The data listener: serves this engine's memory to peers in both protocols, on tokio.

mod compat;
mod connection;
mod dedicated_thread;
mod native;
mod pins;

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use mooncake_base::{EngineId, Result};
use mooncake_os::cpu_count;
use socket2::SockRef;
use tokio::{runtime::Handle, sync::Semaphore, time::Instant};

use self::{
    connection::{Connection, RequestTimeout},
    pins::PinTable,
};
use super::{
    greeting::{CLAIM_BYTES, GREETING_BYTES, Greeting, MAGIC, TokenClaim, VERSION, Verdict},
    socket_options::set_socket_options,
};
use crate::{
    acceptor::{Accepted, Acceptor, OverflowPolicy},
    memory::region::{Region, Regions},
    metrics::{PoolSnapshot, Refusals},
    token::{self, Channel, Token},
};

/// The settings of a data listener.
#[derive(Debug, Clone)]
pub struct TcpServerSettings {
    /// The id of this engine. A peer that expects another engine at this address is refused, so
    /// that it does not access memory of a process that replaced the expected one.
    pub engine: Option<EngineId>,
    /// The maximum number of connections. Above it the oldest silent or waiting one gives way.
    pub connections_max: usize,
    /// The time in which a new connection must send its first bytes and its proof.
    pub greeting_timeout: Duration,
    /// The time without progress after which the connection of a request is closed, since the
    /// request keeps its memory from being unregistered.
    pub progress_timeout: Duration,
    /// The token that peers must prove to know. If set, upstream's frames, which cannot carry a
    /// proof, are refused.
    pub token: Option<Token>,
    /// Counts refused peers and ranges.
    pub refusals: Arc<Refusals>,
}

impl Default for TcpServerSettings {
    fn default() -> Self {
        Self {
            engine: None,
            connections_max: 8192,
            greeting_timeout: Duration::from_secs(5),
            progress_timeout: Duration::from_secs(30),
            token: None,
            refusals: Arc::default(),
        }
    }
}

/// A running data listener. Dropping it closes it.
#[derive(Debug)]
pub struct TcpServer {
    acceptor: Acceptor,
    shared: Arc<TcpServerShared>,
}

#[derive(Debug)]
struct TcpServerShared {
    regions: Arc<Regions>,
    settings: TcpServerSettings,
    /// One permit for each dedicated thread that is free.
    dedicated_threads: Arc<Semaphore>,
    pins: Arc<PinTable>,
}

impl TcpServer {
    /// Starts to serve `regions` on the listener.
    ///
    /// # Errors
    /// The listener cannot be handed to the runtime.
    pub fn start(
        listener: std::net::TcpListener,
        regions: Arc<Regions>,
        settings: TcpServerSettings,
        runtime: &Handle,
    ) -> Result<Self> {
        let limit = settings.connections_max;
        let shared = Arc::new(TcpServerShared {
            regions,
            settings,
            dedicated_threads: dedicated_thread::permits(cpu_count()),
            pins: Arc::default(),
        });
        let served = Arc::clone(&shared);
        let serve = move |accepted| serve(accepted, Arc::clone(&served));
        let acceptor = Acceptor::start(listener, limit, OverflowPolicy::Close, runtime, serve)?;
        Ok(Self { acceptor, shared })
    }

    /// Returns the number of connections that have a dedicated thread at the moment.
    #[cfg(test)]
    pub(super) fn dedicated_threads_in_use(&self) -> usize {
        let all = dedicated_thread::permits(cpu_count()).available_permits();
        all - self.shared.dedicated_threads.available_permits()
    }

    /// Returns the address of the listener.
    pub fn address(&self) -> SocketAddr {
        self.acceptor.address()
    }

    /// Returns the number of connections and their limit.
    pub fn connections(&self) -> PoolSnapshot {
        self.acceptor.load()
    }

    /// Closes every connection whose current request uses the region.
    pub(crate) fn cut_users(&self, region: &Arc<Region>) {
        self.shared.pins.cut_users(region);
    }

    /// Stops listening and closes every connection. Idempotent; takes at most 0.2 s.
    pub fn close(&self) {
        self.acceptor.close();
    }
}

async fn serve(accepted: Accepted, shared: Arc<TcpServerShared>) -> io::Result<()> {
    set_socket_options(SockRef::from(&accepted.stream))?;
    let mut connection = Connection::new(accepted, &shared.pins);
    // A new connection must send its first bytes in time; it may idle only after a request.
    let timeout = RequestTimeout::until(Instant::now() + shared.settings.greeting_timeout);
    let mut first = [0; 8];
    connection.read(&mut first, timeout).await?;
    if first != MAGIC && shared.settings.token.is_some() {
        shared.settings.refusals.compat.increment();
        return Err(io::Error::other("upstream's frames carry no token, and one is required"));
    }
    if first != MAGIC {
        return compat::serve(connection, &shared, first).await;
    }
    let mut greeting = [0; GREETING_BYTES];
    greeting[..8].copy_from_slice(&first);
    connection.read(&mut greeting[8..], timeout).await?;
    let theirs = Greeting::decode(&greeting)?;
    let engine = shared.settings.engine.map_or(0, EngineId::bits);
    let requires_token = shared.settings.token.is_some();
    let ours = Greeting { version: VERSION, engine, requires_token };
    connection.wire.extend_from_slice(&ours.encode());
    let nonce = token::nonce();
    if requires_token {
        connection.wire.extend_from_slice(&nonce);
    }
    connection.send(timeout).await?;
    let is_meant = theirs.engine == 0 || engine == 0 || theirs.engine == engine;
    if theirs.version != VERSION || !is_meant {
        return Ok(()); // the peer learns the reason from the greeting
    }
    if let Some(token) = &shared.settings.token {
        let mut claim = [0; CLAIM_BYTES];
        let read = connection.read(&mut claim, timeout).await;
        read.inspect_err(|_| shared.settings.refusals.token_here.increment())?;
        let TokenClaim { nonce: caller_nonce, proof } = TokenClaim::decode(&claim);
        let exchange = token::exchange(Channel::Tcp, engine, nonce, caller_nonce);
        let answer = exchange.answer(token, &proof);
        let verdict = answer.map_or(Verdict::Refused, Verdict::Accepted);
        connection.wire.extend_from_slice(&verdict.encode());
        connection.send(timeout).await?;
        if answer.is_none() {
            shared.settings.refusals.token_here.increment();
            return Err(io::Error::other("the peer does not know the token"));
        }
    }
    connection.mark_known();
    native::serve(connection, &shared).await
}
