//! Who may use whom, and on what terms.

use std::collections::BTreeSet;

use mooncake_tidy::{cargo_metadata, files, packages, regex, report};
use serde_json::Value;

/// Each room and the rooms it may use, for its code and for its tests alike. `docs/architecture.md`
/// shows the same table to people.
const ARROWS: &[(&str, &[&str])] = &[
    ("base", &[]),
    ("proto", &["base"]),
    ("http", &[]),
    ("cli", &["base"]),
    ("verbs", &[]),
    ("transfer-engine", &["base", "verbs"]),
    ("master", &["base", "http", "cli", "proto"]),
    ("store-client", &["base", "http", "proto", "transfer-engine"]),
    ("transfer-tools", &["base", "cli", "transfer-engine"]),
    (
        "daemon",
        &[
            "base",
            "http",
            "cli",
            "proto",
            "transfer-engine",
            "transfer-tools",
            "master",
            "store-client",
            "testkit",
        ],
    ),
    ("rpc", &["base", "transfer-engine"]),
    (
        "python",
        &[
            "base",
            "cli",
            "proto",
            "verbs",
            "transfer-engine",
            "transfer-tools",
            "rpc",
            "daemon",
            "master",
            "store-client",
        ],
    ),
    ("testkit", &["base", "proto", "verbs", "transfer-engine", "master", "store-client"]),
    ("codegen", &["base", "daemon", "master", "transfer-engine"]),
    ("cluster-tests", &["base", "proto", "transfer-engine", "master", "store-client", "testkit"]),
    ("simulation", &["base", "master"]),
    ("tidy", &[]),
    ("benches", &["base", "proto", "transfer-engine", "master", "store-client", "testkit"]),
];

/// Libraries that must stay out of a room, with the reason.
const BARRED: &[(&str, &str, &str)] = &[
    ("base", "tokio", "base knows no runtime"),
    ("transfer-engine", "prost", "the engine knows no messages of the master"),
    ("transfer-engine", "tonic", "the engine knows no messages of the master"),
    ("transfer-engine", "rdma-sys", "only verbs touches the C bindings"),
    ("store-client", "tonic", "our own clients use the native protocol"),
    ("python", "prost", "the binding holds no messages of its own"),
];

#[test]
fn arrows_between_rooms_point_only_where_the_table_says() {
    let mut found = Vec::new();
    for package in packages() {
        let room = room_of(&package["name"]).expect("our packages begin with mooncake-").to_owned();
        let Some((_, allowed)) = ARROWS.iter().find(|(name, _)| *name == room) else {
            found.push(format!("{room}: a new room needs a row in this table"));
            continue;
        };
        for dependency in dependencies(&package) {
            // The tests of a crate may use its own test-util, and that of base.
            let is_test_util = dependency["kind"] == "dev"
                && (dependency["name"] == package["name"] || dependency["name"] == "mooncake-base");
            if !is_test_util
                && let Some(used) = room_of(&dependency["name"])
                && !allowed.contains(&used)
            {
                found.push(format!("{room} uses {used}"));
            }
        }
    }
    report("arrows that the table does not have", &found);
}

#[test]
fn the_room_of_a_crate_is_the_folder_of_its_name() {
    let mut found = Vec::new();
    for package in packages() {
        let manifest = package["manifest_path"].as_str().expect("a package has a manifest");
        let room = room_of(&package["name"]).expect("our packages begin with mooncake-");
        let folder = manifest.rsplit('/').nth(1).expect("a manifest lies in a folder");
        if manifest.contains("/crates/") && folder != room {
            found.push(format!("{manifest} holds mooncake-{room}"));
        }
    }
    report("crates in a folder of another name", &found);
}

#[test]
fn barred_libraries_stay_out() {
    let mut found = Vec::new();
    for package in packages() {
        let room = room_of(&package["name"]).unwrap_or_default().to_owned();
        for dependency in dependencies(&package) {
            for (_, library, reason) in BARRED.iter().filter(|(name, _, _)| *name == room) {
                if dependency["name"] == *library {
                    found.push(format!("{room} uses {library}: {reason}"));
                }
            }
        }
    }
    report("libraries in rooms that must do without them", &found);
}

#[test]
fn verbs_come_with_the_feature_rdma_only() {
    for package in packages().iter().filter(|package| package["name"] == "mooncake-verbs") {
        let bindings = dependencies(package).find(|dependency| dependency["name"] == "rdma-sys");
        assert_eq!(bindings.expect("verbs uses rdma-sys")["optional"], true);
        assert!(package["features"]["default"].is_null(), "no feature is on by default");
    }
}

#[test]
fn features_are_rdma_and_test_util_and_what_a_decision_allows() {
    // `grpc` keeps the service out of clients: docs/decisions/0005-native-protocol-and-grpc.md.
    let allowed = BTreeSet::from(["default", "grpc", "rdma", "test-util"]);
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
fn every_crate_inherits_lints_version_and_dependencies() {
    let mut found = Vec::new();
    let own_version = regex(r#"^[\w-]+\s*=\s*("[\d^~=]|\{.*version\s*=)"#);
    for file in files() {
        if !file.path.ends_with("/Cargo.toml") {
            continue;
        }
        for wanted in ["[lints]\nworkspace = true", "version.workspace = true"] {
            if !file.text.contains(wanted) {
                found.push(format!("{}: no `{}`", file.path, wanted.replace('\n', " ")));
            }
        }
        found.extend(file.matches(&own_version));
    }
    report("manifests that do not inherit from the root", &found);
}

#[test]
fn every_dependency_has_a_licence_that_deny_toml_allows() {
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
        // Enough of the grammar for what is there: alternatives of conjunctions.
        let is_allowed = licence.split(" OR ").any(|one| {
            one.split(" AND ").all(|name| allowed.contains(name.trim_matches(['(', ')', ' '])))
        });
        if !is_allowed {
            found.push(format!("{}: {licence}", package["name"]));
        }
    }
    report("dependencies whose licence is not in deny.toml", &found);
}

/// What the manifest names; else what the title of its licence file says.
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

/// The room, if it is one of ours.
fn room_of(name: &Value) -> Option<&str> {
    name.as_str()?.strip_prefix("mooncake-")
}

fn dependencies(package: &Value) -> impl Iterator<Item = &Value> {
    package["dependencies"].as_array().expect("cargo lists dependencies").iter()
}
