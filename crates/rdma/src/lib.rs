//! Moves bytes between registered memory of processes over RDMA devices.
//!
//! [`Devices`] opens the devices of an engine, registers memory with all of them, and answers peers that
//! connect. A [`PeerLink`] moves entries to and from one peer: it cuts them into slices, posts each on the
//! pair of devices that is estimated to be done first, tries slices that failed on another pair, and sets
//! pairs that failed aside for pauses that grow.
//!
//! The messages by which peers connect are upstream's. Who carries them is up to the caller.
//!
//! In reading order: [`settings`], `slices`, `near_devices` and `peer_memory` (what is moved), `hello`
//! (messages), `health`, `round` (one try of slices), `send_queue` (a queue pair and what is in flight on
//! it), `usage` (counters of a device), `address` (how peers reach a device), `nic` (a device and its thread),
//! `registration`, `endpoint` (how two devices connect), `endpoints`, `link`, `devices`; `survey` (what would be
//! chosen).
#![warn(missing_docs)]

mod address;
mod devices;
mod endpoint;
mod endpoints;
mod health;
mod hello;
mod link;
mod near_devices;
mod nic;
mod peer_memory;
mod registration;
mod round;
mod send_queue;
pub mod settings;
mod slices;
mod survey;
mod usage;

pub use devices::Devices;
pub use link::{EntryError, Limits, PeerExchange, PeerLink};
pub use mooncake_verbs::Operation;
pub use peer_memory::{BufferDescription, DeviceDescription, PeerDescription};
pub use registration::{Location, MemorySource};
pub use settings::{PeerAffinity, RdmaSettings};
pub use slices::Entry;
pub use survey::{DeviceReport, survey};
pub use usage::DeviceUsage;
