//! The client's side: the calling thread drives its transfer over one connection of a small pool
//! ([`connection_pool`]), or over several at once if the transfer is large ([`request_window`]).

mod connection;
pub(crate) mod connection_budget;
mod connection_pool;
mod frame_exchange;
mod path;
mod request_window;

use std::{sync::Arc, time::Duration};

use self::connection_budget::ConnectionBudget;
pub(super) use self::path::TcpPath;
use crate::{metrics::Refusals, token::Token};

/// The settings of the client's side.
#[derive(Debug, Clone)]
pub struct TcpSettings {
    /// The maximum number of connections to one peer, at least 1. Further callers wait for one.
    pub connections_per_peer: usize,
    /// The maximum number of connections that one large transfer uses. `None`: all of them to
    /// another host; to this host one per two CPUs, since more of them would only compete for CPUs.
    pub connections_per_transfer: Option<usize>,
    /// The timeout for connecting, even if the deadline of the transfer is later.
    pub connect_timeout: Duration,
    /// The token that both sides must prove to know, if one is set.
    pub token: Option<Token>,
    /// Counts refused tokens.
    pub refusals: Arc<Refusals>,
    /// The connections of the engine.
    pub(crate) budget: Arc<ConnectionBudget>,
}

impl Default for TcpSettings {
    fn default() -> Self {
        Self {
            connections_per_peer: 4,
            connections_per_transfer: None,
            connect_timeout: Duration::from_secs(5),
            token: None,
            refusals: Arc::default(),
            budget: ConnectionBudget::for_process(),
        }
    }
}
