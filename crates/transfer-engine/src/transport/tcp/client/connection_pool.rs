//! The pool of connections to one peer: at most a few, each borrowed for one transfer.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use mooncake_base::sync::{Condvar, Mutex, MutexGuard};
use mooncake_base::{Clock, Endpoint, EngineId, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_os::{
    call_limit, cpu_count,
    dial::{dial, is_refused, peer_error},
    fork,
    spin_wait::ActiveThread,
};
use socket2::SockRef;

use super::{
    TcpSettings,
    connection::{DataConnection, ForkGuardedStream},
};
use crate::{
    metrics::PoolSnapshot,
    token::{self, Channel, NONCE_BYTES, Prover},
    transport::{
        TimeLimits,
        tcp::{
            greeting::{Greeting, TokenClaim, VERDICT_BYTES, VERSION, Verdict},
            socket_options::is_local,
        },
    },
};

/// The destination of the connections of a pool.
#[derive(Debug, Clone)]
pub(super) struct Destination {
    pub(super) endpoint: Endpoint,
    /// `Some` if the peer supports native frames: the engine that must answer, or `None` inside if
    /// the segment descriptor names no engine.
    pub(super) native: Option<Option<EngineId>>,
}

/// A bounded pool of connections to one peer.
#[derive(Debug)]
pub(super) struct ConnectionPool {
    destination: Destination,
    settings: TcpSettings,
    generation: u64,
    state: Arc<Mutex<PoolState>>,
    released: Condvar,
    /// Cleared once nothing, or another engine, listens at the destination.
    is_alive: AtomicBool,
    /// The number of callers that wait for a connection.
    waiters: AtomicUsize,
}

#[derive(Debug, Default)]
pub(super) struct PoolState {
    idle: Vec<DataConnection>,
    /// The number of connections, including the idle ones.
    open: usize,
    /// The number of connections that were released after a complete exchange.
    releases: u64,
    /// The sockets of all connections, to end the exchanges in flight when the pool closes.
    sockets: Vec<Weak<ForkGuardedStream>>,
    is_closed: bool,
}

/// A connection borrowed from the pool. Dropping it aborts the connection;
/// [`PooledConnection::release`] returns it.
#[derive(Debug)]
pub(super) struct PooledConnection<'a> {
    pool: &'a ConnectionPool,
    connection: Option<DataConnection>,
    is_released: bool,
    _active: ActiveThread,
}

impl ConnectionPool {
    pub(super) fn new(destination: Destination, settings: &TcpSettings) -> Self {
        let state = Arc::default();
        settings.budget.add_pool(&state);
        Self {
            destination,
            settings: settings.clone(),
            generation: fork::generation(),
            state,
            released: Condvar::new(),
            is_alive: AtomicBool::new(true),
            waiters: AtomicUsize::new(0),
        }
    }

    /// Returns whether a caller waits for a connection.
    pub(super) fn has_waiters(&self) -> bool {
        self.waiters.load(Ordering::Relaxed) > 0
    }

    /// Returns the maximum number of connections for a transfer whose first connection is `first`.
    pub(super) fn max_per_transfer(&self, first: &DataConnection) -> usize {
        let most = self.settings.connections_per_peer;
        match self.settings.connections_per_transfer {
            Some(limit) => limit.clamp(1, most),
            None if is_local(&SockRef::from(first.stream())) => (cpu_count() / 2).clamp(1, most),
            None => most,
        }
    }

    /// Returns false once the peer is known to be gone.
    pub(super) fn is_alive(&self) -> bool {
        self.is_alive.load(Ordering::Relaxed)
    }

    pub(super) fn destination(&self) -> &Destination {
        &self.destination
    }

