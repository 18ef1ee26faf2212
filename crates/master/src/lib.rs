//! The master: records where every object is stored, decides how long it is kept, and allocates
//! memory to clients.
//!
//! In reading order: [`config`] (the options), [`state`] (the rules, pure), [`service`] (the RPC
//! calls and their protocols), [`admin`] (HTTP for operators, and the metadata server), `cluster` (one
//! of several masters), `server` (the listeners, and who answers at them), [`master`] (starting and
//! stopping a master) and [`run`](mod@run) (the whole program, which the binary and the Python package
//! both call).
#![warn(missing_docs)]

mod addresses;
pub mod admin;
mod cluster;
pub mod config;
pub mod events;
mod fatal;
#[cfg_attr(
    not(feature = "test-util"),
    allow(unreachable_pub, reason = "the simulation runs the log, too")
)]
mod journal;
pub mod master;
mod rlimit;
pub mod run;
mod server;
pub mod service;
pub mod state;

pub use addresses::Addresses;
pub use config::{MasterConfig, OPTIONS};
#[cfg(feature = "test-util")]
pub use journal::{
    Directory, Disk, Journal, LogFile, RecoveredJournal, Replay, SimulatedDisk, Snapshot,
};
pub use journal::{JournalStatus, LogSync, OnLogFailure};
pub use master::{Master, start};
pub use run::run;
#[cfg(any(test, feature = "test-util"))]
pub use service::{GuardedState, Slice};
pub use service::{Origin, Service};

/// The examples of `README.md` are tested with the documentation.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
