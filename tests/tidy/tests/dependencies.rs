//! The dependencies between crates, features, and the licences of libraries.

use std::collections::{BTreeMap, BTreeSet};

use mooncake_tidy::{cargo_metadata, files, packages, regex, report};
use serde_json::Value;

/// Libraries that a crate must not depend on, with the reason.
const BARRED: &[(&str, &str, &str)] = &[
    ("base", "tokio", "base knows no runtime"),
    ("os", "tokio", "os knows no runtime"),
    ("transfer-engine", "prost", "the engine knows no messages of the master"),
    ("transfer-engine", "tonic", "the engine knows no messages of the master"),
    ("transfer-engine", "rdma-sys", "only verbs touches the C bindings"),
    ("store-client", "tonic", "our own clients use the native protocol"),
    ("python", "prost", "the binding holds no messages of its own"),
];

#[test]
fn crates_depend_on_what_the_architecture_page_says() {
    let table = table_of_crates();
    let mut found = Vec::new();
    for package in packages() {
        let folder = folder_of(&package);
        let Some((_, allowed)) = table.iter().find(|(known, _)| *known == folder) else {
            found.push(format!("{folder}: the table has no row for it"));
            continue;
        };
        let mut used = Dependencies::default();
        for dependency in dependencies(&package) {
            let Some(other) = crate_of(&dependency["name"]) else { continue };
            if dependency["kind"] != "dev" {
                used.code.insert(other.to_owned());
            } else if dependency["name"] != package["name"] && other != "base" {
                // The tests of a crate may use its own test-util, and that of base.
                used.tests.insert(other.to_owned());
            }
        }
        used.tests.retain(|other| !used.code.contains(other));
        if allowed.as_ref().is_some_and(|allowed| *allowed != used) {
            found.push(format!("{folder} depends on {used}"));
        }
    }
    report(
        "rows of the table of crates in docs/architecture.md that differ from a manifest",
        &found,
    );
}

#[test]
fn folders_are_named_after_their_crates() {
    let mut found = Vec::new();
    for package in packages() {
        let manifest = package["manifest_path"].as_str().expect("a package has a manifest");
        let name = crate_of(&package["name"]).expect("our packages begin with mooncake-");
        let folder = manifest.rsplit('/').nth(1).expect("a manifest lies in a folder");
        if manifest.contains("/crates/") && folder != name {
            found.push(format!("{manifest} holds mooncake-{name}"));
        }
    }
    report("crates in a folder of another name", &found);
}

#[test]
fn barred_libraries_are_not_used() {
    let mut found = Vec::new();
    for package in packages() {
        let name = crate_of(&package["name"]).unwrap_or_default().to_owned();
        for dependency in dependencies(&package) {
            for (_, library, reason) in BARRED.iter().filter(|(known, _, _)| *known == name) {
                if dependency["name"] == *library {
                    found.push(format!("{name} depends on {library}: {reason}"));
                }
            }
        }
    }
    report("barred libraries", &found);
}

#[test]
fn verbs_need_the_feature_rdma() {
    for package in packages().iter().filter(|package| package["name"] == "mooncake-verbs") {
        let bindings = dependencies(package).find(|dependency| dependency["name"] == "rdma-sys");
        assert_eq!(bindings.expect("verbs uses rdma-sys")["optional"], true);
        assert!(package["features"]["default"].is_null(), "no feature is on by default");
    }
}

#[test]
fn features_need_a_decision() {
    // `grpc` keeps the service out of clients: docs/decisions/0005-native-protocol-and-grpc.md. `library-features` lets
    // builds share libraries: docs/decisions/0042-features-of-libraries.md.
    let allowed = BTreeSet::from(["default", "grpc", "library-features", "rdma", "test-util"]);
    let mut found = Vec::new();
    for package in packages() {
        let features = package["features"].as_object().expect("cargo lists features");
        found.extend(
            features
                .keys()
                .filter(|feature| !allowed.contains(feature.as_str()))
                .map(|feature| format!("{}: {feature}", package["name"])),
        );
    }
    report("features without a decision", &found);
}

#[test]
fn extension_and_tests_share_libraries() {
    let makefile = std::fs::read_to_string(mooncake_tidy::root().join("Makefile"));
    let makefile = makefile.expect("the root has a Makefile");
    let selection = |name: &str| -> Vec<&str> {
        let line = makefile.lines().find_map(|line| line.strip_prefix(name));
        line.expect("the Makefile has the selection").split(' ').collect()
    };
    let of_extension = [&["-p", "mooncake-python"], &selection("SHARED := ")[..]].concat();
    let of_extension = features_of_libraries(&of_extension, "normal,build");
    let of_tests = features_of_libraries(&selection("RUST_TESTED := "), "normal,build,dev");
    let mut found = Vec::new();
    for (library, features) in &of_extension {
        let Some(known) = of_tests.get(library) else { continue };
        found.extend(
            features.difference(known).map(|one| format!("{library}: {one}, and {known:?}")),
        );
    }
    report(
        "libraries whose features differ between the extension and the tests; add them to \
         tests/library-features/Cargo.toml",
        &found,
    );
}

/// Returns the sets of features with which a selection of crates has each library.
fn features_of_libraries(selection: &[&str], edges: &str) -> BTreeMap<String, BTreeSet<String>> {
    let form = ["tree", "--prefix", "none", "--format", "{p}|{f}|", "--edges", edges];
    let output = mooncake_tidy::cargo(&[&form, selection].concat());
    let output = String::from_utf8(output).expect("cargo writes UTF-8");
    let mut libraries: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in output.lines() {
        let cells: Vec<_> = line.split('|').collect();
        // Behind the version of ours stands their folder.
        if let [library, features, _] = cells[..]
            && !library.starts_with("mooncake-")
        {
            libraries.entry(library.to_owned()).or_default().insert(features.to_owned());
        }
    }
    assert!(libraries.len() > 100, "{output}");
    libraries
}

