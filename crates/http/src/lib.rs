//! What the HTTP servers of masters and clients have in common.
//!
//! In reading order: [`bounded`] (connections, bounded in number and in how long they may say
//! nothing), [`exposition`] (metrics as Prometheus text), [`reply`].
#![warn(missing_docs)]

pub mod bounded;
pub mod exposition;
pub mod reply;

pub use bounded::{Bounded, Peer};
pub use exposition::Exposition;
