//! Reading: locate grants a lease and a fence; verify asks whether a late read still counts.

use std::time::Duration;

use mooncake_base::{Result, Version};

use super::{put::Place, query::ObjectState};

/// What a locate asks for beside the places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Grant {
    /// Grant or refresh the retention lease.
    pub has_lease: bool,
    /// Give the memory to nobody else while the bytes are read.
    pub has_fence: bool,
}

/// The answer to a locate of several keys.
#[derive(Debug, Clone)]
pub struct Located {
    /// One for each key, in their order.
    pub objects: Vec<Result<LocatedObject>>,
    /// How long from `now` the memory of all of them is fenced; zero if no fence was asked for.
    pub fence: Duration,
}

/// Where an object lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocatedObject {
    /// Which life of the object this is.
    pub version: Version,
    /// Its length in bytes.
    pub length: u64,
    /// Copies that may be read, at least one.
    pub places: Vec<Place>,
    /// The checksum its writer gave.
    pub checksum: Option<u64>,
    /// What its writer said it is.
    pub data_type: u8,
}

/// The answer to a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Probed {
    /// Absent, being written, or complete.
    pub state: ObjectState,
    /// The length of a complete object, else 0.
    pub length: u64,
}
