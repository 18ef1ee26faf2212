//! Keeps records of objects in a directory, and finds them again after a crash.
//!
//! A [`Disk`] owns one directory: a file with its identity, a lock, and *extents*, which are
//! preallocated files of equal size. Records are appended to the open extent. A full extent is
//! sealed: its records reach the device, then a list of them is written behind them, so that the
//! next start reads lists instead of records. When no extent is free, the oldest and least read one
//! is used again; live records of it that were read are written anew before that.
//!
//! It is a cache: no write waits for the device, and a loss of power may lose what is not sealed.
//! Bytes are returned only if the record at their place names the tenant, key and version that were
//! asked for, and if every checksum holds. The crate knows nothing of masters, messages or memory of
//! engines.
//!
//! In reading order: [`format`](mod@format) (bytes, without I/O), [`file_system`] (the seam below),
//! [`directory`] (identity and lock), [`extent`] (one file), `index` (what lies where), `memory` (what
//! reads write to) and `reader` (a ring, or threads), [`disk`] (reads, writes, reuse), [`inspect`] (for
//! people), [`measure`](mod@measure) (rates), [`error`]. Unsafe code is in `memory` and in the ring of the `reader` only.
#![warn(missing_docs)]
#![deny(unsafe_code)]

pub mod directory;
pub mod disk;
pub mod error;
pub mod extent;
pub mod file_system;
pub mod format;
#[cfg(test)]
mod fuzz;
mod index;
pub mod inspect;
pub mod measure;
mod memory;
mod reader;

pub use disk::{Disk, Options, Read, ReadOutcome, ReadRequest, Statistics, Write, WriteOutcome};
pub use error::{Error, Result};
pub use format::{Name, OwnedName};
pub use memory::Destination;
pub use reader::{ChosenReadMethod, ReadMethod};
