//! The size of types: one that does everything cannot be understood or tested part by part.

use std::collections::BTreeMap;

use mooncake_tidy::{File, files, regex, report};

/// Maximum number of methods of a type, over all of its impl blocks.
const METHODS_MAX: usize = 60;

/// Counts the methods of each type, by crate and name. Tests are left out.
fn methods(files: &[File]) -> BTreeMap<(String, String), usize> {
    let method =
        regex(r#"^    (pub(\([^)]*\))? )?((const|async|unsafe|extern "C") )*fn [a-z_0-9]+"#);
    let is_test = regex(r"(^|/)(tests|examples|benches)(/|\.rs$)");
    let mut counts = BTreeMap::new();
    for file in files.iter().filter(|file| file.is("rs") && !file.is_generated()) {
        let Some(name) = crate_of(&file.path).filter(|_| !is_test.is_match(&file.path)) else {
            continue;
        };
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
    let of_tests = test_modules(&files);
    let mut places: BTreeMap<(&str, String), Vec<String>> = BTreeMap::new();
    for file in files.iter().filter(|file| file.is("rs") && !file.is_generated()) {
        let Some(owner) = crate_of(&file.path) else { continue };
        let is_source = file.path.starts_with(&format!("crates/{owner}/src/"));
        if !is_source || of_tests.iter().any(|module| file.path.starts_with(module)) {
            continue;
        }
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
