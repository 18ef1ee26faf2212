//! Moves bytes between registered memory of processes over RDMA devices.
//!
//! [`Devices`] opens the devices of an engine, registers memory with all of them, and answers peers that
//! connect. A [`PeerLink`] moves entries to and from one peer: it cuts them into slices, posts each on the
//! pair of devices that is estimated to be done first, tries slices that failed on another pair, and sets
//! pairs that failed aside for pauses that grow.
//!
//! The messages by which peers connect are upstream's. Who carries them is up to the caller.
//!
//! The files in layers. A file uses files of its own row and of the rows above.
//!
//! | Layer | File | Content |
//! |---|---|---|
//! | rules, without I/O | [`settings`], [`health`], [`load`] | settings; pairs that failed are set aside; how long a connection would take |
//! | | [`slices`], [`near_devices`] | cuts entries into slices; which devices are near a range |
//! | | [`rails`], [`rail_choice`] | the pairs of devices that reach a peer; which pair carries the next slices |
//! | what is moved | [`peer_memory`], [`registration`], [`round`] | memory of the peer; memory here; one try of slices |
//! | messages | [`hello`] | messages by which devices connect |
//! | devices and connections | [`usage`], [`address`], [`nic`] | counters; how peers reach a device; the device and its thread |
//! | | [`send_queue`], [`endpoint`], [`endpoints`] | a queue pair and what is in flight on it; how two devices connect; all pairs that are kept |
//! | entry points | [`devices`], [`link`], [`survey`] | the devices of an engine; transfers to one peer; what would be chosen |
#![warn(missing_docs)]

mod address;
mod devices;
mod endpoint;
mod endpoints;
mod health;
mod hello;
mod link;
mod load;
mod near_devices;
mod nic;
mod peer_memory;
mod rail_choice;
mod rails;
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
pub use registration::rule::{Location, MemorySource};
pub use settings::{PeerAffinity, RdmaSettings};
pub use slices::Entry;
pub use survey::{DeviceReport, survey};
