//! Two programs around the transfer engine.
//!
//! [`mod@bench`] is `transfer_engine_bench`, [`topology_dump`] is `transfer_engine_topology_dump`. They are functions of their arguments, so that the
//! binaries and the Python package are two entry points to the same code.
#![warn(missing_docs)]

pub mod bench;
pub mod topology_dump;
