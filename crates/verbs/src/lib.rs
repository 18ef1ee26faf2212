//! Owning, safe types over ibverbs: devices, protection domains, registered memory, completion queues,
//! queue pairs of reliable connections.
//!
//! The library is loaded at run time by name, so that a program built with the feature `rdma` also
//! starts on machines without RDMA libraries; [`Library::load`] reports what is missing there.
//! Without the feature the same names exist, and [`Library::load`] reports that.
//!
//! Every handle owns its parents: a [`MemoryRegion`] holds its [`ProtectionDomain`], which holds
//! its [`Context`], which holds the [`Library`]. The drop order is therefore always right. All
//! handles may be used from several threads at once, as ibverbs allows; posting takes a queue pair
//! exclusively, so that requests of several threads do not mix.
//!
//! In reading order: [`error`], `library` (the table of functions), `device`, `context`, `port`, `gid`,
//! `event`; `protection_domain`, `memory_region`; `completion_channel`, `completion_queue`, `completion`;
//! `queue_pair`, `posting`; `fake` (a simulated fabric for tests, feature `test-util`).
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
mod completion;
#[cfg(feature = "rdma")]
mod completion_channel;
#[cfg(feature = "rdma")]
mod completion_queue;
#[cfg(feature = "rdma")]
mod context;
#[cfg(feature = "rdma")]
mod device;
#[cfg(feature = "rdma")]
mod event;
#[cfg(all(feature = "rdma", feature = "test-util"))]
pub mod fake;
#[cfg(feature = "rdma")]
mod file_descriptor;
#[cfg(feature = "rdma")]
mod gid;
#[cfg(feature = "rdma")]
mod library;
#[cfg(feature = "rdma")]
mod memory_region;
#[cfg(feature = "rdma")]
mod port;
#[cfg(feature = "rdma")]
mod posting;
#[cfg(feature = "rdma")]
mod protection_domain;
#[cfg(feature = "rdma")]
mod queue_pair;

#[cfg(not(feature = "rdma"))]
#[path = "absent.rs"]
mod library;

pub use error::{Error, Result};
pub use library::Library;

#[cfg(feature = "rdma")]
pub use {
    completion::{Completion, Status},
    completion_channel::CompletionChannel,
    completion_queue::CompletionQueue,
    context::{Context, DeviceLimits},
    device::Device,
    event::AsyncEvent,
    gid::{Gid, GidEntry, GidKind, rank_gids},
    library::ForkSafety,
    memory_region::{Access, LocalRange, MemoryRegion, Ordering, Owner, RemoteRange},
    port::{LinkLayer, Mtu, Port, PortState},
    posting::{Operation, Posting, Request, SubmitError},
    protection_domain::ProtectionDomain,
    queue_pair::{
        ConnectError, ConnectedQueuePair, ConnectionSettings, PeerAddress, QueuePair,
        QueuePairLimits, QueuePairState,
    },
};

/// Returns the names of this machine's RDMA devices, such as `mlx5_0`; empty if there are none.
///
/// # Errors
/// The program was built without RDMA, the library is not installed, or the kernel refused.
pub fn device_names() -> Result<Vec<String>> {
    Library::load()?.device_names()
}
