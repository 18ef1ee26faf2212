//! The pool: segments, their free memory, and memory that must not be used again yet.

pub mod allocator;
pub(super) mod host;
pub mod placement;
pub(super) mod quarantine;
pub(super) mod segment;
pub(super) mod unsynced;
