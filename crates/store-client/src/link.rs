//! Links to the master: one request, one response, within a deadline.
//!
//! [`SocketLink`] speaks the native protocol over sockets, in the calling thread; [`LocatedLink`]
//! finds the master to which it leads. [`DaemonLink`]
//! does the same with this host's daemon, which forwards calls. [`InProcessLink`] calls a master in
//! the same process.

mod circuit;
mod connection;
mod daemon;
mod dial;
mod located;
mod pool;
mod socket;
mod view_fence;

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use mooncake_base::{Error, Moment, Result};
use mooncake_proto::v1;

pub use daemon::{DaemonGreeting, DaemonLink};
pub use located::LocatedLink;
pub use socket::SocketLink;

use crate::{config::LinkConfig, master_address::MasterAddress, protocol::AttemptFailure};

/// A link to the master.
pub trait MasterLink: fmt::Debug + Send + Sync {
    /// Sends one request and waits for the response. Makes one attempt: whether to make another one
    /// is decided by the caller, who knows whether the call may be executed twice.
    ///
    /// # Errors
    /// `RPC_FAIL` if the master cannot be reached or the connection breaks, `RPC_TIMEOUT` if the
    /// master does not answer in time, a closed error after [`close`](Self::close). A failure
    /// reported by the master is part of the response.
    fn call(
        &self,
        request: v1::Request,
        deadline: Moment,
    ) -> Result<v1::Response, Box<CallFailure>>;

    /// The master's address, for messages.
    fn address(&self) -> String;

    /// Has `told` called whenever another master leads. Called once; a link to a single master does
    /// nothing.
    fn on_leader_change(&self, told: LeaderChange) {
        let _ = told;
    }

    /// Closes the link. Pending calls fail soon, later calls at once.
    fn close(&self);
}

/// Is called when another master leads. It must not block.
pub type LeaderChange = Box<dyn Fn() + Send + Sync>;

/// Opens a link to a master at any form of [`MasterAddress`]. The first call connects.
///
/// # Errors
/// The address is invalid, or names a lease service whose settings are.
pub fn open_link(address: &str, config: LinkConfig) -> Result<Arc<dyn MasterLink>> {
    match MasterAddress::parse(address, &config.redis)? {
        MasterAddress::Fixed(_) => Ok(Arc::new(SocketLink::new(address, config)?)),
        located => Ok(Arc::new(LocatedLink::new(located, config)?)),
    }
}

/// A call without a response.
#[derive(Debug)]
pub struct CallFailure {
    /// The error for the caller.
    pub error: Error,
    /// What is known about the attempt.
    pub kind: AttemptFailure,
    /// The request, to send it again; `None` if the link did not keep it.
    pub request: Option<v1::Request>,
}

impl CallFailure {
    /// A failure after which the call cannot be repeated.
    pub fn last(error: Error) -> Box<Self> {
        Box::new(Self { error, kind: AttemptFailure::Final, request: None })
    }

    /// Returns whether the master has not received the request.
    fn is_unsent(&self) -> bool {
        matches!(self.kind, AttemptFailure::Unreachable | AttemptFailure::Unsent)
    }
}

impl fmt::Display for CallFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for CallFailure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl From<Box<CallFailure>> for Error {
    fn from(failure: Box<CallFailure>) -> Self {
        failure.error
    }
}

type Dispatch = dyn Fn(v1::Request) -> Result<v1::Response> + Send + Sync;

/// A link to a master in the same process, called as a function without a socket.
pub struct InProcessLink {
    address: String,
    dispatch: Box<Dispatch>,
    is_closed: AtomicBool,
}

impl InProcessLink {
    /// Creates a link that passes each request to `dispatch`. No deadline can interrupt the function,
    /// which must be short, as the master's dispatch is, but for calls that themselves say how long
    /// they wait.
    pub fn new(
        address: impl Into<String>,
        dispatch: impl Fn(v1::Request) -> Result<v1::Response> + Send + Sync + 'static,
    ) -> Self {
        Self { address: address.into(), dispatch: Box::new(dispatch), is_closed: false.into() }
    }
}

impl MasterLink for InProcessLink {
    fn call(&self, request: v1::Request, _: Moment) -> Result<v1::Response, Box<CallFailure>> {
        if self.is_closed.load(Ordering::Acquire) {
            return Err(CallFailure::last(pool::link_closed()));
        }
        (self.dispatch)(request).map_err(CallFailure::last)
    }

    fn address(&self) -> String {
        self.address.clone()
    }

    fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }
}

impl fmt::Debug for InProcessLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InProcessLink").field("address", &self.address).finish_non_exhaustive()
    }
}
