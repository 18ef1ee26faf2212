//! The standalone binary: hands its arguments to `run`, and its exit code to the system.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(mooncake_daemon::run(std::env::args().skip(1).collect()))
}
