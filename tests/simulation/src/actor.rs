//! The actors: client processes with their operations. The code of the store client decides; an actor
//! carries its decisions out over the simulated network.

pub(crate) mod client;
pub(crate) mod connections;
pub(crate) mod directory_owner;
pub(crate) mod get;
mod operation;
pub(crate) mod put;
pub(crate) mod repeated_call;
pub(crate) mod session;
pub(crate) mod settle;
pub(crate) mod task;
mod transfer;
