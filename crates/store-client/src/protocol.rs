//! The decisions of a client: which calls are repeated, what stands in the way of a put, how a put is
//! closed, which replica is read and whether its bytes count, when the client registers. No clock, no
//! I/O and no threads: callers pass the time and carry the decisions out, which the client does with
//! real calls and the simulation (`tests/simulation`) with simulated ones.
//!
//! In reading order: [`call_retry`] (repeats one call), [`call_numbers`] (numbers calls that are
//! not idempotent), [`own_puts`] (the client's puts that are being written, and those that it must
//! still revoke), [`put`] (starts and closes puts; which are tried again is in [`put::rounds`]),
//! [`replica_order`](mod@replica_order) (orders the replicas of an object), [`read`] (reads objects),
//! [`fences`] (the ends of fences, and their release), [`session`] (the registration, and the
//! announcement of segments), [`directory`] (the announcement of directories of records, and objects
//! that they take over).

use std::time::Duration;

pub mod call_numbers;
pub mod call_retry;
pub mod directory;
pub mod fences;
pub mod own_puts;
pub mod put;
pub mod read;
pub mod replica_order;
pub mod session;

pub use call_numbers::CallNumbers;
pub use call_retry::{AttemptFailure, CallKind, CallRetry, RetryPatience};
pub use directory::{DirectorySession, DirectoryStep, hand_over_end, leave_out_dropped};
pub use fences::{FenceReleases, GrantedFence, fence_end};
pub use own_puts::{OwnPuts, UnconfirmedPut};
pub use put::{
    ClosePuts, CloseStep, Closing, Refusal, StartPuts, StartStep, StartVerdict,
    rounds::{PutPatience, PutRetry, PutRounds},
};
pub use read::{ReadExtent, ReadObjects, ReadReplica, ReadSource, ReadStep};
pub use replica_order::{ReplicaRank, replica_order};
pub use session::{
    Announcement, HeartbeatAnswer, LogMark, MasterIdentity, MountVerdict, Session,
    registration::{LostSegments, Registered, Registration, RegistrationStep, check_all_known},
};

/// Time without a moved byte after which a peer is left, if there may be another one.
pub const STALL_LIMIT: Duration = Duration::from_secs(1);
