//! The pages of `docs/reference/`, generated from the tables that the code uses.

use std::{fmt::Write as _, path::Path};

use mooncake_base::{
    ErrorKind,
    engine_code::ENGINE_CODES,
    env,
    error::{CODES, CodeRow},
    options::{NO_EFFECT, OptionSpec},
};
use mooncake_daemon::DaemonConfig;
use mooncake_master::{MasterConfig, OPTIONS};

use crate::Generated;

const OUT: &str = "docs/reference";
const NOTICE: &str = "<!-- Written by `make generate` from the code; edit the code instead. -->";

/// Generates every page.
pub(crate) fn generate() -> Vec<Generated> {
    vec![
        page("environment.md", &environment()),
        page("error-codes.md", &error_codes()),
        page("options-client.md", &options_of_the_daemon()),
        page("options-master.md", &options_of_the_master()),
    ]
}

fn page(name: &str, text: &str) -> Generated {
    let (title, rest) = text.split_once('\n').unwrap_or((text, ""));
    let content = format!("{title}\n\n{NOTICE}\n{rest}");
    Generated { path: Path::new(OUT).join(name), content: content.into_bytes() }
}

fn environment() -> String {
    let mut text = "# Environment variables\n\n\
        Read by `mooncake_master` and by the Python package, once, when they start. An argument or a \
        flag wins over a variable. `python -m mooncake.env` shows the values in effect on a machine, \
        and the source of each value.\n\n\
        | Variable | Default | What it does |\n|---|---|---|\n"
        .to_owned();
    let has_effect = |help: &str| !help.starts_with(NO_EFFECT);
    for variable in env::ALL.iter().filter(|variable| has_effect(variable.help)) {
        let names = names(variable.name, variable.aliases);
        let (default, help) = (code(variable.default), cell(variable.help));
        let _ = writeln!(text, "| {names} | {default} | {help} |");
    }
    text.push_str(
        "\n## Without effect\n\n\
        Upstream's transfer engine or store reads these. Here they have no effect; if one of them is \
        set when an engine or a store starts, the log warns once.\n\n\
        | Variables | Why |\n|---|---|\n",
    );
    for variable in env::ALL {
        if let Some(help) = variable.help.strip_prefix(NO_EFFECT) {
            let _ = writeln!(text, "| {} | {} |", code(variable.name), cell(help));
        }
    }
    for row in env::UNSUPPORTED {
        let names: Vec<_> = row.names.iter().map(|name| code(name)).collect();
        let _ = writeln!(text, "| {} | {} |", names.join(" "), cell(row.reason));
    }
    text
}

fn error_codes() -> String {
    let mut text = "# Error codes\n\n## Of the store\n\n\
        The numbers that upstream's calls of `mooncake.store` return, and the master in \
        `error_code` over HTTP; the kind of our own errors; the exception of `mooncake.errors` \
        that our own API raises; and the usual remedy. `0` is success. `mooncake explain NUMBER` \
        (or NAME) and `mooncake.errors.explain` print the same text.\n\n\
        | Number | Name | Kind | Exception | Meaning and remedy |\n\
        |---|---|---|---|---|\n"
        .to_owned();
    let line = |text: &mut String, row: &CodeRow| {
        let (number, remedy) = (row.code.number(), cell(row.remedy));
        let (name, kind, exception) = (row.name, row.kind, exception(row.kind));
        let _ = writeln!(text, "| {number} | `{name}` | `{kind:?}` | `{exception}` | {remedy} |");
    };
    CODES.iter().filter(|row| row.is_returned()).for_each(|row| line(&mut text, row));
    text.push_str(
        "\n### Never returned today\n\n\
        Codes of features that upstream has and this package does not have, or that fail in another way here.\n\n\
        | Number | Name | Kind | Exception | Meaning and remedy |\n\
        |---|---|---|---|---|\n",
    );
    CODES.iter().filter(|row| !row.is_returned()).for_each(|row| line(&mut text, row));
    text.push_str(
        "\n## Of the transfer engine\n\n\
        The negative results of the calls of `mooncake.engine`. Some of these numbers mean \
        something else in the store; `mooncake explain` prints both meanings. Calls that begin a \
        transfer return its number, and 0 or less if they fail; `transfer_check_status` returns 1 \
        for completed and 0 for in flight. `mooncake.last_error()` returns message and context of \
        the last failure.\n\n\
        | Number | Name | Meaning and remedy |\n|---|---|---|\n",
    );
    for row in ENGINE_CODES {
        let _ = writeln!(text, "| {} | `{}` | {} |", row.number, row.name, cell(row.remedy));
    }
    text
}

