//! Hands data and tensors to another process over TCP, and says whether it took them.
//!
//! For small programs that want to pass something along without a store: a [`Server`] listens and
//! gives out [`Delivery`]s to whoever asks for the next; a [`Client`] sends to any number of
//! servers over a few connections each, from any number of threads, which block for their own call
//! only. Every wait ends, everything is bounded, and no runtime is needed.
//!
//! In reading order: [`frame`] (what goes over the wire), [`client`], [`server`].
#![warn(missing_docs)]

pub mod client;
pub mod frame;
#[cfg(test)]
mod fuzz;
pub mod server;

pub use client::{Client, ClientConfig};
pub use frame::Kind;
pub use server::{Delivery, Server, ServerConfig};
