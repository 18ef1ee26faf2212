//! Puts and gets objects: placement from the master, payload straight between processes.
//!
//! In reading order: [`store`] (the short way in), [`client`] (the long one, with batches and
//! memory of the caller's own), [`object`] and [`task`] (what callers name and get back), [`config`], [`link`]
//! (the way to the master), [`metrics`], [`http`],
//! [`address`] (which of its addresses a store takes as its own).
#![warn(missing_docs)]

pub mod address;
pub mod client;
pub mod config;
pub mod http;
pub mod link;
pub mod metrics;
pub mod object;
pub mod store;
pub mod task;

pub use client::{Client, PartOutcomes, Reservation, Write};
pub use config::{ClientConfig, LinkConfig, MetricsConfig};
pub use http::HttpServer;
pub use link::{DaemonGreeting, DaemonLink, InProcessLink, MasterLink, SocketLink};
pub use metrics::MetricsSnapshot;
pub use object::{
    BufferScope, Located, MasterStatus, ObjectPage, ObjectStatus, ObjectSummary, Parts, Place,
    Presence, PutItem, PutOptions, PutOutcome, Read, SegmentInfo, SegmentUse, Selector, SoftPin,
    Span,
};
pub use store::Store;
pub use task::{DrainInfo, DrainStatus, NewTask, TaskInfo, TaskKind, TaskStatus};
