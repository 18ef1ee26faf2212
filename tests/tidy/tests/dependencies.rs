//! The dependencies between crates, features, and the licences of libraries.

use std::collections::BTreeSet;

use mooncake_tidy::{cargo_metadata, files, packages, regex, report};
use serde_json::Value;

/// Each crate and the crates it may depend on, in its code and in its tests. `docs/architecture.md`
/// has the same table for readers.
const ALLOWED: &[(&str, &[&str])] = &[
    ("base", &[]),
    ("os", &["base"]),
    ("disk", &["base", "os"]),
    ("proto", &["base"]),
    ("http", &[]),
    ("cli", &["base", "os"]),
    ("verbs", &[]),
    ("rdma", &["base", "verbs"]),
    ("kv-client", &["base", "os"]),
    ("election", &["base", "kv-client", "os"]),
    ("transfer-engine", &["base", "os", "kv-client", "rdma", "verbs"]),
    ("master", &["base", "os", "http", "cli", "proto", "kv-client", "election"]),
    (
        "store-client",
        &["base", "os", "http", "proto", "disk", "election", "kv-client", "transfer-engine"],
    ),
    ("settings", &["base", "store-client", "transfer-engine"]),
    ("transfer-tools", &["base", "cli", "os", "settings", "transfer-engine"]),
    (
        "daemon",
        &[
            "base",
            "os",
            "http",
            "cli",
            "proto",
            "transfer-engine",
            "settings",
            "master",
            "store-client",
            "testkit",
        ],
    ),
    ("rpc", &["base", "os"]),
    ("collective", &["base", "os"]),
    (
        "python",
        &[
            "base",
            "os",
            "cli",
            "proto",
            "verbs",
            "transfer-engine",
            "settings",
            "transfer-tools",
            "rpc",
            "collective",
            "disk",
            "daemon",
            "master",
            "store-client",
        ],
    ),
    ("testkit", &["base", "proto", "verbs", "transfer-engine", "master", "store-client"]),
    ("codegen", &["base", "daemon", "master", "transfer-engine"]),
    (
        "cluster-tests",
        &["base", "os", "proto", "transfer-engine", "master", "store-client", "testkit"],
    ),
    ("simulation", &["base", "master", "store-client"]),
    ("tidy", &[]),
    (
        "benches",
        &[
            "base",
            "collective",
            "os",
            "proto",
            "verbs",
            "rdma",
            "transfer-engine",
            "master",
            "store-client",
            "testkit",
        ],
    ),
];

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
fn crates_depend_only_on_what_the_table_allows() {
    let mut found = Vec::new();
    for package in packages() {
        let name =
            crate_of(&package["name"]).expect("our packages begin with mooncake-").to_owned();
        let Some((_, allowed)) = ALLOWED.iter().find(|(known, _)| *known == name) else {
            found.push(format!("{name}: a new crate needs a row in this table"));
            continue;
        };
        for dependency in dependencies(&package) {
            // The tests of a crate may use its own test-util, and that of base.
            let is_test_util = dependency["kind"] == "dev"
                && (dependency["name"] == package["name"] || dependency["name"] == "mooncake-base");
            if !is_test_util
                && let Some(used) = crate_of(&dependency["name"])
                && !allowed.contains(&used)
            {
                found.push(format!("{name} depends on {used}"));
            }
        }
    }
    report("dependencies that the table does not allow", &found);
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

/// Returns the short name of a crate, if it belongs to the workspace.
fn crate_of(name: &Value) -> Option<&str> {
    name.as_str()?.strip_prefix("mooncake-")
}

fn dependencies(package: &Value) -> impl Iterator<Item = &Value> {
    package["dependencies"].as_array().expect("cargo lists dependencies").iter()
}
