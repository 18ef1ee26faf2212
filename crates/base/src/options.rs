//! Options declared once: flags, configuration files, environment names and the reference pages
//! all come from one table of [`OptionSpec`] per component.
//!
//! The settings are a plain struct with a `Default`. A spec defines how one field is named, parsed
//! and printed. Precedence: flag, environment, file, default.

mod gflags;

use std::fmt::Write as _;

pub use gflags::{META_FLAGS, read_file, read_gflags};

use crate::{Error, Result, env::EnvVar};

/// Log flags of the upstream programs, and whether each is a switch without a value. Our log level
/// is set by `MC_LOG_LEVEL`; these flags are ignored unless a table declares them.
const LOG_FLAGS: &[(&str, bool)] = &[
    ("alsologtostderr", true),
    ("colorlogtostderr", true),
    ("log_dir", false),
    ("logbufsecs", false),
    ("logtostderr", true),
    ("max_log_size", false),
    ("minloglevel", false),
    ("stderrthreshold", false),
    ("v", false),
    ("vmodule", false),
];

/// The beginning of the help of an option or variable that is accepted but has no effect.
pub const NO_EFFECT: &str = "(no effect) ";

/// One option of a component whose settings are `S`.
#[derive(Debug, Clone, Copy)]
pub struct OptionSpec<S: 'static> {
    /// The name of the flag, and the key in a file.
    pub name: &'static str,
    /// Older or alternative spellings, which are accepted, too.
    pub aliases: &'static [&'static str],
    /// The environment variable that sets the option, if any.
    pub env: Option<&'static EnvVar>,
    /// True if the flag may be given without a value (`--name`, `--noname`).
    pub is_switch: bool,
    /// The effect, in one sentence.
    pub help: &'static str,
    /// Parses a text into the settings.
    pub set: fn(&mut S, &str) -> Result<()>,
    /// Prints the current value in the form that `set` parses.
    pub show: fn(&S) -> String,
}

/// A parsed command line.
#[derive(Debug, PartialEq, Eq)]
pub enum CommandLine {
    /// Run the program.
    Run {
        /// The declared name and the text of each option, in order.
        assignments: Vec<(&'static str, String)>,
        /// Arguments that are not options.
        words: Vec<String>,
    },
    /// `--help`, `-h`, `--helpfull`.
    Help,
    /// `--version`.
    Version,
}

/// Parses a command line in every spelling of the upstream programs: one or two dashes, `=` or a
/// space, `-` or `_` in names, `--switch` and `--noswitch`.
///
/// # Errors
/// If a flag is unknown (the error suggests the nearest known flag) or a value is missing.
pub fn read_command_line<S>(
    specs: &'static [OptionSpec<S>],
    arguments: impl IntoIterator<Item = String>,
) -> Result<CommandLine> {
    let mut assignments = Vec::new();
    let mut words = Vec::new();
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        if argument == "--" {
            words.extend(arguments.by_ref());
            break;
        }
        let Some(flag) = argument.strip_prefix("--").or_else(|| argument.strip_prefix('-')) else {
            words.push(argument);
            continue;
        };
        if flag.is_empty() {
            words.push(argument);
            continue;
        }
        let (name, value) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (flag, None),
        };
        match name {
            "help" | "h" | "helpfull" | "helpshort" => return Ok(CommandLine::Help),
            "version" => return Ok(CommandLine::Version),
            _ => {}
        }
        let mut take_value = |name: &str| {
            arguments.next().ok_or_else(|| {
                Error::invalid("the flag needs a value").with("flag", format_args!("--{name}"))
            })
        };
        if let Some(spec) = find(specs, name) {
            let value = match value {
                Some(value) => value,
                None if spec.is_switch => "true".to_owned(),
                None => take_value(spec.name)?,
            };
            assignments.push((spec.name, value));
        } else if let Some(spec) = name
            .strip_prefix("no")
            .and_then(|name| find(specs, name))
            .filter(|spec| spec.is_switch && value.is_none())
        {
            assignments.push((spec.name, "false".to_owned()));
        } else if let Some(is_switch) = log_flag(name) {
            if !is_switch && value.is_none() {
                take_value(name)?;
            }
        } else {
            return Err(unknown(specs, "unknown command line flag", name));
        }
    }
    Ok(CommandLine::Run { assignments, words })
}

