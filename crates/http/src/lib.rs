//! Shared parts of the HTTP servers of masters and clients.
//!
//! In reading order: [`limited_listener`] (limits on the number and the time of connections),
//! [`reply`] (common responses).
#![warn(missing_docs)]

pub mod limited_listener;
pub mod reply;

pub use limited_listener::{LimitedListener, Limits, Peer};
