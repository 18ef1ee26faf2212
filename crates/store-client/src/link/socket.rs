//! Client side of the native protocol: blocking sockets, used by the calling thread itself.

use std::{io, sync::Arc, time::Duration};

use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, Endpoint, Error, ErrorCode, ErrorKind, Moment, Result, SystemClock};
use mooncake_os::{call_limit, fork};
use mooncake_proto::{
    native_frame::ServerGreeting,
    v1::{self, request::Call, response::Call as Reply},
};

use super::{
    CallFailure, MasterLink,
    circuit::Circuit,
    connection::{Connection, ExchangeError},
    dial,
    pool::{Pool, Slot},
    view_fence::ViewFence,
};
use crate::{config::LinkConfig, protocol::AttemptFailure};

/// Default port of the master.
pub(super) const DEFAULT_PORT: u16 = 50051;

/// Idle time after which a connection is checked before it is used again.
const TRUSTED_IDLE_MAX: Duration = Duration::from_millis(100);

/// For each so many connections, there is one that only heartbeats use. A client has one; a daemon,
/// which passes on the heartbeats of many dummy clients, has several.
const CONNECTIONS_PER_HEARTBEAT: usize = 16;

/// Maximum number of connections for calls that wait at the master, one for each directory.
const WAITING_CONNECTIONS_MAX: usize = 64;

/// What the first call over a connection says in place of the address of the caller.
const RELAYED: &str = "relayed";

/// A link over TCP, or over the Unix socket that the master names in its greeting.
#[derive(Debug)]
pub struct SocketLink {
    address: Endpoint,
    config: LinkConfig,
    pool: Pool,
    /// The connections of heartbeats, which must not wait for calls that hang.
    heartbeats: Pool,
    /// The connections of calls that the master holds until it has something to say.
    waiting: Pool,
    circuit: Mutex<Circuit>,
    views: Arc<ViewFence>,
    generation: u64,
}

impl SocketLink {
    /// Creates a link to `host`, `host:port`, `[v6]` or `[v6]:port`. The first call connects.
    ///
    /// # Errors
    /// The address is invalid.
    pub fn new(address: &str, config: LinkConfig) -> Result<Self> {
        let address = address.parse::<Endpoint>()?.or_port(DEFAULT_PORT);
        Ok(Self::to(address, config, Arc::default()))
    }

    /// Creates a link to the address of one of several masters.
    pub(super) fn to(address: Endpoint, config: LinkConfig, views: Arc<ViewFence>) -> Self {
        Self {
            address,
            pool: Pool::new(config.connections_max),
            heartbeats: Pool::new(config.connections_max / CONNECTIONS_PER_HEARTBEAT),
            waiting: Pool::new(WAITING_CONNECTIONS_MAX),
            config,
            circuit: Mutex::default(),
            views,
            generation: fork::generation(),
        }
    }

    /// Reads the server's first greeting over a separate connection. Calls may connect at once then.
    /// A server that refuses gives its reason to those that know its token.
    pub(super) fn greeting(&self, deadline: Moment) -> Result<ServerGreeting> {
        let until = deadline.min(SystemClock.now() + self.config.connect_timeout);
        let greeting = dial::greeting(&self.address, self.config.token.as_ref(), until)?;
        self.circuit.lock().record_success();
        Ok(greeting)
    }

    /// Connects, unless the circuit breaker is open.
    fn connect(&self, pool: &Pool, deadline: Moment) -> Result<Connection> {
        let timeout = self.config.connect_timeout;
        let start = SystemClock.now();
        self.circuit.lock().check_attempt(start, timeout)?;
        let until = deadline.min(start + timeout);
        let dialed = dial::dial(&self.address, &self.config, until);
        let now = SystemClock.now();
        match dialed {
            Ok(connection) => {
                self.circuit.lock().record_success();
                pool.track(&connection)?;
                Ok(connection)
            }
            Err(error) if call_limit::is_over() => {
                self.circuit.lock().record_abandoned(now);
                Err(error)
            }
            Err(error) => {
                self.circuit.lock().record_failure(error.clone(), now, now.since(start));
                Err(error)
            }
        }
    }

    /// Returns the connections for a request.
    fn pool_of(&self, request: &v1::Request) -> &Pool {
        match &request.call {
            Some(Call::Heartbeat(_)) => &self.heartbeats,
            Some(Call::FetchOffloads(_)) => &self.waiting,
            _ => &self.pool,
        }
    }

    /// Drops the idle connections: one of the link's was found dead, or without an answer.
    pub(super) fn drop_idle(&self) {
        self.pool.drop_idle();
        self.heartbeats.drop_idle();
        self.waiting.drop_idle();
    }

