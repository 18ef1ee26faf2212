//! Collective operations between processes that continue after a member dies.
//!
//! A [`Context`] is the process's part: listeners that bind one address, one connection to each
//! other rank, and a link to the coordinator, which lives in global rank 0. A [`Group`] carries out
//! [`Operation`]s in the order of calls. Every operation ends when all members have their data, so
//! that either all of them have it or none has written anything; if a member is lost, the members
//! of the new view do an operation again that not all of them have the data of.
//!
//! The files in layers. A file uses files of its own row and of the rows above.
//!
//! | Layer | File | Content |
//! |---|---|---|
//! | rules, without I/O | [`membership`], [`heartbeats`] | the coordinator's: views of groups, one by one in `membership/group_members.rs`; ranks that are silent |
//! | | [`progress`] | a member's: its view, its operation, and what a change of the view makes of it |
//! | | [`message`], [`rank_frame`], [`call`], [`operation_kind`] | what goes between coordinator and ranks, and between ranks; what a rank has called |
//! | memory | [`memory`], [`reduce`], [`buffers`] | ranges of callers; reductions; buffers that are used again |
//! | | [`shared_memory`], [`ring`], [`shared_futex`] | memory of two processes: frames in it, and a thread that sleeps until one comes |
//! | | [`peer_memory`], [`staging`], [`fabric`] | memory of other ranks: lent, copied to where they map it, read from other hosts |
//! | ends of operations | [`outcome`], [`metrics`], [`thread_waker`], [`completion`] | the result; counters; a thread that waits; the end that threads wait for, and the trait of what brings it |
//! | operations | [`collectives`] | who sends what to whom |
//! | connections | [`auth`], [`link`] | the proof of the token; one connection, and a frame that is sent in parts in `link/frame_sender.rs` |
//! | | [`inbox`] | the state of one group, and what has arrived for it; messages in `inbox/messages.rs` |
//! | | [`mesh`] | all connections, and the threads that wait for frames |
//! | processes | [`coordinator`], [`agent`] | the coordinator, and the link to it |
//! | parts of a group | [`own_rank`] | what all parts need: slot, state, connections, counters |
//! | | [`frame_wait`], [`operation_queue`] | how a thread waits for frames; who carries out operations, in which order |
//! | | [`contributions`], [`attempt`], [`operation_runner`] | memory that peers read; one attempt of an operation; attempts until one is whole |
//! | | [`messenger`] | sends and receives; threads that write in `messenger/writing.rs` |
//! | entry points | [`group`], [`context`] | a group; the process |
#![warn(missing_docs)]

mod agent;
mod attempt;
mod auth;
mod buffers;
mod call;
mod collectives;
mod completion;
mod context;
mod contributions;
mod coordinator;
mod fabric;
mod frame_wait;
mod group;
mod heartbeats;
mod inbox;
mod link;
mod membership;
mod memory;
mod mesh;
mod message;
mod messenger;
mod metrics;
mod operation_kind;
mod operation_queue;
mod operation_runner;
mod outcome;
mod own_rank;
mod peer_memory;
mod progress;
mod rank_frame;
mod reduce;
mod ring;
mod shared_futex;
mod shared_memory;
mod staging;
mod thread_waker;

pub use call::ELEMENTS;
pub use collectives::Operation;
pub use completion::Completion;
pub use context::{Context, ContextConfig, GroupConfig};
pub use fabric::Fabric;
pub use group::Group;
pub use membership::CAPACITY_MAX;
pub use memory::{HostRange, Mirror};
pub use message::{Answer, Status};
pub use metrics::{Counters, OperationCounters};
pub use outcome::Outcome;
pub use own_rank::add_metrics;
pub use reduce::{Dtype, Reduction};
