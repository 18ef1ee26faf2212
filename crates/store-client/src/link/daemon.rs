//! The way to the master through the daemon of this host, which passes calls on.

use std::{error::Error as _, time::Duration};

use mooncake_base::{Clock, Endpoint, Error, ErrorCode, Moment, Result, SystemClock};
pub use mooncake_proto::native_frame::DaemonGreeting;
use mooncake_proto::v1;

use super::{MasterLink, SocketLink};
use crate::config::LinkConfig;

/// The port a daemon listens on unless told otherwise.
const DEFAULT_PORT: u16 = 50052;

/// How often one looks whether the daemon has come, while one waits for it.
const CONNECT_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// A link to the daemon of this host. While the daemon is away calls fail at once; when another one
/// listens there, they go on.
#[derive(Debug)]
pub struct DaemonLink {
    inner: SocketLink,
    daemon: DaemonGreeting,
}

impl DaemonLink {
    /// Finds the daemon, waiting so long for it to come.
    ///
    /// # Errors
    /// A text that is no address, nobody who answers there in time, or a master instead of a daemon.
    #[allow(clippy::disallowed_methods, reason = "nothing tells that a port begins to listen")]
    pub fn connect(address: &str, config: LinkConfig, timeout: Duration) -> Result<Self> {
        let until = SystemClock.now() + timeout;
        let inner = SocketLink::to(address.parse::<Endpoint>()?.or_port(DEFAULT_PORT), config);
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
                let text = "a master listens there and no daemon; join it as the master";
                Err(Error::invalid(text).with("daemon", inner.address()))
            }
        }
    }

    /// What the daemon said of itself when it was found.
    pub fn daemon(&self) -> &DaemonGreeting {
        &self.daemon
    }
}

impl MasterLink for DaemonLink {
    fn call(&self, request: v1::Request, deadline: Moment) -> Result<v1::Response> {
        self.inner.call(request, deadline).map_err(|error| match error.code() {
            ErrorCode::RPC_FAIL | ErrorCode::RPC_TIMEOUT => {
                daemon_error(&error).with("daemon", self.inner.address())
            }
            _ => error,
        })
    }

    fn address(&self) -> String {
        self.inner.address()
    }

    fn close(&self) {
        self.inner.close();
    }
}

/// The same failure, of the daemon. Its words are the link's, which speak of a master; what the
/// system said of it stays.
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
    let daemon_error = Error::new(error.code(), text);
    match first {
        Some(first) => daemon_error.with("because", format_args!("{:?}", first.to_string())),
        None => daemon_error,
    }
}
