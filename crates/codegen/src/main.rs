//! Generates the committed files: the wire code of `crates/proto` and the pages of
//! `docs/reference/`.
//!
//! `mooncake-codegen` writes the files; `mooncake-codegen --check` changes nothing and fails if a
//! file is stale. No system `protoc` is needed: `protox` compiles the definitions.
#![allow(clippy::print_stdout, reason = "a program that reports to a person")]

mod pages;
mod wire;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

/// A generated file: its path from the root of the tree, and its content.
pub(crate) struct Generated {
    path: PathBuf,
    content: Vec<u8>,
}

fn main() -> Result<()> {
    let is_check = std::env::args().skip(1).any(|argument| argument == "--check");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = wire::generate(&root)?;
    files.extend(pages::generate());
    let mut stale = Vec::new();
    for file in &files {
        let path = root.join(&file.path);
        if std::fs::read(&path).is_ok_and(|present| present == file.content) {
            continue;
        }
        stale.push(file.path.display().to_string());
        if !is_check {
            std::fs::create_dir_all(path.parent().context("a generated file has a folder")?)?;
            std::fs::write(&path, &file.content).with_context(|| path.display().to_string())?;
        }
    }
    match (stale.is_empty(), is_check) {
        (true, _) => println!("{} generated files are fresh", files.len()),
        (false, false) => println!("wrote {}", stale.join(", ")),
        (false, true) => bail!("stale, run `make generate`: {}", stale.join(", ")),
    }
    Ok(())
}
