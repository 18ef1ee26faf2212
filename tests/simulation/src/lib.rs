//! Deterministic simulation with fault injection: a master, its log, many clients and their memory in
//! one thread, on clocks that are moved by hand and a network that loses, duplicates and delays
//! messages.
//!
//! One seed decides everything: the size of the cluster, the operations, and the faults. The state
//! machine of the master, its guard, its log and their encoding are the real ones; the service around
//! them (slices of calls, answers that wait for the log, admission) is carried out by events. The
//! clients follow the protocol of the store client, and decide with its code about puts, about reads
//! and their fences, about registrations, and about the numbers and repetitions of calls; their memory
//! is an array of words, so that a misplaced write is noticed. Some have directories of records.
//!
//! Where to look:
//!
//! - [`plan`]: profiles (sizes), fault rates, and planted bugs, derived from a seed.
//! - [`simulator`]: the clock, the queue of events, and what a run counts.
//! - `host`: the machine of the master: its service, its log, its disk.
//! - `actor`: client processes and their operations; their connections, transfers and tasks.
//! - `directory`: directories of records, as they lie on devices.
//! - `fault`: the network, crashes, hanging disks, clocks.
//! - `audit`: the checkers, which follow the run, and the invariants at its end.

mod actor;
mod audit;
mod call;
mod directory;
mod fault;
mod host;
mod memory;
pub mod plan;
mod random;
pub mod simulator;

pub use plan::{Bug, Plan};
pub use simulator::{Outcome, Violation, run};
