//! Collective operations between processes that continue after a member dies.
//!
//! A [`Context`] is the process's part: listeners that bind one address, one connection to each
//! other rank, and a link to the coordinator, which lives in global rank 0. A [`Group`] carries out
//! [`Operation`]s in the order of calls. Every operation ends when all members have their data, so
//! that either all of them have it or none has written anything; if a member is lost, the members
//! of the new view do an operation again that not all of them have the data of.
//!
//! In reading order: [`membership`], [`heartbeats`] and [`progress`] (the rules, without I/O), [`message`], [`coordinator`],
//! [`context`] (the process), [`frame`], [`shared_memory`], [`ring`] (frames in it),
//! [`shared_futex`] (where a thread sleeps until a frame comes),
//! [`link`] (a connection), [`mesh`] (all of them, and who waits for frames), [`inbox`] (the state of a group), [`group`],
//! [`line`] (who carries out its operations),
//! [`attempt`] (one attempt of an operation), [`call`] (what a rank has called), [`collectives`] (who sends what), [`messages`],
//! [`reduce`], [`memory`], [`peer_memory`] (memory of other ranks), [`staging`] (contributions in
//! shared memory), [`fabric`] (memory of other hosts), [`buffers`], [`completion`],
//! [`auth`], [`metrics`].
#![warn(missing_docs)]

mod attempt;
mod auth;
mod buffers;
mod call;
mod collectives;
mod completion;
mod context;
mod coordinator;
mod fabric;
mod frame;
mod group;
mod heartbeats;
mod inbox;
mod line;
mod link;
mod membership;
mod memory;
mod mesh;
mod message;
mod messages;
mod metrics;
mod peer_memory;
mod progress;
mod reduce;
mod ring;
mod shared_futex;
mod shared_memory;
mod staging;

pub use call::ELEMENTS;
pub use collectives::Operation;
pub use completion::{Completion, Outcome};
pub use context::{Context, ContextConfig, GroupConfig};
pub use fabric::Fabric;
pub use group::Group;
pub use membership::CAPACITY_MAX;
pub use memory::{HostRange, Mirror};
pub use message::{Answer, Status};
pub use metrics::{Counters, OperationCounters, add_metrics};
pub use reduce::{Dtype, Reduction};
