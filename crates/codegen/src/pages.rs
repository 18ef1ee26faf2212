//! The pages of `docs/reference/`, from the tables that the code itself uses.

use std::{fmt::Write as _, path::Path};

use mooncake_base::{ErrorKind, engine_code::ENGINE_CODES, env, error::CODES, options::OptionSpec};
use mooncake_daemon::DaemonConfig;
use mooncake_master::{MasterConfig, OPTIONS};

use crate::Generated;

const OUT: &str = "docs/reference";
const NOTICE: &str = "<!-- Written by `make generate` from the code; edit that instead. -->";

/// Every page.
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
        flag wins over a variable. `python -m mooncake.env` shows which of them hold on a machine, \
        and where each value comes from.\n\n\
        | Variable | Default | What it does |\n|---|---|---|\n"
        .to_owned();
    for variable in env::ALL {
        let names = names(variable.name, variable.aliases);
        let (default, help) = (code(variable.default), cell(variable.help));
        let _ = writeln!(text, "| {names} | {default} | {help} |");
    }
    text.push_str(
        "\n## Without effect\n\n\
        The established transfer engine reads these too. Here they change nothing; when an engine \
        starts while one of them is set, the log says so once.\n\n\
        | Variables | Why |\n|---|---|\n",
    );
    for row in env::UNSUPPORTED {
        let names: Vec<_> = row.names.iter().map(|name| code(name)).collect();
        let _ = writeln!(text, "| {} | {} |", names.join(" "), cell(row.reason));
    }
    text
}

fn error_codes() -> String {
    let mut text = "# Error codes\n\n## Of the store\n\n\
        The numbers that the established calls of `mooncake.store` give back, and the master's in \
        `error_code` over HTTP, the kind that our own errors carry, the \
        exception of `mooncake.errors` that our own face raises, and what usually helps. `0` is \
        success. `mooncake explain NUMBER` (or NAME) and `mooncake.errors.explain` say the same.\n\n\
        | Number | Name | Kind | Exception | What it means and what helps |\n\
        |---|---|---|---|---|\n"
        .to_owned();
    for row in CODES {
        let (number, remedy) = (row.code.number(), cell(row.remedy));
        let (name, kind, exception) = (row.name, row.kind, exception(row.kind));
        let _ = writeln!(text, "| {number} | `{name}` | `{kind:?}` | `{exception}` | {remedy} |");
    }
    text.push_str(
        "\n## Of the transfer engine\n\n\
        What the calls of `mooncake.engine` return below 0. Some of these numbers stand for \
        something else in the store; `mooncake explain` tells both, and which is whose. Calls that \
        begin a transfer return its number, and 0 or less if they could not; \
        `transfer_check_status` returns 1 for done and 0 for not yet. Words and context of the last \
        failure: `mooncake.last_error()`.\n\n\
        | Number | Name | What it means and what helps |\n|---|---|---|\n",
    );
    for row in ENGINE_CODES {
        let _ = writeln!(text, "| {} | `{}` | {} |", row.number, row.name, cell(row.remedy));
    }
    text
}

/// The class of `mooncake.errors`; a test in Python holds the page against the classes.
fn exception(kind: ErrorKind) -> String {
    match kind {
        ErrorKind::Timeout => "DeadlineError".to_owned(),
        ErrorKind::PermissionDenied => "DeniedError".to_owned(),
        kind => format!("{kind:?}Error"),
    }
}

fn options_of_the_master() -> String {
    let text = "# Options of the master\n\n\
        Flags of `mooncake_master`, and keys of the file that `--config_path` names. A flag wins over \
        the environment, that over the file. One dash or two, `=` or a space, `-` or `_` in names; a \
        switch also as `--name` and `--noname`.\n\n";
    options::<MasterConfig>(text, OPTIONS)
}

fn options_of_the_daemon() -> String {
    let text = "# Options of the daemon of a host\n\n\
        Flags of `mooncake_client`. One dash or two, `=` or a space, `-` or `_` in names; a switch \
        also as `--name` and `--noname`.\n\n";
    options::<DaemonConfig>(text, mooncake_daemon::OPTIONS)
}

/// A row for each option.
fn options<S: Default>(beginning: &str, specs: &[OptionSpec<S>]) -> String {
    let mut text = beginning.to_owned() + "| Option | Default | What it does |\n|---|---|---|\n";
    let defaults = S::default();
    for spec in specs {
        let mut names = names(spec.name, spec.aliases);
        if let Some(variable) = spec.env {
            let _ = write!(names, "<br>environment: `{}`", variable.name);
        }
        let default = code(&(spec.show)(&defaults));
        let _ = writeln!(text, "| {names} | {default} | {} |", cell(spec.help));
    }
    text
}

/// A name, and the older spellings that are read too.
fn names(name: &str, aliases: &[&str]) -> String {
    let mut text = format!("`{name}`");
    for alias in aliases {
        let _ = write!(text, "<br>also `{alias}`");
    }
    text
}

/// A value; nothing stays nothing.
fn code(value: &str) -> String {
    if value.is_empty() { String::new() } else { format!("`{}`", cell(value)) }
}

/// Text that does not end its cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('<', "&lt;").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_does_not_break_out_of_its_cell() {
        assert_eq!(cell("a|b\n<c>"), "a\\|b &lt;c>");
        assert_eq!(code(""), "");
    }

    #[test]
    fn every_page_has_a_title_the_notice_and_a_row_for_each_entry() {
        for file in generate() {
            let text = String::from_utf8(file.content).unwrap();
            assert!(text.starts_with("# ") && text.contains(NOTICE), "{}", file.path.display());
            let rows =
                text.lines().filter(|line| line.starts_with("| `") || line.starts_with("| -"));
            assert!(rows.count() > 10, "{}", file.path.display());
        }
    }
}
