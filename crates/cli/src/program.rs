//! A program: its name, output and exit code.

use std::io::Write as _;

use mooncake_base::{Result, env};
use mooncake_os::spin_wait;

use crate::{CliCommand, log};

/// The identity of a program.
#[derive(Debug, Clone, Copy)]
pub struct Program {
    /// The name of the program.
    pub name: &'static str,
    /// The version of the program.
    pub version: &'static str,
    /// The prefix of error messages on stderr.
    pub error_prefix: &'static str,
}

impl Program {
    /// Executes the command and returns the exit code: 0, or 1 after an error, which is printed to
    /// stderr in one line.
    pub fn run<S>(
        &self,
        command: Result<CliCommand<S>>,
        help: impl FnOnce() -> String,
        work: impl FnOnce(S) -> Result<()>,
    ) -> u8 {
        // Also if the work panics.
        let _flush = FlushLog;
        let done = command.and_then(|command| match command {
            CliCommand::Run(settings) => {
                spin_wait::set_enabled(env::MC_BUSY_POLL.is_on());
                work(settings)
            }
            CliCommand::Help => {
                print_flush(&help());
                Ok(())
            }
            CliCommand::Version => {
                print_flush(&format!("{} {}\n", self.name, self.version));
                Ok(())
            }
        });
        match done {
            Ok(()) => 0,
            Err(error) => {
                log::print_line(&format!("{}: {error}", self.error_prefix));
                1
            }
        }
    }
}

/// Writes the rest of the log when it is dropped.
struct FlushLog;

impl Drop for FlushLog {
    fn drop(&mut self) {
        log::flush();
    }
}

/// Prints to stdout and flushes. A closed stdout is ignored; the program continues.
pub fn print_flush(text: &str) {
    let mut stdout = std::io::stdout().lock();
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use mooncake_base::Error;

    use super::*;

    const PROGRAM: Program = Program { name: "program", version: "1", error_prefix: "ERROR" };

    #[test]
    fn exit_code_is_zero_unless_an_error_occurs() {
        let worked = Cell::new(0);
        let run = |command: Result<CliCommand<u32>>| {
            PROGRAM.run(command, String::new, |number| {
                worked.set(worked.get() + 1);
                (number == 7).then_some(()).ok_or_else(|| Error::invalid("not seven"))
            })
        };
        assert_eq!((run(Ok(CliCommand::Help)), run(Ok(CliCommand::Version))), (0, 0));
        assert_eq!(run(Err(Error::invalid("unknown"))), 1);
        assert_eq!(worked.get(), 0, "none of these runs the work");
        assert_eq!((run(Ok(CliCommand::Run(7))), run(Ok(CliCommand::Run(8)))), (0, 1));
        assert_eq!(worked.get(), 2);
    }
}
