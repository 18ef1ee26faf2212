//! Shared test fixtures: a cluster in one process, a master link with fault injection, waiting for
//! a condition, and reproducible randomness.
#![warn(missing_docs)]

pub mod cluster;
pub mod cutting_proxy;
pub mod faulty;
pub mod hanging_disk;
pub mod random;
pub mod until;

pub use cluster::{Cluster, ClusterSettings, Node};
pub use cutting_proxy::{CutRule, CuttingProxy};
pub use faulty::{Fault, FaultyLink, Gate};
pub use hanging_disk::HangingDisk;
pub use random::Random;
pub use until::until;
