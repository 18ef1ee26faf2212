//! Options of a put: replicas, pins and placement.

use std::time::Duration;

use mooncake_base::{Error, Result};

use crate::state::tags::Tags;

/// Checks the time to live of an object.
///
/// # Errors
/// `INVALID_PARAMS`: the time is zero.
pub(in crate::state) fn check_ttl(ttl: Option<Duration>) -> Result<()> {
    match ttl {
        Some(Duration::ZERO) => Err(Error::invalid("the time to live is longer than zero")),
        _ => Ok(()),
    }
}

/// Soft pin of a put object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SoftPin {
    /// Keep the pin of the replaced object; a new object has none.
    #[default]
    Preserve,
    /// Pin for this long after the last access; `None`: for the default time.
    Enable(Option<Duration>),
    /// No pin.
    Disable,
}

/// Placement and retention of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PutOptions {
    /// Requested replicas, at least 1. Fewer are made if there are too few segments.
    pub replicas: u32,
    /// Soft pin.
    pub soft_pin: SoftPin,
    /// Never evict the object.
    pub is_hard_pinned: bool,
    /// Names of segments to try first, in this order. Unknown names are ignored.
    pub preferred_segments: Vec<String>,
    /// Try the segments of the writer's host before others, after the preferred ones.
    pub is_same_node_preferred: bool,
    /// Stored for readers.
    pub data_type: u8,
    /// Remove the object this long after the put has ended; `None`: never.
    pub ttl: Option<Duration>,
    /// Text stored beside the object.
    pub tags: Tags,
}

impl Default for PutOptions {
    fn default() -> Self {
        Self {
            replicas: 1,
            soft_pin: SoftPin::Preserve,
            is_hard_pinned: false,
            preferred_segments: Vec::new(),
            is_same_node_preferred: false,
            data_type: 0,
            ttl: None,
            tags: Tags::default(),
        }
    }
}

/// What few puts ask for, kept until they end.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Terms {
    /// Publish only in place of this version of the object.
    pub if_version: Option<u64>,
    /// Remove the object this long after the put has ended.
    pub ttl: Option<Duration>,
    /// Text stored beside the object.
    pub tags: Tags,
}

/// A checked soft pin of a put.
#[derive(Debug, Clone, Copy)]
pub(in crate::state) enum RequestedPin {
    /// Keep the pin of the replaced object.
    Preserve,
    /// No pin.
    None,
    /// Pin for this long after the last access.
    For(Duration),
}