/// Returns the class of `mooncake.errors`; a test in Python compares the page with the classes.
fn exception(kind: ErrorKind) -> String {
    match kind {
        ErrorKind::Timeout => "DeadlineError".to_owned(),
        ErrorKind::PermissionDenied => "DeniedError".to_owned(),
        kind => format!("{kind:?}Error"),
    }
}

fn options_of_the_master() -> String {
    let text = "# Options of the master\n\n\
        Flags of `mooncake_master`, and keys of the file that `--config_path` names. A flag takes \
        precedence over the environment, and the environment over the file. One dash or two, `=` or a space, `-` or `_` in names; a \
        switch also as `--name` and `--noname`.\n\n";
    options::<MasterConfig>(text, OPTIONS)
}

fn options_of_the_daemon() -> String {
    let text = "# Options of the host daemon\n\n\
        Flags of `mooncake_client`. One dash or two, `=` or a space, `-` or `_` in names; a switch \
        also as `--name` and `--noname`.\n\n";
    options::<DaemonConfig>(text, mooncake_daemon::OPTIONS)
}

/// Writes a row for each option; those without effect have a table of their own.
fn options<S: Default>(beginning: &str, specs: &[OptionSpec<S>]) -> String {
    let head = "| Option | Default | What it does |\n|---|---|---|\n";
    let (mut text, mut without_effect) = (format!("{beginning}{head}"), String::new());
    let defaults = S::default();
    for spec in specs {
        let mut names = names(spec.name, spec.aliases);
        if let Some(variable) = spec.env {
            let _ = write!(names, "<br>environment: `{}`", variable.name);
        }
        let default = code(&(spec.show)(&defaults));
        let (table, help) = match spec.help.strip_prefix(NO_EFFECT) {
            Some(help) => (&mut without_effect, help),
            None => (&mut text, spec.help),
        };
        let _ = writeln!(table, "| {names} | {default} | {} |", cell(help));
    }
    text + "\n## Without effect\n\n\
        Options of upstream that are accepted, so that its command lines and files work, but change \
        nothing here.\n\n"
        + &head.replace("What it does", "Meaning in upstream, or why it is ignored")
        + &without_effect
}

/// Formats a name and its aliases.
fn names(name: &str, aliases: &[&str]) -> String {
    let mut text = format!("`{name}`");
    for alias in aliases {
        let _ = write!(text, "<br>also `{alias}`");
    }
    text
}

/// Formats a value as code; an empty value stays empty.
fn code(value: &str) -> String {
    if value.is_empty() { String::new() } else { format!("`{}`", cell(value)) }
}

/// Escapes text for a table cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('<', "&lt;").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cell_text_is_escaped() {
        assert_eq!(cell("a|b\n<c>"), "a\\|b &lt;c>");
        assert_eq!(code(""), "");
    }

    #[test]
    fn pages_have_title_notice_and_rows() {
        for file in generate() {
            let text = String::from_utf8(file.content).unwrap();
            assert!(text.starts_with("# ") && text.contains(NOTICE), "{}", file.path.display());
            let rows =
                text.lines().filter(|line| line.starts_with("| `") || line.starts_with("| -"));
            assert!(rows.count() > 10, "{}", file.path.display());
        }
    }

    #[test]
    fn options_without_effect_are_listed_apart() {
        for (page, name) in [
            (environment(), "| `MC_LOG_DIR` |"),
            (options_of_the_daemon(), "| `local_buffer_size` |"),
            (options_of_the_master(), "| `enable_cxl` |"),
        ] {
            let (effective, without_effect) = page.split_once("## Without effect").unwrap();
            assert!(!effective.contains(name) && without_effect.contains(name), "{name}");
        }
    }
}
