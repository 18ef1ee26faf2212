//! Sends data and tensors to another process over TCP and reports whether it accepted them.
//!
//! For small programs that pass messages without a store. A [`Server`] listens and hands a
//! [`Delivery`] to each caller of `take`. A [`Client`] sends to any number of servers over a
//! connection pool per server, from any number of threads; each call blocks only its own thread.
//! Every wait has a time limit, every queue a bound, and no runtime is needed.
//!
//! In reading order: [`rpc_message`] (the wire format), [`client`], [`server`].
#![warn(missing_docs)]

mod body_budget;
pub mod client;
#[cfg(test)]
mod fuzz;
pub mod rpc_message;
pub mod server;

pub use client::{Client, ClientConfig};
pub use rpc_message::Kind;
pub use server::{Delivery, Server, ServerConfig};