    /// Acquires an idle connection, a new one, or the next one that is released.
    ///
    /// Waits no longer than the stall limit while no other caller completes an exchange.
    pub(super) fn acquire(&self, limits: TimeLimits) -> Result<PooledConnection<'_>> {
        if fork::is_forked_since(self.generation) {
            return Err(Error::closed("the connection belongs to the parent process"));
        }
        let mut state = self.state.lock();
        loop {
            if state.is_closed {
                // The next one that waits learns of it, too.
                self.released.notify_all();
                return Err(self.closed());
            }
            if let Some(connection) = state.idle.pop() {
                return Ok(self.pooled(Some(connection)));
            }
            if state.open < self.limit() {
                state.open += 1;
                break;
            }
            let before = state.releases;
            let wait = call_limit::next_wait(limits.give_up_at());
            self.waiters.fetch_add(1, Ordering::Relaxed);
            self.released.wait_for(&mut state, wait);
            self.waiters.fetch_sub(1, Ordering::Relaxed);
            let is_late = wait.is_zero() || limits.give_up_at().has_passed(SystemClock.now());
            let has_time = !call_limit::capped(limits.deadline).has_passed(SystemClock.now());
            if is_late && has_time {
                // Other callers' exchanges show that the peer is only busy.
                if state.releases == before {
                    let stall = limits.stall.unwrap_or_default();
                    return Err(stall_error(&self.destination.endpoint, stall));
                }
            } else if is_late {
                let text = "all connections to the peer were busy until the deadline";
                return Err(Error::new(ErrorCode::RPC_TIMEOUT, text)
                    .with("peer", &self.destination.endpoint)
                    .with("connections", state.open));
            }
        }
        drop(state);
        let mut pooled = self.pooled(None);
        pooled.connection = Some(self.connect(limits.give_up_at())?);
        Ok(pooled)
    }

    /// Acquires another connection, idle or new, for a caller that already has one. Returns `None`
    /// if callers without a connection are waiting or the pool is at its limit.
    pub(super) fn try_acquire_extra(&self, deadline: Moment) -> Option<PooledConnection<'_>> {
        let mut state = self.state.lock();
        if state.is_closed || self.has_waiters() {
            return None;
        }
        if let Some(connection) = state.idle.pop() {
            return Some(self.pooled(Some(connection)));
        }
        if state.open >= self.limit() {
            return None;
        }
        state.open += 1;
        drop(state);
        let mut pooled = self.pooled(None);
        pooled.connection = Some(self.connect(deadline).ok()?);
        Some(pooled)
    }

    /// Returns the maximum number of connections to the peer now.
    fn limit(&self) -> usize {
        self.settings.budget.per_peer(self.settings.connections_per_peer)
    }

    fn pooled(&self, connection: Option<DataConnection>) -> PooledConnection<'_> {
        PooledConnection {
            pool: self,
            connection,
            is_released: false,
            _active: ActiveThread::new(),
        }
    }

    /// Closes the pool: idle connections are closed, exchanges in flight fail, and later calls to
    /// acquire a connection fail.
    pub(super) fn close(&self) {
        PoolState::close(&self.state);
        self.is_alive.store(false, Ordering::Relaxed);
        self.released.notify_all();
    }

    fn closed(&self) -> Error {
        Error::closed("the connections to the peer were closed")
            .with("peer", &self.destination.endpoint)
    }

    /// Returns the state of the pool.
    pub(super) fn snapshot(&self) -> PoolSnapshot {
        let state = self.state.lock();
        let (open, idle) = (state.open, state.idle.len());
        PoolSnapshot { open, idle, limit: self.settings.connections_per_peer, refused: 0 }
    }

    /// Closes the connections that are idle at the moment.
    fn close_idle(&self) {
        let mut state = self.state.lock();
        let stale = std::mem::take(&mut state.idle);
        state.open -= stale.len();
        drop(state);
        self.released.notify_all();
    }

    /// Wakes a waiting caller, if there is one. Usually none waits, and notifying without waiters
    /// would cost a system call, too.
    fn notify_waiter(&self, state: MutexGuard<'_, PoolState>) {
        // The counter changes only under the lock.
        let has_waiters = self.has_waiters();
        drop(state);
        if has_waiters {
            self.released.notify_one();
        }
    }

    fn connect(&self, deadline: Moment) -> Result<DataConnection> {
        if self.state.lock().is_closed {
            return Err(self.closed());
        }
        let now = SystemClock.now();
        self.settings.budget.sweep(now);
        let deadline = deadline.min(now + self.settings.connect_timeout);
        let endpoint = &self.destination.endpoint;
        let stream = dial(endpoint, deadline).inspect_err(|error| {
            if is_refused(error) {
                self.is_alive.store(false, Ordering::Relaxed);
            }
        })?;
        let failed = |source| peer_error("the data connection failed", endpoint, source);
        let mut connection = DataConnection::new(stream).map_err(failed)?;
        if !self.state.lock().add_socket(connection.socket()) {
            return Err(self.closed());
        }
        connection.count = Some(self.settings.budget.count());
        if let Some(engine) = self.destination.native {
            let engine = engine.map_or(0, EngineId::bits);
            let ours = Greeting { version: VERSION, engine, requires_token: false };
            let theirs = connection.exchange_greetings(ours, deadline).map_err(failed)?;
            if theirs.version != VERSION {
                let text = "the peer uses another version of the data frames";
                return Err(Error::new(ErrorCode::INVALID_VERSION, text)
                    .with("peer", endpoint)
                    .with("theirs", theirs.version)
                    .with("ours", VERSION));
            }
            if engine != 0 && theirs.engine != engine {
                self.is_alive.store(false, Ordering::Relaxed);
                let text = "another engine listens at the address, the peer was restarted";
                return Err(Error::new(ErrorCode::TRANSFER_FAIL, text).with("peer", endpoint));
            }
            self.exchange_tokens(&mut connection, theirs, deadline)?;
        }
        Ok(connection)
    }

    /// Exchanges proofs of the token with the peer, if one is set.
    fn exchange_tokens(
        &self,
        connection: &mut DataConnection,
        theirs: Greeting,
        deadline: Moment,
    ) -> Result<()> {
        let endpoint = &self.destination.endpoint;
        let failed = |source| peer_error("the data connection failed", endpoint, source);
        let refused = |text| {
            self.settings.refusals.token_there.increment();
            Err(Error::new(ErrorCode::ILLEGAL_CLIENT, text).with("peer", endpoint))
        };
        let token = match (&self.settings.token, theirs.requires_token) {
            (None, false) => return Ok(()),
            (Some(token), true) => token,
            (None, true) => return refused("the peer asks for a token, and this engine has none"),
            (Some(_), false) => return refused("the peer asks for no token, and has shown none"),
        };
        let mut owner_nonce = [0; NONCE_BYTES];
        connection.read(&mut owner_nonce, deadline.into()).map_err(failed)?;
        let caller_nonce = token::nonce();
        let exchange = token::exchange(Channel::Tcp, theirs.engine, owner_nonce, caller_nonce);
        let proof = exchange.proof(token, Prover::Caller, &[]);
        let claim = TokenClaim { nonce: caller_nonce, proof };
        connection.send_bytes(&claim.encode(), deadline).map_err(failed)?;
        let mut verdict = [0; VERDICT_BYTES];
        connection.read(&mut verdict, deadline.into()).map_err(failed)?;
        match Verdict::decode(&verdict).map_err(|bad| failed(bad.into()))? {
            Verdict::Accepted(proof) if exchange.is_proven(token, Prover::Callee, &[], &proof) => {
                Ok(())
            }
            Verdict::Accepted(_) => refused("the peer does not know the token"),
            Verdict::Refused => refused("the peer has another token"),
        }
    }
}

