//! Puts and gets objects: placement from the master, payload straight between processes.
//!
//! In reading order: [`object`] (what callers name and get back), [`client`] (what they call),
//! [`config`], [`link`] (the way to the master), [`metrics`].
#![warn(missing_docs)]

pub mod client;
pub mod config;
pub mod link;
pub mod metrics;
pub mod object;

pub use client::{Client, Reservation, Write};
pub use config::{ClientConfig, LinkConfig};
pub use link::{CallLink, LeanLink, MasterLink};
pub use metrics::MetricsSnapshot;
pub use object::{
    Located, MasterStatus, ObjectPage, ObjectStatus, ObjectSummary, Place, PutItem, PutOptions,
    PutOutcome, Read, SegmentInfo, SegmentUse, Selector, SoftPin, Span,
};
