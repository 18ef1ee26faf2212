//! The standalone binary: parse, run, report.

fn main() {}
