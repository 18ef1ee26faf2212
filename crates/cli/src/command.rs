//! The command that a command line gives to a program: run, help or version.

use mooncake_base::{
    Error, Result,
    options::{CommandLine, OptionSpec, read_gflags},
};

/// A parsed command line of a program.
#[derive(Debug, PartialEq, Eq)]
pub enum CliCommand<S> {
    /// Run with these settings.
    Run(S),
    /// Print the help text.
    Help,
    /// Print the version.
    Version,
}

/// The options that a command line sets, with their declared names, in order.
pub type Assignments = Vec<(&'static str, String)>;

impl CliCommand<Assignments> {
    /// Parses a command line with its flag files. Positional arguments are not accepted.
    ///
    /// # Errors
    /// If a flag is unknown (the error suggests the nearest known flag), a value is missing, or an
    /// argument is not an option.
    pub fn read<S>(specs: &'static [OptionSpec<S>], arguments: Vec<String>) -> Result<Self> {
        match read_gflags(specs, arguments)? {
            CommandLine::Help => Ok(Self::Help),
            CommandLine::Version => Ok(Self::Version),
            CommandLine::Run { assignments, words } => match words.first() {
                None => Ok(Self::Run(assignments)),
                Some(word) => Err(Error::invalid("unknown argument").with("argument", word)),
            },
        }
    }
}

impl<S> CliCommand<S> {
    /// Converts the payload of [`Run`](Self::Run) to settings.
    ///
    /// # Errors
    /// The errors of `make`.
    pub fn and_then<T>(self, make: impl FnOnce(S) -> Result<T>) -> Result<CliCommand<T>> {
        Ok(match self {
            Self::Run(read) => CliCommand::Run(make(read)?),
            Self::Help => CliCommand::Help,
            Self::Version => CliCommand::Version,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIONS: &[OptionSpec<u32>] = &[OptionSpec {
        name: "size",
        aliases: &[],
        env: None,
        is_switch: false,
        help: "",
        set: |to, text| mooncake_base::parse::read_number(text).map(|number| *to = number),
        show: u32::to_string,
    }];

    fn read(line: &str) -> Result<CliCommand<Assignments>> {
        CliCommand::read(OPTIONS, line.split_whitespace().map(str::to_owned).collect())
    }

    #[test]
    fn parses_run_help_and_version() {
        assert_eq!(read("--size=3").unwrap(), CliCommand::Run(vec![("size", "3".to_owned())]));
        assert_eq!(read("--size=3 --help").unwrap(), CliCommand::Help);
        assert_eq!(read("--version").unwrap(), CliCommand::Version);
    }

    #[test]
    fn rejects_and_names_unknown_arguments() {
        for (line, part) in [("--sized=3", "did_you_mean=size"), ("word", "argument=word")] {
            let error = read(line).unwrap_err().to_string();
            assert!(error.contains(part), "{line}: {error}");
        }
    }

    #[test]
    fn settings_are_built_for_run_only() {
        let count = |assignments: Assignments| Ok(assignments.len());
        assert_eq!(read("--size=3").unwrap().and_then(count).unwrap(), CliCommand::Run(1));
        let fail = |_| Err::<(), _>(Error::invalid("no"));
        assert_eq!(read("--help").unwrap().and_then(fail).unwrap(), CliCommand::Help);
        assert!(read("").unwrap().and_then(fail).is_err());
    }
}
