//! The decisions of a client: which calls are repeated, what stands in the way of a put, how a put is
//! closed. No clock, no I/O and no threads: callers pass the time and carry the decisions out, which
//! the client does with real calls and the simulation (`tests/simulation`) with simulated ones.
//!
//! In reading order: [`call_retry`] (repeats one call), [`call_numbers`] (numbers calls that are
//! not idempotent), [`own_puts`] (the client's puts that are
//! being written, and those that it must still revoke), [`put`] (starts and closes puts).

pub mod call_numbers;
pub mod call_retry;
pub mod own_puts;
pub mod put;

pub use call_numbers::CallNumbers;
pub use call_retry::{AttemptFailure, CallKind, CallRetry};
pub use own_puts::{OwnPuts, UnconfirmedPut};
pub use put::{
    ClosePuts, CloseStep, Closing, PutRetry, Refusal, StartPuts, StartStep, StartVerdict,
};
