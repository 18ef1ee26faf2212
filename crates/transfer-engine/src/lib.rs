//! Moves bytes between registered memory of processes: within one process, between processes of one
//! host, and over TCP.
//!
//! Modules in reading order:
//!
//! [`engine`] (the entry point), [`peer`] (another engine and the paths to it), [`config`]
//! (settings), [`token`] (the shared secret of a fleet),
//! [`transfer_entry`] (the unit of work), [`async_transfer`] (transfers that the caller does not
//! wait for), [`region`] (registered memory), [`memory`] (shared memory that peers can map),
//! [`managed`] (buffers cut from it), [`copy`] (copies between addresses that may be bad),
//! [`descriptor`] (the segment descriptor), [`metadata`] and [`handshake`] (how segments are found
//! and asked for their descriptor), [`transport`] (the interface of all transports),
//! `path_selection` (which transport serves a batch), [`metrics`] (counters and latencies),
//! `device` (memory of CUDA devices), [`topology`] (which network devices are near which memory).
#![warn(missing_docs)]

pub mod async_transfer;
pub mod config;
pub mod copy;
pub mod descriptor;
mod device;
pub mod engine;
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
pub use memory::{FileMemory, HugePages, MemoryHold, SharedMemory};
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
pub use transport::{Capability, Path, TimeLimits, Transport, TransportKind};
