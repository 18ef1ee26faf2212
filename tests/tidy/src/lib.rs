//! Tests of the shape of the tree: the functions that they share.
//!
//! Each file in `tests/` holds the rules of one kind. A rule collects all violations and reports
//! them at once, as `path:line: what is wrong`.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
};

use regex::Regex;
use serde_json::Value;

/// A text file of the tree.
#[derive(Debug)]
pub struct File {
    /// The path from the root, with `/` between the parts.
    pub path: String,
    /// The content.
    pub text: String,
}

impl File {
    /// Returns whether the file has this extension.
    pub fn is(&self, extension: &str) -> bool {
        Path::new(&self.path).extension().is_some_and(|own| own == extension)
    }

    /// Returns whether the file is generated.
    pub fn is_generated(&self) -> bool {
        self.path.starts_with("crates/proto/src/generated/")
            || self.path.starts_with("docs/reference/")
            || self.path == "Cargo.lock"
    }

    /// Returns whether the file is hand-written code.
    pub fn is_code(&self) -> bool {
        !self.is_generated()
            && (["rs", "py", "pyi", "sh"].iter().any(|own| self.is(own))
                || self.path.starts_with(".githooks/")
                || self.path == ".ci/run")
    }

    /// Returns the lines with their numbers, for Rust without comments.
    pub fn code_lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let is_rust = self.is("rs");
        self.text.lines().enumerate().map(move |(index, line)| {
            let code = if is_rust {
                COMMENT.find(line).map_or(line, |at| &line[..at.start()])
            } else {
                line
            };
            (index + 1, code)
        })
    }

    /// Returns every line of code that matches, as `path:line: text`.
    pub fn matches(&self, pattern: &Regex) -> Vec<String> {
        self.code_lines()
            .filter(|(_, line)| pattern.is_match(line))
            .map(|(number, line)| format!("{}:{number}: {}", self.path, line.trim()))
            .collect()
    }
}

/// A comment to the end of the line. A `//` inside a string after a blank would match, too.
static COMMENT: LazyLock<Regex> = LazyLock::new(|| regex(r"(^|\s)//.*$"));

/// Returns the root of the tree.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns every text file that git tracks or would add, except files that vanish meanwhile.
///
/// # Panics
/// If the tree is not a git checkout, or git is not installed.
pub fn files() -> Vec<File> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .expect("git is installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).expect("our file names are UTF-8");
    names
        .split_terminator('\0')
        .filter_map(|path| {
            let text = std::fs::read_to_string(root().join(path)).ok()?;
            Some(File { path: path.to_owned(), text })
        })
        .collect()
}

/// Returns our packages from `cargo metadata`: name, path and dependencies of each.
///
/// # Panics
/// If cargo cannot read the workspace.
pub fn packages() -> Vec<Value> {
    let metadata = cargo_metadata(&["--no-deps"]);
    metadata["packages"].as_array().expect("cargo lists packages").clone()
}

/// Returns the output of `cargo metadata`.
///
/// # Panics
/// As [`cargo`] does.
pub fn cargo_metadata(arguments: &[&str]) -> Value {
    let form = ["metadata", "--format-version", "1", "--locked"];
    let output = cargo(&[&form, arguments].concat());
    serde_json::from_slice(&output).expect("cargo writes JSON")
}

/// Returns the output of a cargo command, without network access.
///
/// # Panics
/// If cargo cannot read the workspace, or a dependency was never fetched.
pub fn cargo(arguments: &[&str]) -> Vec<u8> {
    let mut command = Command::new(env!("CARGO"));
    let output = command.args(arguments).arg("--offline").current_dir(root()).output();
    let output = output.expect("cargo runs: it started this test");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// Compiles a pattern of this crate.
///
/// # Panics
/// If the pattern is malformed.
pub fn regex(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a pattern of this crate is well formed")
}

/// Fails with the list of violations, if there are any.
///
/// # Panics
/// If the list is not empty.
pub fn report(rule: &str, found: &[String]) {
    assert!(found.is_empty(), "{rule}:\n  {}", found.join("\n  "));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rust_comments_are_not_code() {
        let file =
            File { path: "a.rs".into(), text: "//! x\nlet a = 1; // x\nx(\"http://x\")".into() };
        assert_eq!(file.matches(&regex(r"\bx\b")), ["a.rs:3: x(\"http://x\")"]);
        let file = File { path: "a.py".into(), text: "x // 2".into() };
        assert_eq!(file.matches(&regex("x")).len(), 1);
    }

    #[test]
    fn all_files_are_found() {
        let files = files();
        for path in ["Cargo.toml", "tests/tidy/src/lib.rs", "crates/base/src/lib.rs"] {
            assert!(files.iter().any(|file| file.path == path), "{path}");
        }
        assert!(files.iter().all(|file| !file.path.starts_with("target/")));
    }
}
