//! Shared parts of the HTTP servers of masters and clients.
//!
//! In reading order: [`limited_listener`] (limits on the number and the time of connections),
//! [`exposition`] (metrics as Prometheus text), [`reply`] (common responses).
#![warn(missing_docs)]

pub mod exposition;
pub mod limited_listener;
pub mod reply;

pub use exposition::Exposition;
pub use limited_listener::{LimitedListener, Limits, Peer};
