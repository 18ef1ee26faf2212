//! How engines find each other: a metadata store tells where the owner of a segment listens, and the
//! owner sends its segment descriptor over the handshake socket.
//!
//! In reading order: [`descriptor`] (what an owner publishes), [`metadata`] (where segments are
//! found), [`handshake`] (how owners are asked).

pub mod descriptor;
pub mod handshake;
pub mod metadata;