/// Builds settings from flags, environment, file and defaults, in this order of precedence.
///
/// # Errors
/// If the file has an unknown key, or a text is not a valid value; the message names the option and
/// the source of the text.
pub fn resolve<S: Default>(
    specs: &'static [OptionSpec<S>],
    file: &[(String, String)],
    environment: impl Fn(&EnvVar) -> Option<String>,
    flags: &[(&'static str, String)],
) -> Result<S> {
    let mut settings = S::default();
    for (key, text) in file {
        let spec = find(specs, key)
            .ok_or_else(|| unknown(specs, "unknown key in the configuration file", key))?;
        assign(spec, &mut settings, text, "file")?;
    }
    for spec in specs {
        if let Some(text) = spec.env.and_then(&environment) {
            assign(spec, &mut settings, &text, "environment")?;
        }
    }
    for (name, text) in flags {
        let spec = find(specs, name).expect("the command line was read against the same table");
        assign(spec, &mut settings, text, "flag")?;
    }
    Ok(settings)
}

/// Returns the help text: every option with its default and description.
pub fn help<S: Default>(specs: &'static [OptionSpec<S>], program: &str, purpose: &str) -> String {
    let defaults = S::default();
    let mut text =
        format!("{program}: {purpose}\n\nUsage: {program} [--option=value …]\n\nOptions:\n");
    for spec in specs {
        let default = (spec.show)(&defaults);
        let default = if default.is_empty() { "\"\"" } else { &default };
        let _ = writeln!(text, "  --{}  (default: {default})\n      {}", spec.name, spec.help);
        if !spec.aliases.is_empty() {
            let _ = writeln!(text, "      Also: --{}", spec.aliases.join(", --"));
        }
        if let Some(var) = spec.env {
            let _ = writeln!(text, "      Environment: {}", var.name);
        }
    }
    for (flag, help) in META_FLAGS {
        let _ = writeln!(text, "  {flag}\n      {help}");
    }
    text.push_str(
        "Log flags of the upstream programs (--logtostderr …) are accepted and ignored.\n",
    );
    text
}

/// Returns whether an upstream log flag is a switch; `None` for other flags.
fn log_flag(name: &str) -> Option<bool> {
    let name = name.replace('-', "_");
    let known = |name: &str| LOG_FLAGS.iter().find(|(known, _)| *known == name);
    let negated = || name.strip_prefix("no").and_then(known).filter(|(_, is_switch)| *is_switch);
    known(&name).or_else(negated).map(|(_, is_switch)| *is_switch)
}

fn assign<S>(spec: &OptionSpec<S>, settings: &mut S, text: &str, from: &str) -> Result<()> {
    (spec.set)(settings, text).map_err(|error| error.with("option", spec.name).with("from", from))
}

fn find<S>(specs: &'static [OptionSpec<S>], name: &str) -> Option<&'static OptionSpec<S>> {
    let name = name.replace('-', "_");
    specs.iter().find(|spec| spec.name == name || spec.aliases.contains(&name.as_str()))
}

fn unknown<S>(specs: &'static [OptionSpec<S>], what: &str, name: &str) -> Error {
    let error = Error::invalid(format!("{what} '{name}'"));
    match nearest(name, specs.iter().map(|spec| spec.name)) {
        Some(near) => error.with("did_you_mean", near),
        None => error,
    }
}

/// Returns the candidate with the smallest edit distance, if it is near enough to be a typo.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .into_iter()
        .map(|candidate| (edit_distance(name, candidate), candidate))
        .min()
        .filter(|(distance, candidate)| *distance <= candidate.len().div_ceil(3))
        .map(|(_, candidate)| candidate)
}

/// Returns the edit distance (Levenshtein) between two words.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        env::ValueKind,
        parse::{read_bool, read_millis, read_number},
    };

    #[derive(Debug, PartialEq)]
    struct Settings {
        port: u16,
        quiet: bool,
        ttl: Duration,
    }

    impl Default for Settings {
        fn default() -> Self {
            Self { port: 1, quiet: false, ttl: Duration::from_secs(10) }
        }
    }

    static PORT: EnvVar = EnvVar {
        name: "TEST_PORT",
        aliases: &[],
        default: "",
        kind: ValueKind::Number(0, 65_535),
        help: "",
    };

    const SPECS: &[OptionSpec<Settings>] = &[
        OptionSpec {
            name: "rpc_port",
            aliases: &["port"],
            env: Some(&PORT),
            is_switch: false,
            help: "Where to listen.",
            set: |s, text| read_number(text).map(|port| s.port = port),
            show: |s| s.port.to_string(),
        },
        OptionSpec {
            name: "quiet",
            aliases: &[],
            env: None,
            is_switch: true,
            help: "Say less.",
            set: |s, text| read_bool(text).map(|quiet| s.quiet = quiet),
            show: |s| s.quiet.to_string(),
        },
        OptionSpec {
            name: "ttl",
            aliases: &[],
            env: None,
            is_switch: false,
            help: "How long.",
            set: |s, text| read_millis(text).map(|ttl| s.ttl = ttl),
            show: |s| s.ttl.as_millis().to_string(),
        },
    ];

    fn read(line: &str) -> Result<CommandLine> {
        read_command_line(SPECS, line.split_whitespace().map(str::to_owned))
    }

    fn settings(line: &str) -> Result<Settings> {
        let CommandLine::Run { assignments, words } = read(line)? else { panic!("{line}") };
        assert!(words.is_empty(), "{words:?}");
        resolve(SPECS, &[], |_| None, &assignments)
    }

    #[test]
    fn parses_every_spelling_of_a_flag() {
        for line in ["-rpc_port 7", "--rpc_port 7", "-rpc_port=7", "--rpc-port=7", "--port=7"] {
            assert_eq!(settings(line).unwrap().port, 7, "{line}");
        }
        for (line, quiet) in [
            ("--quiet", true),
            ("-quiet", true),
            ("--quiet=1", true),
            ("--quiet=off", false),
            ("--quiet --noquiet", false),
            ("--noquiet --quiet=true", true),
        ] {
            assert_eq!(settings(line).unwrap().quiet, quiet, "{line}");
        }
        assert_eq!(settings("--ttl=30m").unwrap().ttl, Duration::from_secs(1800));
        assert_eq!(settings("--ttl 250").unwrap().ttl, Duration::from_millis(250));
    }

    #[test]
    fn unknown_flag_is_named_with_a_suggestion() {
        let error = settings("--rpc_prt=7").unwrap_err().to_string();
        assert!(error.contains("rpc_prt") && error.contains("rpc_port"), "{error}");
        let error = settings("--rpc_port").unwrap_err().to_string();
        assert!(error.contains("needs a value"), "{error}");
        let error = settings("--rpc_port=70000").unwrap_err().to_string();
        assert!(error.contains("70000") && error.contains("rpc_port"), "{error}");
        assert!(read("--noport").is_err(), "a flag with a value has no negative form");
    }

    #[test]
    fn help_and_version_take_precedence() {
        assert_eq!(read("--rpc_port 7 --help").unwrap(), CommandLine::Help);
        assert_eq!(read("-version").unwrap(), CommandLine::Version);
        assert!(help(SPECS, "x", "does y").contains("--quiet"));
    }

    #[test]
    fn precedence_is_flag_environment_file_default() {
        let file =
            [("rpc_port".to_owned(), "2".to_owned()), ("quiet".to_owned(), "true".to_owned())];
        let flags = [("rpc_port", "4".to_owned())];
        let environment = |_: &EnvVar| Some("3".to_owned());
        assert_eq!(resolve(SPECS, &file, |_| None, &[]).unwrap().port, 2);
        assert_eq!(resolve(SPECS, &file, environment, &[]).unwrap().port, 3);
        let all = resolve(SPECS, &file, environment, &flags).unwrap();
        assert_eq!((all.port, all.quiet), (4, true));
        let unknown = [("prot".to_owned(), "2".to_owned())];
        assert!(resolve(SPECS, &unknown, |_| None, &[]).is_err());
    }
}
