//! Types: their size, since one that does everything cannot be understood or tested part by part, their
//! names, where their methods stand, and that a file is about one of them.

use std::collections::BTreeMap;

use mooncake_tidy::{File, files, regex, report};

/// Maximum number of methods of a type, over all of its impl blocks.
const METHODS_MAX: usize = 60;

/// Counts the methods of each type, by crate and name. Tests are left out.
fn methods(files: &[File]) -> BTreeMap<(String, String), usize> {
    let method =
        regex(r#"^    (pub(\([^)]*\))? )?((const|async|unsafe|extern "C") )*fn [a-z_0-9]+"#);
    let is_test = regex(r"(^|/)(tests|examples|benches)(/|\.rs$)");
    let of_tests = test_modules(files);
    let mut counts = BTreeMap::new();
    for file in files.iter().filter(|file| file.is("rs") && !file.is_generated()) {
        let Some(name) = crate_of(&file.path) else { continue };
        let is_of_tests = of_tests.iter().any(|module| file.path.starts_with(module));
        if is_of_tests || is_test.is_match(&file.path) {
            continue;
        }
        let mut header: Option<String> = None;
        let mut owner: Option<String> = None;
        for (_, line) in file.code_lines() {
            if line.starts_with("impl") {
                header = Some(String::new());
            }
            if let Some(text) = &mut header {
                text.push_str(line);
                text.push(' ');
                if line.contains('{') {
                    owner = type_of(text);
                    header = None;
                }
            } else if line.starts_with('}') {
                owner = None;
            } else if let Some(owner) = owner.as_ref().filter(|_| method.is_match(line)) {
                *counts.entry((name.to_owned(), owner.clone())).or_default() += 1;
            }
        }
    }
    counts
}

/// Returns the folder below `crates/`.
fn crate_of(path: &str) -> Option<&str> {
    path.strip_prefix("crates/")?.split_once('/').map(|(name, _)| name)
}

/// Returns the name of the type from the header of an impl block.
fn type_of(header: &str) -> Option<String> {
    let header = header.split(" where ").next()?.split('{').next()?;
    let subject = match header.split_once(" for ") {
        // Not the `for` of a lifetime.
        Some((_, subject)) if !subject.starts_with('<') => subject,
        _ => skip_generics(header.strip_prefix("impl")?),
    };
    let path = subject.trim().split('<').next()?.trim();
    path.rsplit("::").next().map(str::to_owned)
}

/// Returns what follows the generic parameters at the start of a text.
fn skip_generics(text: &str) -> &str {
    let mut depth = 0;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'<' => depth += 1,
            b'>' => depth -= 1,
            _ => {}
        }
        if depth == 0 && byte != b' ' {
            return if byte == b'>' { &text[at + 1..] } else { &text[at..] };
        }
    }
    text
}

#[test]
fn no_type_has_too_many_methods() {
    let counts = methods(&files());
    let found: Vec<_> = counts
        .iter()
        .filter(|(_, count)| **count > METHODS_MAX)
        .map(|((name, owner), count)| format!("crates/{name}: {owner} has {count} methods"))
        .collect();
    report(&format!("types with more than {METHODS_MAX} methods, to be cut by subject"), &found);
}

#[test]
fn methods_of_all_impl_blocks_are_counted() {
    let text = "impl<'a, T: Into<u8>> Parts<'a, T>\nwhere\n    T: Copy,\n{\n    fn one() {}\n\n    \
                pub(crate) const fn two() {}\n}\n\nimpl fmt::Display for a::Parts<'_, u8> {\n    fn \
                fmt() {}\n}\n\nfn three() {}\n\n#[cfg(test)]\nmod tests {\n    impl Parts {\n        \
                fn four() {}\n    }\n}\n";
    let file = |path: &str| File { path: path.to_owned(), text: text.to_owned() };
    let counts = methods(&[file("crates/a/src/b.rs"), file("crates/a/src/b/tests.rs")]);
    assert_eq!(counts, BTreeMap::from([(("a".to_owned(), "Parts".to_owned()), 3)]));
}