impl PoolState {
    /// Closes the idle connections, and ends the exchanges on the others. No exchange begins later.
    pub(super) fn close(pool: &Mutex<Self>) {
        let mut state = pool.lock();
        state.is_closed = true;
        let (idle, sockets) = (std::mem::take(&mut state.idle), std::mem::take(&mut state.sockets));
        state.open -= idle.len();
        drop(state);
        drop(idle);
        sockets.iter().filter_map(Weak::upgrade).for_each(|socket| socket.end());
    }

    /// Adds the socket of a new connection. Returns false if the pool is closed.
    fn add_socket(&mut self, socket: &Arc<ForkGuardedStream>) -> bool {
        self.sockets.retain(|socket| socket.strong_count() > 0);
        self.sockets.push(Arc::downgrade(socket));
        !self.is_closed
    }

    /// Takes out the idle connections that were not used since before the last of so many looks.
    pub(super) fn take_unused(&mut self, looks: u64) -> Vec<DataConnection> {
        // They lie in the order of their last use.
        let unused = self.idle.iter().take_while(|connection| connection.last_use < looks).count();
        self.open -= unused;
        self.idle.drain(..unused).collect()
    }
}

impl PooledConnection<'_> {
    /// Returns the connection.
    pub(super) fn get_mut(&mut self) -> &mut DataConnection {
        self.connection.as_mut().expect("a connection is in place before it is handed out")
    }

    /// Returns the connection, read-only.
    pub(super) fn get(&self) -> &DataConnection {
        self.connection.as_ref().expect("a connection is in place before it is handed out")
    }

    /// Aborts the connection but keeps its slot in the pool.
    pub(super) fn close(&mut self) {
        if let Some(connection) = self.connection.take() {
            connection.abort();
        }
    }

    /// Returns whether the slot holds a connection.
    pub(super) fn is_connected(&self) -> bool {
        self.connection.is_some()
    }

    /// Replaces a broken connection by a new one.
    pub(super) fn reconnect(&mut self, deadline: Moment) -> Result<()> {
        if let Some(broken) = self.connection.take() {
            // The cause most likely broke the idle connections as well.
            let breaks_idle = broken.is_used;
            broken.abort();
            if breaks_idle {
                self.pool.close_idle();
            }
        }
        self.connection = Some(self.pool.connect(deadline)?);
        Ok(())
    }

    /// Returns the connection to the pool. Every exchange on it must be complete.
    pub(super) fn release(mut self) {
        if let Some(mut connection) = self.connection.take() {
            connection.is_used = true;
            connection.last_use = self.pool.settings.budget.sweeps();
            let mut state = self.pool.state.lock();
            if state.is_closed {
                // Dropping `self` decrements the count of connections.
                return;
            }
            state.idle.push(connection);
            state.releases += 1;
            self.pool.notify_waiter(state);
            // The connection stays open: drop must not count it as closed.
            self.is_released = true;
        }
    }
}

