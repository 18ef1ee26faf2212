//! Puts and gets objects: placement from the master, payload straight between processes.
//!
//! In reading order: [`object`] (what callers name and get back), [`config`], [`link`] (the way to
//! the master).
#![warn(missing_docs)]

pub mod config;
pub mod link;
pub mod object;

pub use config::{ClientConfig, LinkConfig};
pub use link::{CallLink, LeanLink, MasterLink};
pub use object::{
    Located, MasterStatus, ObjectPage, ObjectStatus, ObjectSummary, Place, PutItem, PutOptions,
    PutOutcome, Read, SegmentInfo, SegmentUse, Selector, SoftPin, Span,
};
