//! Client side of the native protocol: blocking sockets, used by the calling thread itself.

use std::time::Duration;

use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, Endpoint, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_proto::{
    native_frame::ServerGreeting,
    v1::{self, request::Call},
};
use mooncake_transfer_engine::fork;

use super::{
    MasterLink,
    circuit::Circuit,
    connection::{Connection, ExchangeError},
    dial,
    pool::{Pool, Slot},
};
use crate::config::LinkConfig;

/// Default port of the master.
const DEFAULT_PORT: u16 = 50051;

/// Idle time after which a connection is checked before it is used again.
const TRUSTED_IDLE_MAX: Duration = Duration::from_millis(100);

/// A link over TCP, or over the Unix socket that the master names in its greeting.
#[derive(Debug)]
pub struct SocketLink {
    address: Endpoint,
    config: LinkConfig,
    pool: Pool,
    circuit: Mutex<Circuit>,
    generation: u64,
}

impl SocketLink {
    /// Creates a link to `host`, `host:port`, `[v6]` or `[v6]:port`. The first call connects.
    ///
    /// # Errors
    /// The address is invalid.
    pub fn new(address: &str, config: LinkConfig) -> Result<Self> {
        Ok(Self::to(address.parse::<Endpoint>()?.or_port(DEFAULT_PORT), config))
    }

    /// Creates a link to the address.
    pub(super) fn to(address: Endpoint, config: LinkConfig) -> Self {
        Self {
            address,
            pool: Pool::new(config.connections_max),
            config,
            circuit: Mutex::default(),
            generation: fork::generation(),
        }
    }

    /// Reads the server's greeting over a separate connection.
    pub(super) fn greeting(&self, deadline: Moment) -> Result<ServerGreeting> {
        let until = deadline.min(SystemClock.now() + self.config.connect_timeout);
        dial::greeting(&self.address, until)
    }

    /// Connects, unless the circuit breaker is open.
    fn connect(&self, deadline: Moment) -> Result<Connection> {
        let timeout = self.config.connect_timeout;
        let start = SystemClock.now();
        self.circuit.lock().check_attempt(start, timeout)?;
        let until = deadline.min(start + timeout);
        let dialed = dial::dial(&self.address, self.config.may_use_unix_socket, until);
        let now = SystemClock.now();
        match dialed {
            Ok(connection) => {
                self.circuit.lock().record_success();
                self.pool.track(&connection)?;
                Ok(connection)
            }
            Err(error) => {
                self.circuit.lock().record_failure(error.clone(), now, now.since(start));
                Err(error)
            }
        }
    }

    /// Makes one attempt. `None`: the pooled connection was dead, and the call may be repeated.
    fn attempt(&self, request: &v1::Request, deadline: Moment) -> Result<Option<v1::Response>> {
        let mut slot = self.pool.acquire(deadline)?;
        let (mut connection, is_fresh) = self.connection(&mut slot, request, deadline)?;
        let error = match connection.exchange(request, deadline) {
            Ok(Ok(response)) => {
                slot.connection = Some(connection);
                return Ok(Some(response));
            }
            Err(too_large) => {
                slot.connection = Some(connection);
                return Err(too_large);
            }
            Ok(Err(ExchangeError::Unsent(_))) if !is_fresh => return Ok(None),
            Ok(Err(ExchangeError::Unanswered(_))) if !is_fresh && is_idempotent(request) => {
                return Ok(None);
            }
            Ok(Err(ExchangeError::Unsent(source) | ExchangeError::Unanswered(source))) => {
                let text = "the connection to the master broke before a response arrived";
                Error::new(ErrorCode::RPC_FAIL, text).caused_by(source)
            }
            Ok(Err(ExchangeError::Malformed(error))) => error,
            Ok(Err(ExchangeError::TimedOut)) => {
                Error::new(ErrorCode::RPC_TIMEOUT, "the master did not answer in time")
            }
        };
        Err(error)
    }

    /// Returns the slot's connection if it is usable, or a new one.
    fn connection(
        &self,
        slot: &mut Slot<'_>,
        request: &v1::Request,
        deadline: Moment,
    ) -> Result<(Connection, bool)> {
        if let Some(pooled) = slot.connection.take() {
            let is_trusted =
                is_idempotent(request) && pooled.idle(SystemClock.now()) < TRUSTED_IDLE_MAX;
            if is_trusted || !pooled.is_closed_by_peer() {
                return Ok((pooled, false));
            }
            self.pool.drop_idle();
        }
        self.connect(deadline).map(|connection| (connection, true))
    }
}

impl MasterLink for SocketLink {
    fn call(&self, request: v1::Request, deadline: Moment) -> Result<v1::Response> {
        if fork::is_forked_since(self.generation) {
            let text =
                "the link to the master was made before a fork and belongs to the parent process";
            return Err(Error::closed(text).with("master", &self.address));
        }
        let named = |error: Error| error.with("master", &self.address);
        if let Some(response) = self.attempt(&request, deadline).map_err(named)? {
            return Ok(response);
        }
        self.pool.drop_idle();
        if let Some(response) = self.attempt(&request, deadline).map_err(named)? {
            return Ok(response);
        }
        let text = "every new connection to the master breaks immediately";
        Err(named(Error::new(ErrorCode::RPC_FAIL, text)))
    }

    fn address(&self) -> String {
        self.address.to_string()
    }

    fn close(&self) {
        // In a forked child, the sockets belong to the parent, too.
        if !fork::is_forked_since(self.generation) {
            self.pool.close();
        }
    }
}

/// Returns whether the call is idempotent, so that it may be sent again.
///
/// The start of a put is idempotent if it has a request number, by which the master recognizes a
/// repetition. Without a number, the second call meets the unfinished object of the first, whose
/// version the client never learned, and takes it for another writer's.
fn is_idempotent(request: &v1::Request) -> bool {
    !matches!(&request.call, Some(Call::PutStart(start)) if start.request_id == 0)
}

#[cfg(test)]
mod tests;
