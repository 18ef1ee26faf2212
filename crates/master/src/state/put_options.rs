//! How whoever puts an object wishes it to be kept.

use std::time::Duration;

/// What becomes of the soft pin of an object that is put.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SoftPin {
    /// The pin of the object that is replaced stays; a new object has none.
    #[default]
    Preserve,
    /// Pinned for that long after the last access; `None`: as long as the rules say.
    Enable(Option<Duration>),
    /// Not pinned.
    Disable,
}

/// How an object is to be kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PutOptions {
    /// Wished copies, at least 1. Fewer are made where there are not enough segments.
    pub replicas: u32,
    /// What becomes of the soft pin.
    pub soft_pin: SoftPin,
    /// Never evict it.
    pub is_hard_pinned: bool,
    /// Names of segments to try first, in this order. Unknown names are passed over.
    pub preferred_segments: Vec<String>,
    /// Try the segments of the writer's own host before others (after the preferred ones).
    pub is_same_node_preferred: bool,
    /// Kept and handed back.
    pub data_type: u8,
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
        }
    }
}

/// A soft pin that a put wishes, checked.
#[derive(Debug, Clone, Copy)]
pub(super) enum WishedPin {
    /// That of the object it replaces.
    Preserve,
    /// None.
    None,
    /// So long after the last access.
    For(Duration),
}
