//! A program as others see it: its name, its output, its exit code.

use std::io::Write as _;

use mooncake_base::Result;

use crate::CliCommand;

/// A program of ours.
#[derive(Debug, Clone, Copy)]
pub struct Program {
    /// Its name.
    pub name: &'static str,
    /// Its version.
    pub version: &'static str,
    /// What its complaints begin with.
    pub error_prefix: &'static str,
}

impl Program {
    /// Does what the program was asked to do, and returns its exit code: 0, or 1 after an error,
    /// which goes to stderr in one line.
    pub fn run<S>(
        &self,
        asked: Result<CliCommand<S>>,
        help: impl FnOnce() -> String,
        work: impl FnOnce(S) -> Result<()>,
    ) -> u8 {
        let done = asked.and_then(|asked| match asked {
            CliCommand::Run(settings) => work(settings),
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
                let _ = writeln!(std::io::stderr().lock(), "{}: {error}", self.error_prefix);
                1
            }
        }
    }
}

/// Writes to stdout, at once. A closed stdout is the reader's choice; the program goes on.
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
    fn the_exit_code_is_zero_unless_something_failed() {
        let worked = Cell::new(0);
        let run = |asked: Result<CliCommand<u32>>| {
            PROGRAM.run(asked, String::new, |number| {
                worked.set(worked.get() + 1);
                (number == 7).then_some(()).ok_or_else(|| Error::invalid("not seven"))
            })
        };
        assert_eq!((run(Ok(CliCommand::Help)), run(Ok(CliCommand::Version))), (0, 0));
        assert_eq!(run(Err(Error::invalid("unknown"))), 1);
        assert_eq!(worked.get(), 0, "none of these works");
        assert_eq!((run(Ok(CliCommand::Run(7))), run(Ok(CliCommand::Run(8)))), (0, 1));
        assert_eq!(worked.get(), 2);
    }
}
