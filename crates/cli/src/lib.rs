//! Shared parts of our command-line programs: commands, output, logging, signals and exit codes.
//!
//! In reading order: [`command`] (run, help or version), [`program`] (name, output, exit code),
//! [`log`] (setup of the log), [`signals`] (termination), [`ports`] (the file with the ports that a
//! program listens on), [`variables`] (environment variables with invalid values).
#![warn(missing_docs)]

pub mod command;
pub mod log;
pub mod ports;
pub mod program;
pub mod signals;
pub mod variables;

pub use command::CliCommand;
pub use ports::PortsFile;
pub use program::{Program, print_flush};
pub use signals::Signals;
