//! The shape of files: first lines, lengths, names, links, decision records.

use mooncake_tidy::{File, files, regex, report};

/// The maximum length of a file, tests included.
const LINES_MAX: usize = 800;

#[test]
fn first_line_states_the_purpose_of_a_file() {
    let mut found = Vec::new();
    for file in files().iter().filter(|file| file.is_code()) {
        if !states_purpose(file) {
            found.push(file.path.clone());
        }
    }
    report("files whose first line does not state their purpose", &found);
}

#[test]
fn files_are_at_most_800_lines_long() {
    let found: Vec<_> = files()
        .iter()
        // The stub of a native module declares all of its names in one file.
        .filter(|file| file.is_code() && !file.is("pyi"))
        .map(|file| (file, file.text.lines().count()))
        .filter(|(_, lines)| *lines > LINES_MAX)
        .map(|(file, lines)| format!("{}: {lines} lines", file.path))
        .collect();
    report("files longer than 800 lines; cut them by noun", &found);
}

#[test]
fn no_file_or_module_is_called_utils() {
    let by_name = regex(r"(^|/)(utils?|common|misc|helpers?)(\.\w+)?(/|$)");
    let found: Vec<_> = files()
        .into_iter()
        .filter(|file| file.is_code() && by_name.is_match(&file.path))
        .map(|file| file.path)
        .collect();
    report("file names without meaning; name the content", &found);
    let by_module = regex(r"^\s*(pub(\(\w+\))? )?mod (utils?|common|misc|helpers?)\b");
    let found: Vec<_> = rust().iter().flat_map(|file| file.matches(&by_module)).collect();
    report("module names without meaning; name the content", &found);
}

#[test]
fn decision_records_are_numbered_without_a_gap() {
    let form = regex(r"^docs/decisions/(\d{4})-[a-z0-9-]+\.md$");
    let mut found = Vec::new();
    let mut numbers = Vec::new();
    for file in files().iter().filter(|file| file.path.starts_with("docs/decisions/")) {
        let Some(parts) = form.captures(&file.path) else {
            found.push(format!("{}: not NNNN-title.md", file.path));
            continue;
        };
        let number: usize = parts[1].parse().expect("four digits are a number");
        numbers.push(number);
        if !file.text.starts_with(&format!("# {number}. ")) {
            found.push(format!("{}: does not begin with `# {number}. `", file.path));
        }
        for part in ["**Question.**", "**Choice.**", "**Alternatives refused.**"] {
            if !file.text.contains(part) {
                found.push(format!("{}: has no {part}", file.path));
            }
        }
    }
    numbers.sort_unstable();
    if numbers != (1..=numbers.len()).collect::<Vec<_>>() {
        found.push(format!("numbers are {numbers:?}"));
    }
    report("decision records out of form", &found);
}

#[test]
fn links_between_pages_resolve() {
    let link = regex(r"\]\(([^)#\s]+)");
    let ignored = std::fs::read_to_string(mooncake_tidy::root().join(".gitignore")).unwrap();
    // Pages that the build of the site writes: present or not, depending on what ran before.
    let is_generated = |path: &str| ignored.lines().any(|line| line == format!("/{path}"));
    let mut found = Vec::new();
    for file in files().iter().filter(|file| file.is("md")) {
        let folder = file.path.rsplit_once('/').map_or("", |(folder, _)| folder);
        for target in link.captures_iter(&file.text).map(|parts| parts[1].to_owned()) {
            let is_ours = !target.contains("://") && !target.starts_with("mailto:");
            if is_ours
                && !is_generated(&format!("{folder}/{target}"))
                && !mooncake_tidy::root().join(folder).join(&target).exists()
            {
                found.push(format!("{}: {target}", file.path));
            }
        }
    }
    report("broken links", &found);
}

#[test]
fn no_registry_or_machine_path_is_named() {
    let host = r"pypi\.org|pythonhosted\.org|index\.crates\.io|static\.crates\.io|registry\.npmjs";
    let path = r#"(^|[\s"'`=(:])/(work|root)/|/tmp/target-|/home/[a-z]"#;
    let pattern = regex(&format!("{host}|{path}"));
    let mut found = Vec::new();
    for file in files() {
        if file.path == "Cargo.lock" || file.path == "tests/tidy/tests/files.rs" {
            continue; // the lock file names its registry by design; this file has the patterns
        }
        for (index, line) in file.text.lines().enumerate() {
            if pattern.is_match(line) {
                found.push(format!("{}:{}: {}", file.path, index + 1, line.trim()));
            }
        }
    }
    report("names of package registries or machine paths", &found);
}

fn states_purpose(file: &File) -> bool {
    let mut lines = file.text.lines();
    let first = lines.next().unwrap_or_default();
    if file.is("rs") {
        return first.strip_prefix("//! ").is_some_and(is_sentence);
    }
    let first = if first.starts_with("#!") { lines.next().unwrap_or_default() } else { first };
    let text = if file.is("py") || file.is("pyi") {
        first.strip_prefix("r").unwrap_or(first).strip_prefix("\"\"\"")
    } else {
        first.strip_prefix("# ")
    };
    text.is_some_and(is_sentence)
}

/// Returns whether the text has at least three words: the name of the file is not enough.
fn is_sentence(text: &str) -> bool {
    text.trim().split(' ').count() >= 3
}

fn rust() -> Vec<File> {
    files().into_iter().filter(|file| file.is("rs") && !file.is_generated()).collect()
}

#[test]
fn purpose_is_a_sentence() {
    let file = |path: &str, text: &str| File { path: path.into(), text: text.into() };
    assert!(states_purpose(&file("a.rs", "//! Moves the bytes.\n")));
    assert!(!states_purpose(&file("a.rs", "//! a\n")));
    assert!(!states_purpose(&file("a.rs", "use a;\n//! Moves the bytes.\n")));
    assert!(states_purpose(&file("a.py", "#!/usr/bin/env python3\n\"\"\"Moves the bytes.\"\"\"")));
    assert!(!states_purpose(&file("a.py", "import os\n")));
    assert!(states_purpose(&file("a.sh", "#!/bin/sh\n# Moves the bytes.\n")));
    assert!(!states_purpose(&file("a.sh", "#!/bin/sh\nset -e\n")));
}
