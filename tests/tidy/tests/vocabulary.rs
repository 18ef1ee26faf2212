//! Retired words: identifiers, file names and phrases that were replaced by the terms of the field.

use std::sync::LazyLock;

use mooncake_tidy::{File, files, regex, report};
use regex::Regex;

/// Identifiers and module names that were renamed, with the current name.
const RETIRED_NAMES: &[(&str, &str)] = &[
    ("Few", "smallvec::SmallVec"),
    ("[Vv]igil|Engaged|processors", "SpinWait, ActiveThread, cpu_count"),
    ("Turn|TurnGuard", "TimedMutex, TimedMutexGuard"),
    ("FLAGS_ABOUT_FLAGS|that_are_set", "META_FLAGS, set_in_environment"),
    ("Rationed|Uneven", "LimitedBuf, ColumnMismatch"),
    ("FenceReturn|returned_fences", "FenceRelease, released_fences"),
    ("DESCRIPTORS", "FILE_DESCRIPTOR_SET"),
    ("Bounded|BoundedCodec|BoundedDecoder|BoundedStream", "LimitedListener, LimitedCodec …"),
    (r"lean(_\w+|::\w+)?|Lean[A-Z]\w*", "native"),
    ("Asked|complaint", "CliCommand, error_prefix"),
    ("Doors?|Told|Recall|CALLS_IN_HASTE", "Protocol, ServerContext, ShutdownOnDrop, BURST_CALLS"),
    ("Seat|seat|seated", "dedicated_thread"),
    ("Keeper|Fresh|lineage", "Maintenance, NewFile, timeline_id"),
    ("Want|Within|Hunt|Pass", "AllocRequest, SegmentFilter, VictimSearch, EvictionPass"),
    ("Putter|Dormancy|Untold|Awaited", "PutOwner, Recovery, EventBuffer, RecoveryScope"),
    ("Holds|Grant|Horizon|Resting", "LeaseAndFence, LocateOptions, MaxGranted, Quarantined"),
    ("KeyAt|SegmentRef|Spot", "KeyHandle, SegmentSlot, Target"),
    ("NotAnEffect", "DecodeError"),
    ("struct (?:Fill|Line|Stage)", "WindowEviction, CacheLine, StagingRange"),
    ("Duel|Shadows", "DuelCounter, ShadowCaches"),
    ("CallLink", "InProcessLink"),
    ("Outbox|FAREWELL|Life|Summer", "PendingReleases, UNREGISTER_TIMEOUT, Shutdown, Checksummer"),
    ("Paces|Site|Suspects|abreast", "LatencyTable, Locality, SuspectedPeers, overlapped_put"),
    (
        "Piece|Trust|Footing|Ways|Repair",
        "TransferEntry, Ownership, RemoteMemory, PathContext, Reconnect",
    ),
    ("Movers|Preparer|Crowd|DOUBT", "WorkerPool, Prefaulter, CpuPressure, UNPROVEN"),
    ("Lane|Lanes|LaneLease", "DataConnection, ConnectionPool, PooledConnection"),
    ("Void|Patience|Letter", "DiscardBuffer, BlockMode, MessageWithFd"),
    ("Bell|Ear|bury", "Waker, WakeReceiver, on_process_exit"),
    ("Attic|Blank|Halves|Made", "DropQueue, GetTarget, IdParts, PerProcess"),
    ("Vain|vain|take_credit|also_named", "Ignored, ignored, rebrand, accept_aliases"),
];

/// Words and phrases that no text needs, in lower case.
const RETIRED_WORDS: &str = r"\b(vigil|abreast|attic|lean doors?|whoever|by the leave of|established (engine|implementation|package|client|server|master|names?))\b";

/// Plurals with which the docstring of a property or a fixture begins; other words with this ending
/// are taken for verbs in the third person.
const PLURAL_NOUNS: &[&str] = &[
    "Address",
    "Addresses",
    "Bytes",
    "Details",
    "Keys",
    "Masters",
    "Outcomes",
    "Pieces",
    "Prometheus",
    "Ranks",
    "Rows",
    "Settings",
    "Tokens",
];

