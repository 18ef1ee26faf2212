//! Puts and gets objects: placement by the master, payload directly between processes.
//!
//! In reading order: [`store`] (the simple API), [`client`] (the full API, with batches and
//! caller-owned memory), [`object`], [`Grid`] and [`task`] (arguments and results of calls), [`config`],
//! [`link`] (connections to the master), [`protocol`] (the client's decisions), [`metrics`], [`http`],
//! `disk` (directories of copies), [`address`] (choice of this host's own address).
#![warn(missing_docs)]

pub mod address;
pub mod client;
pub mod config;
mod disk;
mod fences;
mod grid;
pub mod http;
mod lifetime;
pub mod link;
pub mod master_address;
pub mod metrics;
pub mod object;
pub mod protocol;
mod replica;
mod rpc;
mod session;
pub mod store;
pub mod task;
mod transfer;

pub use client::{Client, GridsRead, PartOutcomes, Reservation, Sessions, Write};
pub use config::{
    ClientConfig, DiskConfig, DiskLimits, LinkConfig, MetricsConfig, PrefetchConfig, Watermarks,
};
pub use grid::{Grid, GridDimension};
pub use http::HttpServer;
pub use link::{
    CallFailure, DaemonGreeting, DaemonLink, InProcessLink, LocatedLink, MasterLink, SocketLink,
    open_link,
};
pub use master_address::MasterAddress;
pub use metrics::MetricsSnapshot;
pub use object::{
    BufferScope, FoundKeys, GridParts, Located, MasterStatus, ObjectDetails, ObjectPage,
    ObjectStatus, ObjectSummary, Parts, Place, Presence, ProbeTerms, PutItem, PutOptions,
    PutOutcome, Read, RemovalCounts, RemovalTerms, SegmentInfo, SegmentUse, Selector, SoftPin,
    Span, Suffixes,
};
pub use store::Store;
pub use task::{DrainInfo, DrainStatus, NewDrain, NewTask, TaskInfo, TaskKind, TaskStatus};

/// The examples of `README.md` are tested with the documentation.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
