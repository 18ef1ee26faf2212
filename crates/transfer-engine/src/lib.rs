//! Moves bytes between registered memory of processes: within one process, between processes of
//! one host, and over TCP.
//!
//! In reading order: [`engine`] (the whole), [`peer`] (another engine, and the paths to it),
//! [`config`] and [`process`] (what an engine is told, and what a fork does to it), [`token`] (a
//! secret that peers must know), [`piece`] (what
//! is moved), [`submit`] (transfers that their caller does not wait for), [`region`] (memory that others may reach), [`memory`] (memory of our own that peers
//! can map), [`managed`] (buffers cut from it), [`copy`] (bytes between addresses that may be bad),
//! [`descriptor`] (what a segment says of itself), [`metadata`] and [`handshake`] (where
//! segments are found, and the socket on which they are asked), [`transport`] (the seam behind
//! which the ways to move bytes sit), `choice` (which of them a batch takes), [`metrics`] (what was
//! moved over which way), `device` (memory of CUDA devices), [`topology`] (which network devices are near which memory).
#![warn(missing_docs)]

mod choice;
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
pub mod peer;
pub mod piece;
pub mod process;
pub mod region;
pub mod submit;
pub mod token;
pub mod topology;
pub mod transport;

pub use choice::{Footing, Measured};
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
pub use peer::Peer;
pub use piece::{LocalRange, Opcode, Piece, RemoteRange};
pub use region::{Region, Regions};
pub use submit::{BatchId, BatchStatus};
pub use token::Token;
pub use topology::Topology;
pub use transport::{Capability, Path, Transport, TransportKind};
