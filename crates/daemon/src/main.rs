//! The standalone binary: passes its arguments to `run` and returns the exit code.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(mooncake_daemon::run(std::env::args().skip(1).collect()))
}