/// Types of one crate that share a name. The list only shrinks: rename one of them and delete its row. Those
/// whose modules exclude each other stay.
const SHARED_NAMES: &[(&str, &str)] = &[
    // The same with and without the feature `rdma`.
    ("transfer-engine", "Rdma"),
    ("verbs", "Library"),
];

#[test]
fn types_of_a_crate_have_different_names() {
    let type_name = regex(r"^(?:pub(?:\([^)]*\))? )?(?:struct|enum|union|trait|type) (\w+)");
    let files = files();
    let mut places: BTreeMap<(&str, String), Vec<String>> = BTreeMap::new();
    for file in sources(&files) {
        let owner = crate_of(&file.path).expect("a source lies in a crate");
        for (number, line) in file.code_lines() {
            if let Some(name) = type_name.captures(line) {
                let place = format!("{}:{number}", file.path);
                places.entry((owner, name[1].to_owned())).or_default().push(place);
            }
        }
    }
    let is_shared = |owner: &str, name: &str| {
        places.get(&(owner, name.to_owned())).is_some_and(|places| places.len() > 1)
    };
    let mut found = Vec::new();
    for ((owner, name), places) in &places {
        if places.len() > 1 && !SHARED_NAMES.contains(&(*owner, name)) {
            found.push(format!("{}: {name}, also {}", places[0], places[1..].join(", ")));
        }
    }
    let settled = SHARED_NAMES.iter().filter(|(owner, name)| !is_shared(owner, name));
    found.extend(
        settled.map(|(owner, name)| format!("crates/{owner}: {name} is not shared any more")),
    );
    report("types of one crate that share a name", &found);
}

/// Returns the sources of the crates, without tests and generated files.
fn sources(files: &[File]) -> Vec<&File> {
    let of_tests = test_modules(files);
    let sources = files.iter().filter(|file| {
        let is_source = crate_of(&file.path)
            .is_some_and(|owner| file.path[7 + owner.len()..].starts_with("/src/"));
        let is_of_tests = of_tests.iter().any(|module| file.path.starts_with(module));
        is_source && file.is("rs") && !file.is_generated() && !is_of_tests
    });
    sources.collect()
}

/// Returns the paths, without their ending, of the modules that only tests have.
fn test_modules(files: &[File]) -> Vec<String> {
    let module = regex(r"#\[cfg\(test\)\]\s+(?:#\[[^\]]*\]\s+)*(?:pub(?:\([^)]*\))? )?mod (\w+);");
    let mut modules = Vec::new();
    for file in files.iter().filter(|file| file.is("rs")) {
        let folder = file
            .path
            .strip_suffix("/lib.rs")
            .map_or_else(|| file.path.trim_end_matches(".rs").to_owned(), str::to_owned);
        let named = module.captures_iter(&file.text);
        modules.extend(named.map(|name| format!("{folder}/{}", &name[1])));
    }
    modules
}

/// Methods that stand outside of the file and the folder of their type, with the reason. The list only shrinks:
/// move them and delete their row.
const METHODS_ELSEWHERE: &[(&str, &str, &str)] = &[
    ("crates/base/src/env.rs", "Unsupported", "it alone reads the environment"),
    ("crates/master/src/state.rs", "TaskCalls", "only tests and benchmarks call them"),
    (
        "crates/master/src/state/calls/task/record.rs",
        "Task",
        "the bytes of the log, beside those of jobs",
    ),
    ("crates/master/src/state/ledger/events.rs", "Catalog", "the layer below knows no events"),
    ("crates/master/src/state/ledger/objects.rs", "Objects", "the layer below knows no log"),
    ("crates/master/src/state/ledger/objects.rs", "Pool", "the layer below knows no log"),
    ("crates/master/src/state/ledger/objects.rs", "PoolDisk", "the layer below knows no log"),
    ("crates/verbs/src/event.rs", "Context", "one file has all calls about a subject of ibverbs"),
    ("crates/verbs/src/fake/functions.rs", "ContextObject", "only these functions need it"),
    ("crates/verbs/src/gid.rs", "Context", "one file has all calls about a subject of ibverbs"),
    ("crates/verbs/src/port.rs", "Context", "one file has all calls about a subject of ibverbs"),
];