/// A string literal that ends on its line.
static STRING: LazyLock<Regex> = LazyLock::new(|| regex(r#""(\\.|[^"\\])*""#));

#[test]
fn retired_identifiers_are_not_used() {
    let patterns: Vec<_> = RETIRED_NAMES
        .iter()
        .map(|(names, current)| (regex(&format!(r"\b({names})\b")), *current))
        .collect();
    let mut found = Vec::new();
    for file in own_files().iter().filter(|file| file.is_code()) {
        let lines = code_without_strings(file);
        for (pattern, current) in &patterns {
            let used = lines.iter().filter(|(_, line)| pattern.is_match(line));
            found.extend(used.map(|(number, line)| {
                format!("{}:{number}: {} (now: {current})", file.path, line.trim())
            }));
        }
    }
    report("identifiers that were renamed", &found);
}

#[test]
fn retired_words_are_not_in_file_names() {
    let pattern = regex(r"(^|[/_-])(vigil|abreast|attic|lean|seat|few)([/_.-]|$)");
    let found: Vec<_> = own_files()
        .into_iter()
        .filter(|file| pattern.is_match(&file.path))
        .map(|file| file.path)
        .collect();
    report("file names with retired words", &found);
}

#[test]
fn retired_words_are_not_in_texts() {
    let pattern = regex(RETIRED_WORDS);
    let mut found = Vec::new();
    for file in own_files() {
        for (index, line) in file.text.lines().enumerate() {
            if pattern.is_match(&line.to_lowercase()) {
                found.push(format!("{}:{}: {}", file.path, index + 1, line.trim()));
            }
        }
    }
    report("retired words", &found);
}

#[test]
fn test_names_are_short_claims() {
    const LENGTH_MAX: usize = 60;
    let rust = regex(r"#\[test\]\s+(?:#\[[^\]]*\]\s+)*(?:async )?fn (\w+)");
    let python = regex(r"(?m)^(?:async )?def test_(\w+)");
    let question = regex("^(what|who|whose|whoever|whatever|nobody)_");
    let mut found = Vec::new();
    for file in own_files() {
        let pattern = if file.is("rs") { &rust } else { &python };
        if file.is("rs") || file.is("py") {
            let names = pattern.captures_iter(&file.text).map(|parts| parts[1].to_owned());
            let odd = names.filter(|name| name.len() > LENGTH_MAX || question.is_match(name));
            found.extend(odd.map(|name| format!("{}: {name}", file.path)));
        }
    }
    report("names of tests that are no claims of at most 60 characters", &found);
}

#[test]
fn docstrings_of_functions_are_imperative() {
    let mut found = Vec::new();
    for file in own_files().iter().filter(|file| file.is("py") || file.is("pyi")) {
        found.extend(third_person_docstrings(file));
    }
    report("docstrings of functions in the third person", &found);
}

#[test]
fn third_person_is_found_below_functions_only() {
    let text = "class A(B):\n    \"\"\"Reads.\"\"\"\n\n    def a(\n        self,\n    ) -> str:\n        \
                \"\"\"Returns it.\"\"\"\n\n    def b(self):\n        \"\"\"Keys of b.\"\"\"\n\n    \
                async def c(self):\n        \"\"\"Return it.\"\"\"\n";
    let file = File { path: "a.py".into(), text: text.into() };
    assert_eq!(third_person_docstrings(&file), ["a.py:7: Returns"]);
}

/// Finds docstrings that say what a function does instead of what it shall do. Those of classes
/// and modules describe a thing.
fn third_person_docstrings(file: &File) -> Vec<String> {
    let definition = regex(r"^\s*(async def|def|class) ");
    let docstring = regex(r#"^\s+"""([A-Z][a-z]+s)\b"#);
    let (mut is_function, mut found) = (false, Vec::new());
    for (number, line) in file.code_lines() {
        if let Some(parts) = definition.captures(line) {
            is_function = &parts[1] != "class";
        }
        if let (true, Some(parts)) = (is_function, docstring.captures(line)) {
            let word = &parts[1];
            if !PLURAL_NOUNS.contains(&word) {
                found.push(format!("{}:{number}: {word}", file.path));
            }
        }
    }
    found
}

#[test]
fn strings_are_not_identifiers() {
    let file = File { path: "a.rs".into(), text: "let x = \"Few\"; Few::new() // Few".into() };
    let lines = code_without_strings(&file);
    assert_eq!(lines, [(1, "let x = ; Few::new()".to_owned())]);
}

/// Returns the lines of code with their numbers, without string literals that end on their line.
fn code_without_strings(file: &File) -> Vec<(usize, String)> {
    let is_python = file.is("py") || file.is("pyi");
    file.code_lines()
        .map(|(number, line)| {
            let line = STRING.replace_all(line, "").into_owned();
            let code = if is_python { line.split('#').next().unwrap_or_default() } else { &line };
            (number, code.to_owned())
        })
        .collect()
}

/// Returns the text files of the tree, except generated ones and this list itself.
fn own_files() -> Vec<File> {
    files()
        .into_iter()
        .filter(|file| !file.is_generated() && file.path != "tests/tidy/tests/vocabulary.rs")
        .collect()
}
