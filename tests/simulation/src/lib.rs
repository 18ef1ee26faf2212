//! A whole cluster in one thread: a master, its log, many clients and their memory, on a clock that
//! is moved by hand and a network that loses, doubles and delays.
//!
//! One seed decides everything: how many clients there are, what they do, and when something
//! breaks. The master is the real one, its rules and its log; the clients keep the protocol of the
//! store's client, and their memory is a list of words, so that a byte in the wrong place is seen.
//! In reading order: [`plan`] (what a seed means), [`world`] (time and events), `host` (the master
//! and its log), `client` with `put`, `get` and `task` (what clients do), `memory`, `network`, and those
//! that judge: `ledger` (no memory is given away twice), `truth` (readers get what was put) and
//! `audit` (what is left when all is calm).

mod audit;
mod call;
mod client;
mod get;
mod host;
mod ledger;
mod memory;
mod network;
pub mod plan;
mod put;
mod random;
mod task;
mod truth;
pub mod world;

pub use plan::{Bug, Plan};
pub use world::{Outcome, Violation, run};
