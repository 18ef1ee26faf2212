//! What the HTTP servers of masters and clients have in common.
//!
//! In reading order: [`limited_listener`] (connections, limited_listener in number and in how long they may say
//! nothing), [`exposition`] (metrics as Prometheus text), [`reply`].
#![warn(missing_docs)]

pub mod exposition;
pub mod limited_listener;
pub mod reply;

pub use exposition::Exposition;
pub use limited_listener::{LimitedListener, Peer};
