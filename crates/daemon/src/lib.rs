//! The daemon of a host (`mooncake_client`): one client that lends memory to the pool and forwards
//! the calls of other processes of the host, *dummy clients*, to the master.
//!
//! The files in layers. A file uses files of its own row and of the rows above.
//!
//! | Layer | File | Content |
//! |---|---|---|
//! | settings | [`config`], [`limits`] | options of the program; limits of connections |
//! | tables | [`client_table`], [`owed_releases`], [`fence_tracker`], [`counters`] | dummy clients with their processes and connections; what the master must still be told of those that are gone; fences of their reads; counters |
//! | the system | [`listeners`], [`process`], [`waker`] | sockets; the process at the other end of one; wakes the thread that watches |
//! | calls | [`dummy_clients`], [`connection`], [`watch`] | registration and forwarding; one connection; processes that exit, and what is due |
//! | entry points | [`relay`], [`daemon`], [`run`](mod@run) | accepts dummy clients; a running daemon; the whole program, called by the binary and the Python package |
#![warn(missing_docs)]

mod client_table;
pub mod config;
mod connection;
mod counters;
pub mod daemon;
mod dummy_clients;
mod fence_tracker;
mod limits;
mod listeners;
mod owed_releases;
mod process;
pub mod relay;
pub mod run;
mod waker;
mod watch;

pub use config::{DaemonConfig, OPTIONS};
pub use daemon::Daemon;
pub use limits::RelayLimits;
pub use listeners::Listeners;
pub use relay::{Relay, RelaySettings};
pub use run::run;
