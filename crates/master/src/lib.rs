//! The master.

pub mod state;