/// Folders whose files add methods to types outside of it, by subject: docs/decisions has the reason.
const METHODS_BY_SUBJECT: &[(&str, &[&str])] =
    &[("crates/python/src/verbs/", &["Pending", "Store"])];

#[test]
fn methods_stand_in_the_file_or_folder_of_their_type() {
    let found = methods_elsewhere(&files());
    let is_listed = |path: &str, owner: &str| {
        METHODS_ELSEWHERE.iter().any(|(file, name, _)| *file == path && *name == owner)
            || METHODS_BY_SUBJECT
                .iter()
                .any(|(folder, names)| path.starts_with(folder) && names.contains(&owner))
    };
    let mut wrong: Vec<_> = found
        .iter()
        .filter(|(path, _, owner)| !is_listed(path, owner))
        .map(|(path, line, owner)| format!("{path}:{line}: methods of {owner}"))
        .collect();
    for (file, name, reason) in METHODS_ELSEWHERE {
        assert!(reason.split(' ').count() >= 3, "{file}: {name} needs a reason");
        if !found.iter().any(|(path, _, owner)| path == file && owner == name) {
            wrong.push(format!("{file}: has no methods of {name} any more"));
        }
    }
    report("methods outside of the file and the folder of their type", &wrong);
}

/// Returns path, line and type of each inherent impl block outside of the file and the folder of its type. Types that
/// a macro or a generator makes have no place of their own.
fn methods_elsewhere(files: &[File]) -> Vec<(String, usize, String)> {
    let definition = regex(r"^(?:pub(?:\([^)]*\))? )?(?:struct|enum|union|type) (\w+)");
    let sources = sources(files);
    let mut homes: BTreeMap<(&str, String), Vec<&str>> = BTreeMap::new();
    for file in &sources {
        let owner = crate_of(&file.path).expect("a source lies in a crate");
        for (_, line) in file.code_lines() {
            if let Some(name) = definition.captures(line) {
                homes.entry((owner, name[1].to_owned())).or_default().push(&file.path);
            }
        }
    }
    let mut found = Vec::new();
    for file in &sources {
        let owner = crate_of(&file.path).expect("a source lies in a crate");
        for (line, name) in inherent_impls(file) {
            let Some(homes) = homes.get(&(owner, name.clone())) else { continue };
            let is_at_home = homes.iter().any(|home| {
                let folder = home.trim_end_matches("lib.rs").trim_end_matches(".rs");
                *home == file.path
                    || file.path.starts_with(&format!("{}/", folder.trim_end_matches('/')))
            });
            if !is_at_home {
                found.push((file.path.clone(), line, name));
            }
        }
    }
    found
}

/// Returns line and type of each impl block of a file that is not that of a trait.
fn inherent_impls(file: &File) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut header: Option<(usize, String)> = None;
    for (number, line) in file.code_lines() {
        if line.starts_with("impl") {
            header = Some((number, String::new()));
        }
        if let Some((first, text)) = &mut header {
            text.push_str(line);
            text.push(' ');
            if line.contains('{') {
                // The `for` of a lifetime is followed by `<`.
                let of_trait = text.split(" where ").next().unwrap_or_default();
                let is_of_trait = of_trait.replace(" for<", "").contains(" for ");
                found.extend(type_of(text).filter(|_| !is_of_trait).map(|name| (*first, name)));
                header = None;
            }
        }
    }
    found
}

#[test]
fn methods_away_from_their_type_are_found() {
    let file = |path: &str, text: &str| File {
        path: format!("crates/a/src/{path}"),
        text: text.to_owned(),
    };
    let methods = "impl<T>\n    Parts<T>\nwhere\n    T: Copy,\n{\n}\nimpl Debug for Parts<u8> {\n}\nimpl Made {\n}\n";
    let files = [
        file("parts.rs", &format!("pub(crate) struct Parts<T>(T);\n{methods}")),
        file("parts/list.rs", methods),
        file("other.rs", methods),
    ];
    assert_eq!(methods_elsewhere(&files), [("crates/a/src/other.rs".into(), 1, "Parts".into())]);
}

