//! The standalone binary: passes its arguments to `run` and exits with the returned code.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(mooncake_transfer_tools::topology_dump::run(std::env::args().skip(1).collect()))
}
