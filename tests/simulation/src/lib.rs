//! Deterministic simulation with fault injection: a master, its log, many clients and their memory in
//! one thread, on a manual clock and a network that loses, duplicates and delays messages.
//!
//! One seed decides everything: the number of clients, their operations, and the faults. The state
//! machine of the master and the encoding of its log are the real ones. The clients follow the
//! protocol of the store client, and decide with its code about puts, about reads and their fences,
//! about registrations, and about the numbers and repetitions of calls; their memory is an array of words, so a misplaced write is noticed.
//!
//! In reading order: [`plan`] (derives a run from a seed), [`simulator`] (clock and event queue),
//! `host` (the master and its log), `client` with `session`, `put`, `get` and `task` (client operations),
//! `memory`, `network`, and the checkers: `allocation_model` (no range is allocated twice), `history`
//! (readers get the bytes that were put) and `audit` (invariants at the end of a run).

mod allocation_model;
mod audit;
mod call;
mod client;
mod disk;
mod get;
mod history;
mod host;
mod log_record;
mod memory;
mod network;
pub mod plan;
mod put;
mod random;
mod repeated_call;
mod session;
mod settle;
pub mod simulator;
mod task;

pub use plan::{Bug, Plan};
pub use simulator::{Outcome, Violation, run};
