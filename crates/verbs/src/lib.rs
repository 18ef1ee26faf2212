//! Owning, safe types over ibverbs: devices, protection domains, registered memory, completion
//! queues.
//!
//! The library is loaded at run time by name, so that a program built with the feature `rdma` also
//! starts on machines without RDMA libraries; [`Library::load`] reports what is missing there.
//! Without the feature the same names exist, and [`Library::load`] reports that.
//!
//! Every handle owns its parents: a [`MemoryRegion`] holds its [`ProtectionDomain`], which holds
//! its [`Context`], which holds the [`Library`]. The drop order is therefore always right. All
//! handles may be used from several threads at once, as ibverbs allows.
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

/// Returns the names of this machine's RDMA devices, such as `mlx5_0`; empty if there are none.
///
/// # Errors
/// The program was built without RDMA, the library is not installed, or the kernel refused.
pub fn device_names() -> Result<Vec<String>> {
    Library::load()?.device_names()
}