    /// Makes one attempt.
    fn attempt(
        &self,
        request: &mut v1::Request,
        deadline: Moment,
    ) -> Result<v1::Response, (AttemptFailure, Error)> {
        let pool = self.pool_of(request);
        let mut slot = pool.acquire(deadline).map_err(unreachable)?;
        let (mut connection, is_fresh) =
            self.connection(&mut slot, request, deadline).map_err(unreachable)?;
        request.caller_address = match (is_fresh, self.config.passes_on_calls) {
            (false, _) => String::new(),
            (true, false) => connection.own_address(),
            (true, true) => RELAYED.to_owned(),
        };
        let exchanged = connection.exchange(request, deadline);
        request.caller_address.clear();
        let error = match exchanged {
            Ok(Ok(response)) => {
                slot.connection = Some(connection);
                // The master may have executed the call.
                self.views.check(&response).map_err(|error| (AttemptFailure::Broken, error))?;
                return match refusal(&response) {
                    Some(error) => Err((AttemptFailure::Refused, error)),
                    None => Ok(response),
                };
            }
            Err(too_large) => {
                slot.connection = Some(connection);
                return Err((AttemptFailure::Final, too_large));
            }
            Ok(Err(error)) => error,
        };
        if !is_fresh {
            // The other connections are as old.
            self.drop_idle();
        }
        let broken = |source| {
            let text = "the connection to the master broke before a response arrived";
            Error::new(ErrorCode::RPC_FAIL, text).caused_by(source)
        };
        Err(match error {
            ExchangeError::Unsent(source) if is_fresh => {
                (AttemptFailure::Unreachable, broken(source))
            }
            ExchangeError::Unsent(source) => (AttemptFailure::Unsent, broken(source)),
            ExchangeError::Unanswered(source) if source.kind() == io::ErrorKind::TimedOut => {
                (AttemptFailure::CutOff, broken(source))
            }
            ExchangeError::Unanswered(source) => (AttemptFailure::Broken, broken(source)),
            ExchangeError::Malformed(error) => (AttemptFailure::Broken, error),
            ExchangeError::TimedOut => {
                let text = "the master did not answer in time";
                (AttemptFailure::TimedOut, Error::new(ErrorCode::RPC_TIMEOUT, text))
            }
        })
    }

    /// Returns the slot's connection if it is usable, or a new one.
    fn connection(
        &self,
        slot: &mut Slot<'_>,
        request: &v1::Request,
        deadline: Moment,
    ) -> Result<(Connection, bool)> {
        if let Some(pooled) = slot.connection.take() {
            // An unnumbered start of a put cannot be repeated if the connection proves to be dead.
            let is_repeatable =
                !matches!(&request.call, Some(Call::PutStart(start)) if start.request_id == 0);
            let is_trusted = is_repeatable && pooled.idle(SystemClock.now()) < TRUSTED_IDLE_MAX;
            if is_trusted || !pooled.is_closed_by_peer() {
                return Ok((pooled, false));
            }
            self.drop_idle();
        }
        self.connect(self.pool_of(request), deadline).map(|connection| (connection, true))
    }
}

impl MasterLink for SocketLink {
    fn call(
        &self,
        mut request: v1::Request,
        deadline: Moment,
    ) -> Result<v1::Response, Box<CallFailure>> {
        if fork::is_forked_since(self.generation) {
            let text =
                "the link to the master was made before a fork and belongs to the parent process";
            return Err(CallFailure::last(Error::closed(text).with("master", &self.address)));
        }
        self.attempt(&mut request, deadline).map_err(|(kind, error)| {
            let error = match kind {
                AttemptFailure::Refused => error,
                _ => error.with("master", &self.address),
            };
            Box::new(CallFailure { error, kind, request: Some(request) })
        })
    }

    fn address(&self) -> String {
        self.address.to_string()
    }

    fn close(&self) {
        // In a forked child, the sockets belong to the parent, too.
        if !fork::is_forked_since(self.generation) {
            self.pool.close();
            self.heartbeats.close();
            self.waiting.close();
        }
    }
}

/// The failure of an attempt that found no connection, or a server that refuses it: one of another
/// version or with another token.
fn unreachable(error: Error) -> (AttemptFailure, Error) {
    let kind = match error.kind() {
        ErrorKind::Unavailable | ErrorKind::Timeout => AttemptFailure::Unreachable,
        _ => AttemptFailure::Final,
    };
    (kind, error)
}

/// Returns the error of a call that the master, or a daemon before it, did not carry out now but may
/// carry out later.
fn refusal(response: &v1::Response) -> Option<Error> {
    let Some(Reply::Failure(failure)) = &response.call else { return None };
    let error = Error::from(failure);
    matches!(error.code(), ErrorCode::RPC_FAIL | ErrorCode::RPC_TIMEOUT).then_some(error)
}

#[cfg(test)]
mod tests;
