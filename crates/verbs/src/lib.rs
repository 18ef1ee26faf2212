//! Owning, safe types over ibverbs: devices, protection domains, registered memory, completion
//! queues.
//!
//! The library itself is loaded at run time by name, so that a program built with the feature
//! `rdma` starts on machines that have never heard of RDMA; [`Library::load`] says what is missing
//! there. Without the feature the same names exist and [`Library::load`] says so.
//!
//! Every handle owns what it was made from: a [`MemoryRegion`] holds its [`ProtectionDomain`], that
//! its [`Context`], that the [`Library`], so that they go away in the right order whatever the
//! caller drops first. All of them may be used from several threads at once, as ibverbs allows.
//!
//! In reading order: [`error`], `library` (the table of functions), `device`, `context` (ports and
//! addresses), `domain`, `memory`, `queue`.
//!
//! ```
//! match mooncake_verbs::device_names() {
//!     Ok(names) => println!("RDMA devices: {names:?}"),
//!     Err(reason) => println!("no RDMA: {reason}"),
//! }
//! ```
#![warn(missing_docs)]

pub mod error;

#[cfg(feature = "rdma")]
mod context;
#[cfg(feature = "rdma")]
mod device;
#[cfg(feature = "rdma")]
mod domain;
#[cfg(feature = "rdma")]
mod library;
#[cfg(feature = "rdma")]
mod memory;
#[cfg(feature = "rdma")]
mod queue;

#[cfg(not(feature = "rdma"))]
#[path = "absent.rs"]
mod library;

pub use error::{Error, Result};
pub use library::Library;

#[cfg(feature = "rdma")]
pub use {
    context::{Context, DeviceLimits, Gid, LinkLayer, Port, PortState},
    device::Device,
    domain::ProtectionDomain,
    memory::{Access, MemoryRegion},
    queue::{Completion, CompletionQueue},
};

/// The names of the RDMA devices of this machine, such as `mlx5_0`; empty if it has none.
///
/// # Errors
/// The program was built without RDMA, the library is not installed, or the kernel refused.
pub fn device_names() -> Result<Vec<String>> {
    Library::load()?.device_names()
}
