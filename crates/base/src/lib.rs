//! The types that every other crate uses: ids, keys, sizes, endpoints, errors, the clock, and the
//! declarations of options and environment variables.
//!
//! The crate does no I/O except reading the clock and the random source, has no async code, and
//! depends on no other crate of this workspace.
//!
//! In reading order: [`error`] (one error type and the table of codes), [`id`], [`key`],
//! [`size`], [`endpoint`], [`clock`], [`options`]
//! (flags, files and environment from one declaration), [`env`](mod@env) (the register of
//! environment variables), [`parse`] (values as people write them),
//! [`random`] (numbers that repeat with a seed), [`backoff`] (pauses between
//! attempts), [`counter`], [`histogram`], [`running_mean`] and [`device_usage`] (measurements), [`exposition`]
//! (metrics as Prometheus text), [`sync`] (locks that stay usable in a forked child), [`token`] (a shared secret
//! and the proof of it), and for tests only `fuzz` (mutated bytes for decoders).
#![warn(missing_docs)]

pub mod backoff;
pub mod clock;
pub mod counter;
pub mod device_usage;
pub mod endpoint;
pub mod engine_code;
pub mod env;
pub mod error;
pub mod exposition;
#[cfg(any(test, feature = "test-util"))]
pub mod fuzz;
pub mod histogram;
pub mod id;
pub mod key;
pub mod options;
pub mod parse;
pub mod random;
#[cfg(any(test, feature = "test-util"))]
pub mod requirement;
pub mod running_mean;
pub mod size;
pub mod sync;
pub mod token;

pub use backoff::Backoff;
pub use clock::{Clock, Moment, SystemClock};
pub use device_usage::{DeviceCounters, DeviceUsage};
pub use endpoint::Endpoint;
pub use error::{Error, ErrorCode, ErrorKind, Result};
pub use id::{
    ClientId, EngineId, EngineMark, Incarnation, JobId, ReplicaId, SegmentId, TaskId, Version,
};
pub use key::{KeyBatch, KeyRef, ObjectKey, TenantId};
pub use size::ByteSize;
pub use token::Token;

/// The examples of `README.md` are tested with the documentation.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
