//! The daemon of a host (`mooncake_client`): one client that lends memory to the pool and forwards
//! the calls of other processes of the host, *dummy clients*, to the master.
//!
//! In reading order: [`config`] (settings), [`daemon`] (a running daemon), [`relay`] (accepts dummy
//! clients), `dummy_clients` (registration and forwarding), [`run`](mod@run) (the whole program,
//! called by the binary and the Python package).
#![warn(missing_docs)]

mod client_table;
pub mod config;
mod connection;
mod counters;
pub mod daemon;
mod dummy_clients;
mod fence_tracker;
mod listeners;
mod process;
pub mod relay;
pub mod run;
mod waker;
mod watch;

pub use config::{DaemonConfig, OPTIONS};
pub use daemon::Daemon;
pub use listeners::Listeners;
pub use relay::{Relay, RelayLimits, RelaySettings};
pub use run::run;