/// Maximum number of lines of the methods of all types of a file but the one with the most. A key, an error or a
/// cursor of a few lines may stand beside its type; a second subject has a file of its own.
const OTHER_LINES_MAX: usize = 75;

/// Files with several subjects, with the reason. The list only shrinks: split them and delete their row.
const SEVERAL_SUBJECTS: &[(&str, &str)] = &[
    ("crates/election/src/elector.rs", "its threads and what they share make one elector"),
    (
        "crates/master/src/journal/followers.rs",
        "all followers and each of them are behind one lock",
    ),
];

#[test]
fn a_file_is_about_one_type() {
    let files = files();
    let mut found = Vec::new();
    let mut excused = Vec::new();
    for file in sources(&files) {
        let others = method_lines_of_others(file);
        let lines: usize = others.iter().map(|(_, lines)| lines).sum();
        if lines <= OTHER_LINES_MAX {
            continue;
        }
        if SEVERAL_SUBJECTS.iter().any(|(path, _)| *path == file.path) {
            excused.push(&file.path);
        } else {
            let names: Vec<_> = others.iter().map(|(name, _)| name.as_str()).collect();
            found.push(format!("{}: {lines} lines of {}", file.path, names.join(", ")));
        }
    }
    for (path, reason) in SEVERAL_SUBJECTS {
        assert!(reason.split(' ').count() >= 3, "{path} needs a reason");
        if !excused.iter().any(|file| file == path) {
            found.push(format!("{path}: is about one type now, or has moved"));
        }
    }
    let rule = format!("files with more than {OTHER_LINES_MAX} lines of methods of other types");
    report(&rule, &found);
}

/// Returns the types of a file, but for the one whose inherent methods have the most lines, each with the lines
/// of its own. A type and its `Inner` are one subject.
fn method_lines_of_others(file: &File) -> Vec<(String, usize)> {
    let method =
        regex(r#"^    (pub(\([^)]*\))? )?((const|async|unsafe|extern "C") )*fn [a-z_0-9]+"#);
    let blocks = inherent_impls(file);
    let mut owners = blocks.into_iter().peekable();
    let mut lines: BTreeMap<String, usize> = BTreeMap::new();
    let (mut owner, mut is_in_method) = (None, false);
    for (number, line) in file.code_lines() {
        if line.starts_with("impl") {
            owner = owners.next_if(|(first, _)| *first == number).map(|(_, name)| name);
        }
        let Some(name) = &owner else { continue };
        let begins = method.is_match(line);
        is_in_method |= begins;
        if is_in_method {
            *lines.entry(name.trim_end_matches("Inner").to_owned()).or_default() += 1;
            is_in_method = line != "    }" && !(begins && line.ends_with('}'));
        }
        if line.starts_with('}') {
            owner = None;
        }
    }
    let mut lines: Vec<_> = lines.into_iter().collect();
    lines.sort_by_key(|(_, lines)| std::cmp::Reverse(*lines));
    lines.split_off(lines.len().min(1))
}

#[test]
fn lines_of_a_second_type_are_counted() {
    let text = "impl<T> Parts<T> {\n    fn one() {}\n\n    /// Doc.\n    pub(crate) fn two() {\n        three();\n    \
                }\n}\n\nimpl PartsInner {\n    fn four() {}\n}\n\nimpl Drop for Key {\n    fn drop() {\n    }\n}\n\nimpl \
                Key {\n    const ONE: Self = Self(1);\n\n    const fn five() {\n    }\n}\n";
    let file = File { path: "crates/a/src/b.rs".to_owned(), text: text.to_owned() };
    assert_eq!(method_lines_of_others(&file), [("Key".to_owned(), 2)]);
}
