//! The handshake socket: where a process is asked for its segment descriptor, whether it lives,
//! and told notifications. One request per connection, in the established engine's frames.
//!
//! [`codec`] knows the frames and does no I/O, [`server`] answers on tokio, [`client`] asks from
//! the calling thread.

pub(crate) mod acceptor;
pub mod client;
pub mod codec;
pub(crate) mod dial;
pub mod server;
mod timed;

pub use client::{ask, fetch_descriptor, notify, probe};
pub use codec::{Message, MessageKind, Notification};
pub use dial::dial;
pub use server::{HandshakeServer, HandshakeSettings};
pub use timed::Timed;
