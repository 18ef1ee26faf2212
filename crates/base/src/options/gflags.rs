//! Command lines in the style of gflags, which the upstream programs use: flag files, flags from the
//! environment, and flags that may be unknown.

use std::{fs, io};

use super::{CommandLine, OptionSpec, find, read_command_line};
use crate::{Error, ErrorCode, Result, env};

/// The maximum size of a flag file.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The maximum nesting depth of flag files.
const DEPTH_MAX: usize = 8;

/// The meta flags (flags about flags), with their help texts.
pub const META_FLAGS: &[(&str, &str)] = &[
    (
        "--flagfile=FILE,…",
        "Reads options from files, one a line; lines without a dash are comments.",
    ),
    (
        "--fromenv=NAME,…",
        "Takes each named option from its variable FLAGS_NAME, which must be set.",
    ),
    ("--tryfromenv=NAME,…", "Like --fromenv, but ignores variables that are not set."),
    ("--undefok=NAME,…", "Ignores these flags, given with `=`, if they are unknown."),
    ("--help", "Prints this text."),
    ("--version", "Prints the version."),
];

/// Expands the meta flags, then parses the result with [`read_command_line`].
///
/// # Errors
/// If a flag file cannot be read or a variable is not set; otherwise as [`read_command_line`].
pub fn read_gflags<S>(
    specs: &'static [OptionSpec<S>],
    arguments: Vec<String>,
) -> Result<CommandLine> {
    let arguments = from_files(arguments, 0)?;
    let arguments = from_environment(arguments, env::read_flag)?;
    read_command_line(specs, without_undefined(specs, arguments))
}

/// Reads a file of options.
///
/// # Errors
/// If the file cannot be read, or is too large to be a file of options.
pub fn read_file(path: &str) -> Result<String> {
    let failed = |source: io::Error| {
        Error::new(ErrorCode::FILE_READ_FAIL, "the file cannot be read")
            .with("file", path)
            .caused_by(source)
    };
    let length = fs::metadata(path).map_err(failed)?.len();
    if length > FILE_BYTES_MAX {
        return Err(Error::invalid("the file is too large for a configuration")
            .with("file", path)
            .with("file_bytes", length));
    }
    fs::read_to_string(path).map_err(failed)
}

/// Replaces each `--flagfile` by the lines of the file.
fn from_files(arguments: Vec<String>, depth: usize) -> Result<Vec<String>> {
    if depth > DEPTH_MAX {
        return Err(Error::invalid("flag files name each other too deeply").with("depth", depth));
    }
    replace(arguments, &["flagfile"], |_, path, expanded| {
        let text = read_file(path)?;
        let lines = text.lines().map(str::trim).filter(|line| line.starts_with('-'));
        expanded.extend(from_files(lines.map(str::to_owned).collect(), depth + 1)?);
        Ok(())
    })
}

/// Replaces each `--fromenv=name,…` and `--tryfromenv=name,…` by `--name=value`, with the value of
/// the variable `FLAGS_name`.
fn from_environment(
    arguments: Vec<String>,
    read: impl Fn(&str) -> Option<String>,
) -> Result<Vec<String>> {
    replace(arguments, &["fromenv", "tryfromenv"], |flag, wanted, expanded| {
        match read(wanted) {
            Some(value) => expanded.push(format!("--{wanted}={value}")),
            None if flag == "tryfromenv" => {}
            None => {
                return Err(Error::invalid("the variable of the flag is not set")
                    .with("flag", wanted)
                    .with("variable", format_args!("FLAGS_{wanted}")));
            }
        }
        Ok(())
    })
}

/// Replaces these flags: for each item of their values, by the arguments that `put` appends.
fn replace(
    arguments: Vec<String>,
    flags: &[&str],
    mut put: impl FnMut(&str, &str, &mut Vec<String>) -> Result<()>,
) -> Result<Vec<String>> {
    let mut expanded = Vec::new();
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        let Some((name, value)) = split_flag(&argument).filter(|(name, _)| flags.contains(name))
        else {
            expanded.push(argument);
            continue;
        };
        let items = match value {
            Some(value) => value.to_owned(),
            None => arguments.next().ok_or_else(|| {
                Error::invalid("the flag needs a value").with("flag", format_args!("--{name}"))
            })?,
        };
        for item in items.split(',').filter(|item| !item.is_empty()) {
            put(name, item, &mut expanded)?;
        }
    }
    Ok(expanded)
}

