//! Elects one leader among several masters by a lease in an existing service: etcd, Redis or
//! Kubernetes.
//!
//! The service holds two values. The *leader's key* has the address of the leader and disappears when
//! its lease ends. The *in-sync set* names the members that have every change that was acknowledged;
//! only they may become leader. Both are changed together, in one transaction.
//!
//! [`rules`] decides, without I/O and with the time handed in; [`service`] is the seam to the
//! services; [`Elector`] connects the two. The crate knows nothing of what the masters replicate.
//!
//! In reading order: [`view`] (who leads, in which view), [`in_sync`] (who may lead), [`service`],
//! [`rules`], [`etcd`], [`redis`], [`kubernetes`], [`elector`].
#![warn(missing_docs)]

pub mod elector;
pub mod etcd;
pub mod in_sync;
pub mod kubernetes;
pub mod redis;
pub mod rules;
pub mod service;
#[cfg(any(test, feature = "test-util"))]
mod simulated_service;
pub mod view;

use mooncake_kv_client::ErrorTexts;

pub use elector::{Elector, Validity};
pub use in_sync::{InSyncSet, MemberId};
pub use rules::{Election, History, Obstacle, Overruled, Role, Timing};
pub use service::{Acquisition, Basis, Bid, Change, Hold, LeaseService, Snapshot};
#[cfg(any(test, feature = "test-util"))]
pub use simulated_service::SimulatedService;
pub use view::{ClusterId, Leader, LeaderAddress, Lease, OwnerToken, View};

/// The messages of errors of lease services.
static TEXTS: ErrorTexts = ErrorTexts {
    unreachable: "the lease service cannot be reached",
    late: "the lease service did not answer in time",
    broken: "the connection to the lease service broke",
    refused: "the lease service refused the request",
    remedy: "Check that etcd, Redis or the Kubernetes API runs at the address in the message.",
};
