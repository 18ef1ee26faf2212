//! Moves bytes between registered memory of processes: within one process, between processes of one
//! host, and over TCP.
//!
//! Modules in reading order:
//!
//! [`engine`] (the entry point, with batches that the caller does not wait for), [`config`]
//! (settings), [`token`] (the shared secret of a fleet), [`transfer_entry`] (the unit of work),
//! [`path`] (the paths to another engine and the choice among them), [`transport`] (the interface of
//! all transports, and each of them), [`memory`] (registered memory, and shared memory that peers can
//! map), [`copy`] (copies between addresses that may be bad),
//! [`discovery`] (how segments are found and asked for their descriptor), `acceptor` (a listener
//! with a limit of connections), [`metrics`] (counters and latencies), `device` (memory of CUDA
//! devices), [`topology`] (which network devices are near which memory).
#![warn(missing_docs)]

mod acceptor;
pub mod config;
pub mod copy;
mod device;
pub mod discovery;
pub mod engine;
#[cfg(test)]
mod fuzz;
pub mod memory;
pub mod metrics;
pub mod path;
pub mod token;
pub mod topology;
pub mod transfer_entry;
pub mod transport;
mod transport_kind;

pub use config::EngineConfig;
/// Settings of RDMA devices.
#[cfg(feature = "rdma")]
pub mod rdma {
    pub use mooncake_rdma::{DeviceReport, PeerAffinity, RdmaSettings, survey};
    pub use mooncake_verbs::Mtu;
}
pub use device::Stream;
pub use discovery::descriptor::SegmentDescriptor;
pub use engine::{
    BatchId, BatchStatus, Engine, ManagedBuffers, OnStream, Registry, address_facing,
};
pub use memory::{FileMemory, HeldRange, HugePages, MemoryHold, Region, Regions, SharedMemory};
pub use metrics::{
    EngineSnapshot, PeerSnapshot, PoolSnapshot, QueueSnapshot, RefusalSnapshot, TransportSnapshot,
};
pub use path::{peer::Peer, selection::PathMeasurement};
pub use token::Token;
pub use topology::Topology;
pub use transfer_entry::{LocalRange, Opcode, Ownership, RemoteRange, TransferEntry};
pub use transport::{Capability, Path, RemoteMemory, TimeLimits, Transport};
pub use transport_kind::TransportKind;

/// The examples of `README.md` are tested with the documentation.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