#[test]
fn manifests_inherit_from_the_workspace() {
    let mut found = Vec::new();
    let own_version = regex(r#"^[\w-]+\s*=\s*("[\d^~=]|\{.*version\s*=)"#);
    for file in files() {
        // The program outside is not of the workspace.
        if !file.path.ends_with("/Cargo.toml") || file.path == "tests/outside/Cargo.toml" {
            continue;
        }
        for wanted in ["[lints]\nworkspace = true", "version.workspace = true"] {
            if !file.text.contains(wanted) {
                found.push(format!("{}: no `{}`", file.path, wanted.replace('\n', " ")));
            }
        }
        found.extend(file.matches(&own_version));
    }
    report("manifests that do not inherit from the workspace", &found);
}

#[test]
fn licences_are_allowed_by_deny_toml() {
    let deny = std::fs::read_to_string(mooncake_tidy::root().join("deny.toml"));
    let deny = deny.expect("the root has a deny.toml");
    let (_, list) = deny.split_once("\nallow = [").expect("deny.toml has a list of licences");
    let (list, _) = list.split_once(']').expect("the list ends");
    let allowed: BTreeSet<&str> = list.split('"').skip(1).step_by(2).collect();
    assert!(allowed.contains("MIT") && !list.contains("GPL"), "{allowed:?}");
    let mut found = Vec::new();
    let metadata = cargo_metadata(&["--filter-platform", "x86_64-unknown-linux-gnu"]);
    for package in metadata["packages"].as_array().expect("cargo lists packages") {
        let licence = licence_of(package).replace('/', " OR ");
        // The part of the SPDX grammar that occurs: alternatives of conjunctions.
        let is_allowed = licence.split(" OR ").any(|one| {
            one.split(" AND ").all(|name| allowed.contains(name.trim_matches(['(', ')', ' '])))
        });
        if !is_allowed {
            found.push(format!("{}: {licence}", package["name"]));
        }
    }
    report("dependencies whose licence is not in deny.toml", &found);
}

/// Returns the licence in the manifest, or the title of the licence file.
fn licence_of(package: &Value) -> String {
    if let Some(name) = package["license"].as_str() {
        return name.to_owned();
    }
    let folder = package["manifest_path"].as_str().and_then(|path| path.strip_suffix("Cargo.toml"));
    let text = folder
        .zip(package["license_file"].as_str())
        .and_then(|(folder, file)| std::fs::read_to_string(format!("{folder}{file}")).ok());
    match text.as_deref().and_then(|text| text.lines().next()).map(str::trim) {
        Some("MIT License" | "The MIT License (MIT)") => "MIT".to_owned(),
        other => other.unwrap_or("none").to_owned(),
    }
}

/// The crates of the workspace that a crate depends on.
#[derive(Debug, Default, PartialEq, Eq)]
struct Dependencies {
    code: BTreeSet<String>,
    /// Of its tests only.
    tests: BTreeSet<String>,
}

/// Writes dependencies as the table has them.
impl std::fmt::Display for Dependencies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let list = |names: &BTreeSet<String>| names.iter().cloned().collect::<Vec<_>>().join(", ");
        let code = if self.code.is_empty() { "nothing".to_owned() } else { list(&self.code) };
        if self.tests.is_empty() {
            return write!(f, "{code}");
        }
        write!(f, "{code}{IN_TESTS}{}", list(&self.tests))
    }
}

/// What stands before the dependencies of tests in a row.
const IN_TESTS: &str = "; its tests also on ";

/// Reads the table of crates in `docs/architecture.md`: the folder of each, and what it may depend on,
/// which is anything if there is no list.
fn table_of_crates() -> Vec<(String, Option<Dependencies>)> {
    let page = std::fs::read_to_string(mooncake_tidy::root().join("docs/architecture.md"));
    let page = page.expect("there is a page about the architecture");
    let (_, section) = page.split_once("\n## Crates\n").expect("the page has the table");
    let (section, _) = section.split_once("\n## ").expect("other sections follow");
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    rows.flat_map(|row| {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let [folders, _, depends_on] = cells[..] else { panic!("not three cells: {row}") };
        folders.split('`').skip(1).step_by(2).map(move |folder| (folder.to_owned(), depends_on))
    })
    .map(|(folder, depends_on)| {
        let (code, tests) = depends_on.split_once(IN_TESTS).unwrap_or((depends_on, ""));
        let names = |list: &str| match list {
            "" | "nothing" => BTreeSet::new(),
            list => list.split(", ").map(str::to_owned).collect(),
        };
        let listed = Dependencies { code: names(code), tests: names(tests) };
        (folder, (depends_on != "anything").then_some(listed))
    })
    .collect()
}

/// Returns the folder of a package from the root.
fn folder_of(package: &Value) -> String {
    let manifest = package["manifest_path"].as_str().expect("a package has a manifest");
    let root = mooncake_tidy::root().canonicalize().expect("the root exists");
    let folder = manifest.strip_suffix("/Cargo.toml").expect("its name is Cargo.toml");
    let folder = std::path::Path::new(folder).strip_prefix(root).expect("packages lie in the tree");
    folder.to_str().expect("our file names are UTF-8").to_owned()
}

/// Returns the short name of a crate, if it belongs to the workspace.
fn crate_of(name: &Value) -> Option<&str> {
    name.as_str()?.strip_prefix("mooncake-")
}

fn dependencies(package: &Value) -> impl Iterator<Item = &Value> {
    package["dependencies"].as_array().expect("cargo lists dependencies").iter()
}
