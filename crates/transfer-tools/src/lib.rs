//! Tools around the transfer engine: its settings from the environment, and two programs.
//!
//! In reading order: [`settings`] (reads an engine's settings from the environment), [`mod@bench`]
//! (the program `transfer_engine_bench`) and [`topology_dump`] (the program
//! `transfer_engine_topology_dump`). The programs are functions of their arguments, so that the
//! binaries and the Python package are two entry points to the same code.
#![warn(missing_docs)]

pub mod bench;
pub mod settings;
pub mod topology_dump;
