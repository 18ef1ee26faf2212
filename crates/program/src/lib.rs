//! What our programs have in common: what they are asked, how they answer, and how they end.
//!
//! In reading order: [`asked`] (to run, to help, to tell the version), [`program`] (its name, its
//! output, its exit code), [`log`] (where its log goes and what is in it), [`signals`] (what ends
//! it), [`descriptors`] (how many it may have), [`ports`] (the file that tells where it listens).
#![warn(missing_docs)]

pub mod asked;
pub mod descriptors;
pub mod log;
pub mod ports;
pub mod program;
pub mod signals;

pub use asked::Asked;
pub use ports::PortsFile;
pub use program::{Program, say};
pub use signals::Signals;
