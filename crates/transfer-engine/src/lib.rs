//! Moves bytes between registered memory of processes: within one process, between processes of
//! one host, and over TCP.
//!
//! In reading order: [`engine`] (the whole), [`peer`] (another engine, and the paths to it),
//! [`config`] and [`fork`] (what an engine is told, and what a fork does to it), [`token`] (a
//! secret that peers must know), [`transfer_entry`] (what
//! is moved), [`async_transfer`] (transfers that their caller does not wait for), [`region`] (memory that others may reach), [`memory`] (memory of our own that peers
//! can map), [`managed`] (buffers cut from it), [`copy`] (bytes between addresses that may be bad),
//! [`descriptor`] (what a segment says of itself), [`metadata`] and [`handshake`] (where
//! segments are found, and the socket on which they are asked), [`transport`] (the seam behind
//! which the ways to move bytes sit), `path_selection` (which of them a batch takes), [`metrics`] (what was
//! moved over which way), `device` (memory of CUDA devices), [`topology`] (which network devices are near which memory).
#![warn(missing_docs)]

pub mod async_transfer;
pub mod config;
pub mod copy;
pub mod descriptor;
mod device;
pub mod engine;
pub mod fork;
#[cfg(test)]
mod fuzz;
pub mod handshake;
pub mod managed;
pub mod memory;
pub mod metadata;
pub mod metrics;
mod path_selection;
pub mod peer;
pub mod region;
pub mod token;
pub mod topology;
pub mod transfer_entry;
pub mod transport;

pub use async_transfer::{BatchId, BatchStatus};
pub use config::EngineConfig;
pub use descriptor::SegmentDescriptor;
pub use device::Stream;
pub use engine::{Engine, OnStream, Registry, address_facing};
pub use managed::ManagedBuffers;
pub use memory::{FileMemory, HugePages, SharedMemory};
pub use metrics::{
    EngineSnapshot, LatencySnapshot, PeerSnapshot, PoolSnapshot, QueueSnapshot, RefusalSnapshot,
    TransportSnapshot,
};
pub use path_selection::{PathMeasurement, RemoteMemory};
pub use peer::Peer;
pub use region::{Region, Regions};
pub use token::Token;
pub use topology::Topology;
pub use transfer_entry::{LocalRange, Opcode, RemoteRange, TransferEntry};
pub use transport::{Capability, Path, Transport, TransportKind};
