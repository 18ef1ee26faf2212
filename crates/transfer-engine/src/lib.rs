//! Moves bytes between registered memory of processes: within one process, between processes of
//! one host, and over TCP.
//!
//! In reading order: [`piece`] (what is moved), [`region`] (memory that others may reach),
//! [`descriptor`] (what a segment says of itself), [`transport`] (the seam behind which the ways
//! to move bytes sit).
#![warn(missing_docs)]

pub mod descriptor;
pub mod piece;
pub mod region;
pub mod transport;

pub use descriptor::SegmentDescriptor;
pub use piece::{LocalRange, Opcode, Piece, RemoteRange};
pub use region::{Region, Regions};
pub use transport::{Capability, Path, Transport, TransportKind};
