//! The master: where every object lies, for how long, and who may be given memory.
//!
//! In reading order: [`config`] (what may be set), [`state`] (the rules, pure), [`service`] (the
//! calls and the doors they come in by), [`admin`] (HTTP for operators, and the metadata server),
//! [`master`] (a running master, started and stopped) and [`run`](mod@run) (the whole program,
//! which the binary and the Python package both call).
#![warn(missing_docs)]

mod addresses;
pub mod admin;
pub mod config;
pub mod events;
mod journal;
pub mod master;
mod rlimit;
pub mod run;
pub mod service;
pub mod state;

pub use addresses::Addresses;
pub use config::{MasterConfig, OPTIONS};
pub use journal::{JournalStatus, LogSync};
pub use master::{Master, start};
pub use run::run;
pub use service::{Origin, Service};
