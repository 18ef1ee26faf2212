//! The faults: of the network, and of machines and processes.

mod directories;
mod injection;
pub(crate) mod network;
