//! The handshake socket: where a process is asked for its segment descriptor, whether it lives,
//! and told notifications. One request per connection, in the established engine's frames.
//!
//! With a token, an engine tells its descriptor to, and takes notifications from, only who proves
//! that it knows the token; that it lives it tells to everybody, since others must be able to see
//! that a name is taken.
//!
//! [`codec`] and `proof` know the messages and do no I/O, [`server`] answers on tokio, [`client`] asks from
//! the calling thread.

pub(crate) mod acceptor;
pub mod client;
pub mod codec;
mod deadline_stream;
pub(crate) mod dial;
pub(crate) mod proof;
pub mod server;

pub use client::{fetch_descriptor, notify, probe, request};
pub use codec::{Message, MessageKind, Notification};
pub use deadline_stream::DeadlineStream;
pub use dial::dial;
pub use server::{HandshakeServer, HandshakeSettings};
