//! The handshake socket, on which a process serves its segment descriptor, answers liveness
//! checks and receives notifications. Each connection carries one request, in upstream's frames.
//!
//! An engine with a token sends its descriptor to, and accepts notifications from, only peers that
//! prove the token. Liveness checks are always answered, since others must be able to see that a
//! name is taken.
//!
//! [`codec`] and `proof` hold the messages and do no I/O, [`server`] answers on tokio, [`client`]
//! makes blocking requests.

pub mod client;
pub mod codec;
pub(crate) mod proof;
pub mod server;

pub(crate) use client::notification_length;
pub use client::{fetch_descriptor, notify, probe, request};
pub use codec::{Message, MessageKind, Notification};
pub use server::{HandshakeServer, HandshakeSettings};
