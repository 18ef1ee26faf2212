//! Doors to the transfer engine alone: its settings from the environment, and its programs.
//!
//! In reading order: [`settings`] (what the environment says of an engine), [`mod@bench`] (the program
//! `transfer_engine_bench`) and [`topology_dump`] (the program `transfer_engine_topology_dump`).
//! The programs are functions of their arguments, so that the binaries and the Python package are
//! two doors to the same code.
#![warn(missing_docs)]

pub mod bench;
pub mod settings;
pub mod topology_dump;
