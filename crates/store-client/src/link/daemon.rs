//! Link to the master through this host's daemon, which forwards calls.

use std::{error::Error as _, sync::Arc, time::Duration};

use mooncake_base::{Clock, Endpoint, Error, ErrorCode, Moment, Result, SystemClock};
pub use mooncake_proto::native_frame::DaemonGreeting;
use mooncake_proto::v1;

use super::{CallFailure, MasterLink, SocketLink};
use crate::{config::LinkConfig, protocol::AttemptFailure};

/// Default port of the daemon.
const DEFAULT_PORT: u16 = 50052;

/// Interval between attempts while waiting for the daemon to start.
const CONNECT_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// A link to this host's daemon. While the daemon is down, calls fail at once. When a daemon
/// listens on the address again, calls succeed again.
#[derive(Debug)]
pub struct DaemonLink {
    inner: SocketLink,
    daemon: DaemonGreeting,
}

impl DaemonLink {
    /// Connects to the daemon, waiting up to `timeout` for it to start.
    ///
    /// # Errors
    /// The address is invalid, no daemon answers there in time, or a master listens there instead
    /// of a daemon.
    #[allow(
        clippy::disallowed_methods,
        reason = "there is no event for a port that starts to listen"
    )]
    pub fn connect(address: &str, config: LinkConfig, timeout: Duration) -> Result<Self> {
        let until = SystemClock.now() + timeout;
        // The daemon itself proves the token to the master. Its dummy clients are processes of its
        // host and prove nothing.
        let config = LinkConfig { token: None, ..config };
        let address = address.parse::<Endpoint>()?.or_port(DEFAULT_PORT);
        let inner = SocketLink::to(address, config, Arc::default());
        let greeting = loop {
            match inner.greeting(until) {
                Ok(greeting) => break greeting,
                Err(error) if until.left(SystemClock.now()) < CONNECT_RETRY_INTERVAL => {
                    return Err(daemon_error(&error).with("daemon", inner.address()));
                }
                Err(_) => std::thread::sleep(CONNECT_RETRY_INTERVAL),
            }
        };
        match greeting.daemon {
            Some(daemon) => Ok(Self { inner, daemon }),
            None => {
                let text = "the address is a master's, not a daemon's; connect to it as a master";
                Err(Error::invalid(text).with("daemon", inner.address()))
            }
        }
    }

    /// The daemon's greeting at connect time.
    pub fn daemon(&self) -> &DaemonGreeting {
        &self.daemon
    }
}

impl MasterLink for DaemonLink {
    fn call(
        &self,
        request: v1::Request,
        deadline: Moment,
    ) -> Result<v1::Response, Box<CallFailure>> {
        self.inner.call(request, deadline).map_err(|mut failure| {
            // What the master or the daemon itself has said about a refused call is kept.
            let is_of_link = failure.kind != AttemptFailure::Refused;
            let code = failure.error.code();
            if is_of_link && (code == ErrorCode::RPC_FAIL || code == ErrorCode::RPC_TIMEOUT) {
                failure.error = daemon_error(&failure.error).with("daemon", self.inner.address());
            }
            failure
        })
    }

    fn address(&self) -> String {
        self.inner.address()
    }

    fn close(&self) {
        self.inner.close();
    }
}

/// Rewords a link failure for the daemon. The link's message speaks of a master; the operating
/// system's reason is kept.
fn daemon_error(error: &Error) -> Error {
    let text = match error.code() {
        ErrorCode::RPC_TIMEOUT => {
            "the daemon of this host (mooncake_client) does not answer in time"
        }
        _ => "the daemon of this host (mooncake_client) cannot be reached",
    };
    let mut first = error.source();
    while let Some(before) = first.and_then(|error| error.source()) {
        first = Some(before);
    }
    let remedy = "Start mooncake_client on this host, or correct the address of the daemon.";
    let daemon_error = Error::new(error.code(), text).with_remedy(remedy);
    match first {
        Some(first) => daemon_error.with("because", format_args!("{:?}", first.to_string())),
        None => daemon_error,
    }
}