impl Drop for PooledConnection<'_> {
    fn drop(&mut self) {
        if self.is_released {
            return;
        }
        self.close();
        let mut state = self.pool.state.lock();
        state.open -= 1;
        self.pool.notify_waiter(state);
    }
}

/// Returns the error for a peer that has moved no byte for the time of the stall limit.
pub(super) fn stall_error(endpoint: &Endpoint, stall: Duration) -> Error {
    Error::new(ErrorCode::RPC_TIMEOUT, "the peer has moved no byte within the stall limit")
        .with("peer", endpoint)
        .with("limit_ms", stall.as_millis())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use mooncake_base::ErrorKind;

    use super::{super::connection_budget::ConnectionBudget, *};

    /// Returns a pool of a peer with upstream's frames, which sends no greeting.
    fn pool(listener: &TcpListener, settings: &TcpSettings) -> ConnectionPool {
        let endpoint = Endpoint::new("127.0.0.1", listener.local_addr().unwrap().port());
        ConnectionPool::new(Destination { endpoint, native: None }, settings)
    }

    #[test]
    fn idle_connections_are_closed_after_a_while() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let settings = TcpSettings::default();
        let [unused, used] = [(); 2].map(|()| pool(&listener, &settings));
        let now = SystemClock.now();
        let until = || (SystemClock.now() + Duration::from_secs(60)).into();
        for pool in [&unused, &used] {
            pool.acquire(until()).unwrap().release();
        }
        let borrowed = unused.acquire(until()).unwrap();
        unused.acquire(until()).unwrap().release();
        for minutes in 1..4 {
            settings.budget.sweep(now + Duration::from_secs(60) * minutes);
            used.acquire(until()).unwrap().release();
        }
        assert_eq!(
            (unused.snapshot().open, unused.snapshot().idle),
            (1, 0),
            "only the borrowed one"
        );
        borrowed.release();
        assert_eq!((used.snapshot().open, used.snapshot().idle), (1, 1));
        assert_eq!(unused.snapshot().idle, 1, "it was used just now");
    }

    #[test]
    fn peer_gets_one_connection_while_there_are_many() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let settings =
            TcpSettings { budget: ConnectionBudget::with_limit(6), ..TcpSettings::default() };
        let pools = [(); 10].map(|()| pool(&listener, &settings));
        let until = SystemClock.now() + Duration::from_secs(60);
        let mut borrowed = Vec::new();
        for pool in &pools {
            borrowed.push(pool.acquire(until.into()).unwrap());
            borrowed.extend(std::iter::from_fn(|| pool.try_acquire_extra(until)));
        }
        let open = pools.each_ref().map(|pool| pool.snapshot().open);
        assert_eq!(open, [4, 2, 1, 1, 1, 1, 1, 1, 1, 1]);
    }

    #[test]
    fn waits_for_a_busy_connection_until_the_deadline() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let endpoint = Endpoint::new("127.0.0.1", port);
        let settings = TcpSettings { connections_per_peer: 1, ..TcpSettings::default() };
        // A peer with upstream's frames sends no greeting.
        let pool = ConnectionPool::new(Destination { endpoint, native: None }, &settings);
        let in_time = || (SystemClock.now() + Duration::from_secs(60)).into();
        let pooled = pool.acquire(in_time()).unwrap();
        let soon = SystemClock.now() + Duration::from_millis(20);
        let late = pool.acquire(soon.into()).unwrap_err();
        assert_eq!(late.kind(), ErrorKind::Timeout);
        pooled.release();
        pool.acquire(in_time()).unwrap().release();
    }
}
