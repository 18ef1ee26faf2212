//! The paths to other engines: a path is a transport to one peer.
//!
//! [`peer`] opens, repairs and closes the paths to one engine; `selection` decides which of them
//! serves a batch, by measured speed.

pub mod peer;
pub(crate) mod selection;
