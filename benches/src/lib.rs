//! Micro-benchmarks and load programs, with one way to print a result.

pub mod callgrind;
