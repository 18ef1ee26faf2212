//! The master.
