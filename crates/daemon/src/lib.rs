//! The daemon of a host (`mooncake_client`): one client that lends memory to the pool, and the way
//! of other processes of the host, *guests*, to the master.
//!
//! In reading order: [`config`] (what may be set), [`environment`] (what the environment says of
//! clients, also of those of the Python package), [`daemon`] (a running daemon), [`relay`] (where
//! guests connect), `dummy_clients` (who they are, and what is passed on for them), [`run`](mod@run) (the
//! whole program, which the binary and the Python package both call).
#![warn(missing_docs)]

mod client_table;
pub mod config;
mod connection;
mod counters;
pub mod daemon;
mod dummy_clients;
pub mod environment;
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
pub use relay::{Relay, RelaySettings};
pub use run::run;
