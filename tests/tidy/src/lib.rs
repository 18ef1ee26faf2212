//! The shape of the tree, as tests: what the tests of this crate share.
//!
//! Each file in `tests/` holds the rules of one kind. A rule collects everything that breaks it and
//! reports it at once, as `path:line: what is wrong`.

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
    /// Its path from the root, with `/` between the parts.
    pub path: String,
    /// What it holds.
    pub text: String,
}

impl File {
    /// Whether the name ends so.
    pub fn is(&self, extension: &str) -> bool {
        Path::new(&self.path).extension().is_some_and(|own| own == extension)
    }

    /// Whether a program wrote it.
    pub fn is_generated(&self) -> bool {
        self.path.starts_with("crates/proto/src/generated/")
            || self.path.starts_with("docs/reference/")
            || self.path == "Cargo.lock"
    }

    /// Whether people write code into it.
    pub fn is_code(&self) -> bool {
        !self.is_generated()
            && (["rs", "py", "pyi", "sh"].iter().any(|own| self.is(own))
                || self.path.starts_with(".githooks/")
                || self.path == ".ci/run")
    }

    /// Its lines with their numbers; in Rust without comments.
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

    /// Every line of code that matches, as `path:line: text`.
    pub fn matches(&self, pattern: &Regex) -> Vec<String> {
        self.code_lines()
            .filter(|(_, line)| pattern.is_match(line))
            .map(|(number, line)| format!("{}:{number}: {}", self.path, line.trim()))
            .collect()
    }
}

/// A comment to the end of the line. One inside a string would count too; none has mattered.
static COMMENT: LazyLock<Regex> = LazyLock::new(|| regex(r"(^|\s)//.*$"));

/// The root of the tree.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every text file that git has or would add. One that vanishes meanwhile is left out.
///
/// # Panics
/// The tree is not a git checkout, or git is not installed.
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

/// Our packages, as cargo sees their manifests: one object each with name, path and dependencies.
///
/// # Panics
/// Cargo cannot read the workspace.
pub fn packages() -> Vec<Value> {
    let metadata = cargo_metadata(&["--no-deps"]);
    metadata["packages"].as_array().expect("cargo lists packages").clone()
}

/// What `cargo metadata` says, without asking the network.
///
/// # Panics
/// Cargo cannot read the workspace, or a dependency was never fetched.
pub fn cargo_metadata(arguments: &[&str]) -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--offline", "--locked"])
        .args(arguments)
        .current_dir(root())
        .output()
        .expect("cargo runs: it started this test");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("cargo writes JSON")
}

/// A pattern of this crate.
///
/// # Panics
/// The pattern has a mistake.
pub fn regex(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a pattern of this crate is well formed")
}

/// Fails with everything that was found.
///
/// # Panics
/// Something was found.
pub fn report(rule: &str, found: &[String]) {
    assert!(found.is_empty(), "{rule}:\n  {}", found.join("\n  "));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_of_rust_do_not_count_as_code() {
        let file =
            File { path: "a.rs".into(), text: "//! x\nlet a = 1; // x\nx(\"http://x\")".into() };
        assert_eq!(file.matches(&regex(r"\bx\b")), ["a.rs:3: x(\"http://x\")"]);
        let file = File { path: "a.py".into(), text: "x // 2".into() };
        assert_eq!(file.matches(&regex("x")).len(), 1);
    }

    #[test]
    fn the_tree_is_read_whole() {
        let files = files();
        for path in ["Cargo.toml", "tests/tidy/src/lib.rs", "crates/base/src/lib.rs"] {
            assert!(files.iter().any(|file| file.path == path), "{path}");
        }
        assert!(files.iter().all(|file| !file.path.starts_with("target/")));
    }
}
