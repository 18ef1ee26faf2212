//! The settings of engines and clients that come from environment variables.
//!
//! The libraries take values and read no environment. The programs and the Python package read the
//! environment here, so that a variable has the same effect in each of them.
//!
//! In reading order: [`engine`] (transfer engines), [`client`] (clients and their link to the
//! master), [`disks`] (directories for copies of objects), `rdma` (RDMA devices, feature `rdma`; else `rdma_absent`), `variable` (one variable as a value).
#![warn(missing_docs)]

pub mod client;
pub mod disks;
pub mod engine;
#[cfg(feature = "rdma")]
pub mod rdma;
#[cfg(not(feature = "rdma"))]
mod rdma_absent;
mod variable;

pub use client::{client_config, link_config};
pub use disks::{disk_at, disks_of_environment, uses_ring};
pub use engine::{engine_config, store_engine_config};
#[cfg(feature = "rdma")]
pub use rdma::{rdma_settings, use_rdma, use_rdma_for_store};
#[cfg(not(feature = "rdma"))]
pub use rdma_absent::{use_rdma, use_rdma_for_store};
