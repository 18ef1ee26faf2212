//! The faults: of the network, and of machines and processes.

mod injection;
pub(crate) mod network;