/// Removes unknown flags that `--undefok=name,…` allows.
fn without_undefined<S>(
    specs: &'static [OptionSpec<S>],
    mut arguments: Vec<String>,
) -> Vec<String> {
    let allowed: Vec<String> = arguments
        .iter()
        .filter_map(|argument| match split_flag(argument)? {
            ("undefok", Some(names)) => Some(names.split(',').map(str::to_owned)),
            _ => None,
        })
        .flatten()
        .collect();
    arguments.retain(|argument| {
        split_flag(argument).is_none_or(|(name, _)| {
            let is_allowed = allowed.contains(&name.replace('-', "_"));
            name != "undefok" && (!is_allowed || find(specs, name).is_some())
        })
    });
    arguments
}

/// Splits a flag into its name and value; `None` if the argument is not a flag.
fn split_flag(argument: &str) -> Option<(&str, Option<&str>)> {
    let flag = argument.strip_prefix("--").or_else(|| argument.strip_prefix('-'))?;
    Some(match flag.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (flag, None),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse::read_number;

    #[derive(Debug, Default)]
    struct Settings {
        port: u16,
    }

    const SPECS: &[OptionSpec<Settings>] = &[OptionSpec {
        name: "rpc_port",
        aliases: &["port"],
        env: None,
        is_switch: false,
        help: "Where to listen.",
        set: |s, text| read_number(text).map(|port| s.port = port),
        show: |s| s.port.to_string(),
    }];

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    fn assigned(line: &str) -> Result<Vec<(&'static str, String)>> {
        match read_gflags(SPECS, words(line))? {
            CommandLine::Run { assignments, .. } => Ok(assignments),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn fromenv_reads_flags_from_the_environment() {
        let read = |name: &str| (name == "port").then(|| "7".to_owned());
        let expand = |line: &str| from_environment(words(line), read);
        assert_eq!(expand("--fromenv=port --x").unwrap(), ["--port=7", "--x"]);
        assert_eq!(expand("-tryfromenv port,rpc_port").unwrap(), ["--port=7"]);
        assert_eq!(expand("fromenv=port").unwrap(), ["fromenv=port"], "a word is not a flag");
        let error = expand("--fromenv=rpc_port").unwrap_err().to_string();
        assert!(error.contains("FLAGS_rpc_port"), "{error}");
        assert!(expand("--fromenv").is_err());
    }

    #[test]
    fn rejects_a_flag_file_that_includes_itself() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("flags");
        fs::write(&path, format!("# note\n--port=1\n--flagfile={}\n", path.display())).unwrap();
        assert!(assigned(&format!("--flagfile {}", path.display())).is_err());
        fs::write(&path, "# note\n--port=1\n--v=2\n").unwrap();
        let both = assigned(&format!("-flagfile={} -port=2", path.display())).unwrap();
        assert_eq!(both, [("rpc_port", "1".to_owned()), ("rpc_port", "2".to_owned())]);
        let error = assigned("--flagfile=/nowhere/flags").unwrap_err().to_string();
        assert!(error.contains("/nowhere/flags"), "{error}");
        assert!(assigned("--flagfile").is_err());
    }

    #[test]
    fn undefok_ignores_unknown_flags() {
        let found = assigned("--undefok=brand_new,rpc_port --brand-new=1 --rpc_port=7").unwrap();
        assert_eq!(found, [("rpc_port", "7".to_owned())], "a known flag still counts");
        assert!(assigned("--brand_new=1").is_err());
    }

    #[test]
    fn ignores_upstream_log_flags() {
        let line = "--logtostderr -v 2 --noalsologtostderr --log-dir=x --vmodule=a=1 --rpc_port=7";
        assert_eq!(assigned(line).unwrap(), [("rpc_port", "7".to_owned())]);
        let error = assigned("--minloglevel").unwrap_err().to_string();
        assert!(error.contains("needs a value") && error.contains("minloglevel"), "{error}");
        assert!(assigned("--nov").is_err());
    }
}
