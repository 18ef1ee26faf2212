//! What our programs have in common: what they are asked, how they answer, and how they end.
//!
//! In reading order: [`command`] (to run, to help, to tell the version), [`program`] (its name, its
//! output, its exit code), [`log`] (where its log goes and what is in it), [`signals`] (what ends
//! it), [`rlimit`] (how many it may have), [`ports`] (the file that tells where it listens).
#![warn(missing_docs)]

pub mod command;
pub mod log;
pub mod ports;
pub mod program;
pub mod rlimit;
pub mod signals;

pub use command::CliCommand;
pub use ports::PortsFile;
pub use program::{Program, print_flush};
pub use signals::Signals;
