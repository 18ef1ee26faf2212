//! What tests of several crates share: a cluster in one process, a link that fails on demand,
//! waiting for a condition, and randomness that can be had again.
#![warn(missing_docs)]

pub mod cluster;
pub mod faulty;
pub mod random;
pub mod until;

pub use cluster::{Cluster, ClusterSettings, Node};
pub use faulty::{Fault, FaultyLink, Gate};
pub use random::Random;
pub use until::until;
