//! Rules for the documentation: paths that it names exist, and its maps of files are complete.

use std::collections::BTreeSet;

use mooncake_tidy::{File, files, regex, report, root};

#[test]
fn paths_in_documents_exist() {
    let path = regex(
        r"`((?:crates|python|tests|benches|scripts|docs|examples)/[A-Za-z0-9_./{},-]*[A-Za-z0-9_}/])`",
    );
    let mut found = Vec::new();
    for file in pages() {
        for (index, line) in file.text.lines().enumerate() {
            for named in path.captures_iter(line).flat_map(|parts| expand(&parts[1])) {
                if !root().join(&named).exists() && !ours_of_a_crate(&named) {
                    found.push(format!("{}:{}: {named}", file.path, index + 1));
                }
            }
        }
    }
    report("paths that do not exist", &found);
}

/// A file may be named by the end of its path, as in `state/rules.rs`, in pages and in comments.
#[test]
fn files_that_texts_name_by_their_ending_exist() {
    let name = regex(r"`([A-Za-z0-9_./-]*[A-Za-z0-9_]\.(?:rs|py|pyi|proto|sh))`");
    let files = files();
    let mut endings = BTreeSet::new();
    for file in &files {
        endings.insert(file.path.as_str());
        endings.extend(file.path.match_indices('/').map(|(at, _)| &file.path[at + 1..]));
    }
    let mut found = Vec::new();
    for file in files.iter().filter(|file| ["md", "rs", "py"].iter().any(|end| file.is(end))) {
        if file.is_generated() || file.path == "CHANGELOG.md" || file.path == THIS {
            continue;
        }
        for (index, line) in file.text.lines().enumerate() {
            if file.is("rs") && !line.contains("//") {
                continue;
            }
            for named in name.captures_iter(line) {
                if !endings.contains(named[1].trim_start_matches(['.', '/'])) {
                    found.push(format!("{}:{}: {}", file.path, index + 1, &named[1]));
                }
            }
        }
    }
    report("files that do not exist", &found);
}

/// This file, which shows patterns of names.
const THIS: &str = "tests/tidy/tests/docs.rs";

#[test]
fn architecture_maps_every_file_of_a_listed_folder() {
    let page = pages().into_iter().find(|file| file.path == "docs/architecture.md");
    let page = page.expect("there is an architecture page");
    let (header, name) =
        (regex(r"^\| Files of `([^`]+)/` \|"), regex(r"`([a-z0-9_/]+(?:\.rs|\.py|/))`"));
    let (mut folder, mut maps) = (None, Vec::new());
    for line in page.text.lines() {
        if let Some(parts) = header.captures(line) {
            folder = Some(parts[1].to_owned());
            maps.push((parts[1].to_owned(), BTreeSet::new()));
        } else if !line.starts_with('|') {
            folder = None;
        } else if folder.is_some() {
            let cell = line.split('|').nth(1).expect("a row has a first cell");
            let (_, named) = maps.last_mut().expect("a row follows its header");
            named.extend(name.captures_iter(cell).map(|parts| parts[1].to_owned()));
        }
    }
    assert!(maps.len() >= 3, "the maps were not found");
    let mut found = Vec::new();
    for (folder, named) in maps {
        let missing = named.iter().filter(|name| !root().join(&folder).join(name).exists());
        found.extend(missing.map(|name| format!("{folder}/{name}: is mapped but does not exist")));
        for file in files().iter().filter_map(|file| file.path.strip_prefix(&format!("{folder}/")))
        {
            if !is_mapped(file, &named) {
                found.push(format!("{folder}/{file}: is not in the map"));
            }
        }
    }
    report("maps in docs/architecture.md that are not true", &found);
}

/// Returns whether a file is named, or lies in a folder that is. Entry points and tests need no row.
fn is_mapped(file: &str, named: &BTreeSet<String>) -> bool {
    let is_covered = |name: &String| name == file || name.ends_with('/') && file.starts_with(name);
    let is_plain = ["lib.rs", "main.rs", "fuzz.rs"].contains(&file)
        || file.ends_with("__init__.py")
        || file.split('/').any(|part| part == "tests" || part == "tests.rs");
    is_plain || named.iter().any(is_covered)
}

/// A page names what a file holds behind the file, as in `state/rules.rs: Rules, fence`. The path is from the
/// root, or below the folder in the head of the table.
#[test]
fn names_behind_files_in_documents_exist() {
    let (head, named) = (
        regex(r"^\|.* In `([^`]+)/` \|"),
        regex(r"`([A-Za-z0-9_./-]+\.(?:rs|py|pyi|proto)): ([A-Za-z0-9_:., ]+)`"),
    );
    let mut found = Vec::new();
    let mut names = 0;
    for page in pages() {
        let mut folder = None;
        for (index, line) in page.text.lines().enumerate() {
            match head.captures(line) {
                Some(parts) => folder = Some(parts[1].to_owned()),
                None if !line.starts_with('|') => folder = None,
                None => {}
            }
            for parts in named.captures_iter(line) {
                let below = folder.iter().map(|folder| root().join(folder).join(&parts[1]));
                let mut paths = below.chain([root().join(&parts[1])]);
                let text = paths.find_map(|path| std::fs::read_to_string(path).ok());
                for name in parts[2].split(", ").flat_map(|name| name.split("::")) {
                    names += 1;
                    if !text.as_ref().is_some_and(|text| is_defined(text, name)) {
                        found.push(format!("{}:{}: {}: {name}", page.path, index + 1, &parts[1]));
                    }
                }
            }
        }
    }
    assert!(names > 50, "the names were not found");
    report("names that the file does not define", &found);
}

/// Returns whether a file defines an item, a method or a variant of that name.
fn is_defined(text: &str, name: &str) -> bool {
    let keywords = r"(?:fn|struct|enum|trait|type|const|static|mod|def|class|message|macro_rules!)";
    regex(&format!(r"(?m)\b{keywords} {name}\b|^ +(?:pub )?{name}(?:,$|\(|: | \{{)")).is_match(text)
}

/// The pages that people write.
fn pages() -> Vec<File> {
    files().into_iter().filter(|file| file.is("md") && !file.is_generated()).collect()
}

/// Expands one list in braces.
fn expand(path: &str) -> Vec<String> {
    let Some((before, rest)) = path.split_once('{') else { return vec![path.to_owned()] };
    let Some((list, after)) = rest.split_once('}') else { return vec![path.to_owned()] };
    list.split(',').map(|part| format!("{before}{part}{after}")).collect()
}

/// Returns whether a path is relative to one of our crates, as in `tests/device/fake_driver.c`.
fn ours_of_a_crate(path: &str) -> bool {
    let crates = std::fs::read_dir(root().join("crates")).expect("there are crates");
    crates.flatten().any(|folder| folder.path().join(path).exists())
}
