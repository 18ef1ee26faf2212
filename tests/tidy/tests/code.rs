//! Restrictions on code: unsafe, environment reads, the purity of `state/`, Python's `__all__`.

use std::collections::{BTreeMap, BTreeSet};

use mooncake_tidy::{File, files, regex, report};

/// The files that may hold `unsafe`, and folders of tests, with the reason. Everywhere else it is
/// forbidden.
const UNSAFE: &[(&str, &str)] = &[
    ("benches/benches/transfer.rs", "lends its own buffers to transfers"),
    ("benches/programs/batches.rs", "lends its own buffer to transfers"),
    ("benches/tests/instructions/calls.rs", "lends its own buffer to transfers"),
    ("benches/tests/instructions/rdma.rs", "lends its own buffer to transfers"),
    ("crates/base/src/clock.rs", "reads the clock that runs on through suspend"),
    ("crates/disk/src/memory.rs", "lends memory of callers to reads"),
    ("crates/disk/src/reader/ring.rs", "tells the kernel addresses of memory that was lent"),
    ("crates/disk/tests/forked_child.rs", "forks a child"),
    ("crates/master/tests/recovery_memory.rs", "counts what is allocated"),
    ("crates/os/src/fork.rs", "handles a fork"),
    ("crates/os/src/memory.rs", "reads the size of a page, and asks for huge pages"),
    ("crates/os/src/memory/nontemporal.rs", "non-temporal stores"),
    ("crates/os/src/thread.rs", "counts the preemptions of a thread"),
    ("crates/verbs/src/completion_channel.rs", "calls ibverbs"),
    ("crates/verbs/src/completion_queue.rs", "calls ibverbs"),
    ("crates/verbs/src/context.rs", "calls ibverbs"),
    ("crates/verbs/src/device.rs", "calls ibverbs"),
    ("crates/verbs/src/event.rs", "calls ibverbs"),
    ("crates/verbs/src/fake/exported.rs", "simulates ibverbs"),
    ("crates/verbs/src/fake/functions.rs", "simulates ibverbs"),
    ("crates/verbs/src/fake/objects.rs", "simulates ibverbs"),
    ("crates/verbs/src/fake/queues.rs", "simulates ibverbs"),
    ("crates/verbs/src/file_descriptor.rs", "calls poll and fcntl"),
    ("crates/verbs/src/gid.rs", "calls ibverbs"),
    ("crates/verbs/src/library.rs", "loads ibverbs"),
    ("crates/verbs/src/memory_region.rs", "calls ibverbs"),
    ("crates/verbs/src/port.rs", "calls ibverbs"),
    ("crates/verbs/src/posting.rs", "calls ibverbs"),
    ("crates/verbs/src/protection_domain.rs", "calls ibverbs"),
    ("crates/verbs/src/queue_pair.rs", "calls ibverbs"),
    ("crates/verbs/src/queue_pair/handle.rs", "calls ibverbs"),
    ("crates/verbs/tests/devices/pair.rs", "lends memory to a device"),
    ("crates/verbs/tests/devices/main.rs", "lends memory to a device"),
    ("crates/transfer-engine/src/engine/rdma.rs", "registers memory of callers"),
    ("crates/transfer-engine/src/transport/rdma.rs", "moves memory of callers"),
    ("crates/rdma/src/registration.rs", "registers memory of callers"),
    ("crates/rdma/src/registration/local_memory.rs", "registers memory of callers"),
    ("crates/rdma/src/registration/registered.rs", "registers memory of callers"),
    ("crates/rdma/src/registration/rule.rs", "registers memory of callers"),
    ("crates/rdma/src/devices.rs", "registers memory of callers"),
    ("crates/rdma/src/link.rs", "moves memory of callers"),
    ("crates/rdma/src/send_queue.rs", "posts memory of callers"),
    ("crates/rdma/tests/transfers/main.rs", "lends memory to devices"),
    ("crates/rdma/tests/transfers/side.rs", "lends memory to devices"),
    ("crates/transfer-engine/src/path/selection.rs", "names memory in its tests"),
    ("crates/transfer-engine/src/copy.rs", "copies between addresses that were checked"),
    ("crates/transfer-engine/src/copy/page_check.rs", "asks the kernel about addresses"),
    ("crates/transfer-engine/src/device/driver.rs", "loads the CUDA driver and calls it"),
    ("crates/transfer-engine/src/device/exported.rs", "names memory of devices to their driver"),
    ("crates/transfer-engine/src/device/pinned.rs", "lends pinned memory to copies"),
    ("crates/transfer-engine/src/memory.rs", "lends buffers to copies"),
    ("crates/transfer-engine/src/memory/file.rs", "maps files"),
    ("crates/transfer-engine/src/memory/mapping.rs", "maps and seals shared memory"),
    ("crates/transfer-engine/src/memory/prefault.rs", "lends buffers of its tests"),
    (
        "crates/transfer-engine/src/memory/address_quarantine.rs",
        "unmaps shared memory and reserves its addresses",
    ),
    ("crates/transfer-engine/src/transfer_entry.rs", "carries addresses of memory that was lent"),
    ("crates/transfer-engine/src/memory/region.rs", "names registered memory to copies"),
    (
        "crates/transfer-engine/src/transport/shm/server/wake_event.rs",
        "eventfd, which std does not have",
    ),
    ("crates/transfer-engine/src/transport/shm/link.rs", "passes file descriptors, and geteuid"),
    ("crates/transfer-engine/src/transport/shm/server/connection.rs", "calls prctl"),
    ("crates/transfer-engine/src/transport/shm/probe.rs", "process_vm_readv and writev"),
    ("crates/transfer-engine/src/transport/tcp/batch_split.rs", "splits ranges that were lent"),
    ("crates/transfer-engine/src/transport/tcp/server/connection.rs", "serves pinned memory"),
    (
        "crates/transfer-engine/src/transport/tcp/server/connection/staged.rs",
        "serves memory of devices",
    ),
    ("crates/transfer-engine/src/transport/tcp/tests/", "lends buffers of the tests"),
    ("crates/transfer-engine/src/transport/tcp/vectored_io.rs", "sendmsg and recvmsg over ranges"),
    ("crates/transfer-engine/tests/", "lends buffers of the tests"),
    ("crates/transfer-engine/examples/", "lends buffers of the example"),
    ("crates/transfer-tools/src/bench/worker.rs", "lends its own memory to transfers"),
    ("crates/store-client/src/client/bytes.rs", "lends the caller's slices to transfers"),
    ("crates/store-client/src/disk/lent_memory.rs", "names memory that disks read into"),
    ("crates/testkit/src/cluster.rs", "lends buffers of the tests"),
    ("benches/programs/one_way.rs", "lends memory of the program to messages"),
    ("crates/collective/src/memory.rs", "reads and writes memory of callers"),
    ("crates/collective/src/peer_memory.rs", "process_vm_readv, and prctl"),
    ("crates/collective/src/ring.rs", "reads and writes memory that two processes share"),
    ("crates/collective/src/shared_futex.rs", "reads and writes memory that processes share"),
    ("crates/collective/src/shared_memory.rs", "maps memory that two processes share"),
    ("crates/collective/src/staging.rs", "reads and writes memory that processes share"),
    ("crates/collective/tests/groups/", "lends memory of the test to operations"),
    ("crates/python/src/collective/engine_fabric.rs", "lends memory of tensors to an engine"),
    ("crates/python/src/collective/group.rs", "lends memory of tensors to operations"),
    ("crates/python/src/buffer.rs", "the buffer protocol"),
    ("crates/python/src/buffer/pages.rs", "maps pages"),
    ("crates/python/src/caller_memory.rs", "names memory of Python objects to transfers"),
    ("crates/python/src/hostmem.rs", "maps memory for allocators in C"),
];

#[test]
fn unsafe_is_used_only_in_listed_files() {
    let pattern = regex(r"\bunsafe\b");
    let lines: Vec<_> =
        rust().iter().map(|file| (file.path.clone(), file.matches(&pattern))).collect();
    let covers = |row: &str, path: &str| row == path || row.ends_with('/') && path.starts_with(row);
    let mut found: Vec<_> = lines
        .iter()
        .filter(|(path, _)| !UNSAFE.iter().any(|(row, _)| covers(row, path)))
        .flat_map(|(_, lines)| lines.clone())
        .collect();
    for (row, reason) in UNSAFE {
        assert!(reason.split(' ').count() >= 2, "{row} needs a reason");
        if !lines.iter().any(|(path, lines)| covers(row, path) && !lines.is_empty()) {
            found.push(format!("{row}: is listed but holds none"));
        }
    }
    report("unsafe in a file that is not listed, or a stale row of the list", &found);
}

#[test]
fn included_files_lie_in_the_crate() {
    // A packaged crate has nothing else; a link inside of it is packaged as the file that it names.
    let pattern = regex(r#"include_(?:str|bytes)!\("((?:\.\./)+)"#);
    let is_outside = |file: &File, ups: &str| {
        let depth = file.path.matches('/').count();
        // `crates/NAME` stays above the file.
        ups.matches("../").count() > depth - 2
    };
    let found: Vec<_> = rust()
        .iter()
        .filter(|file| file.path.starts_with("crates/"))
        .filter(|file| pattern.captures_iter(&file.text).any(|it| is_outside(file, &it[1])))
        .map(|file| file.path.clone())
        .collect();
    report("files that include something from outside of their crate", &found);
}

#[test]
fn threads_are_started_in_one_place() {
    let pattern = regex(r"\bthread::(Builder|spawn)\b");
    let tests = regex(r"#\[cfg\(test\)\]\n(#\[.*\]\n)*(pub\(crate\) )?mod ");
    let found: Vec<_> = rust()
        .into_iter()
        .filter(|file| file.path.starts_with("crates/") && file.path.contains("/src/"))
        .filter(|file| file.path != "crates/os/src/threads.rs" && !is_for_tests(&file.path))
        .flat_map(|file| {
            let product = tests.split(&file.text).next().unwrap_or_default();
            File { text: product.to_owned(), ..file }.matches(&pattern)
        })
        .collect();
    report("threads that mooncake_os::threads does not start", &found);
}

fn is_for_tests(path: &str) -> bool {
    path.starts_with("crates/testkit/") || path.contains("/tests/") || path.ends_with("/tests.rs")
}

#[test]
fn the_environment_is_read_in_one_place() {
    let pattern = regex(r"\benv::(var|vars|set_var|remove_var)(_os)?\b");
    let found: Vec<_> = rust()
        .iter()
        .filter(|file| file.path != "crates/base/src/env.rs")
        .flat_map(|file| file.matches(&pattern))
        .collect();
    report("reads of the environment outside of mooncake_base::env", &found);
}

/// The code that may read variables, with the reason. Everything else is handed values.
const READS_VARIABLES: &[(&str, &str)] = &[
    ("crates/base/src/", "declares the variables"),
    ("crates/cli/src/", "sets programs up"),
    ("crates/settings/src/", "reads settings for programs and bindings"),
    ("crates/python/src/", "is the Python binding"),
    ("crates/master/src/config.rs", "resolves the options of the master"),
    ("crates/master/src/config/", "declares the options of the master"),
    ("crates/master/src/run.rs", "is the program of the master"),
    ("crates/codegen/src/", "lists the variables"),
];

#[test]
fn libraries_read_no_environment_variables() {
    let pattern =
        regex(r"\b(env|environment)::[A-Z]|\bEnvVar\b|\b(set_in_environment|read_flag)\b");
    let library = regex(r"^crates/[^/]+/src/");
    let lines: Vec<_> = rust()
        .iter()
        .filter(|file| library.is_match(&file.path))
        .map(|file| (file.path.clone(), file.matches(&pattern)))
        .collect();
    let mut found: Vec<_> = lines
        .iter()
        .filter(|(path, _)| !READS_VARIABLES.iter().any(|(row, _)| path.starts_with(row)))
        .flat_map(|(_, lines)| lines.clone())
        .collect();
    for (row, reason) in READS_VARIABLES {
        assert!(reason.split(' ').count() >= 3, "{row} needs a reason");
        if !lines.iter().any(|(path, lines)| path.starts_with(row) && !lines.is_empty()) {
            found.push(format!("{row}: is listed but reads none"));
        }
    }
    report("environment variables in code that should be handed values", &found);
}

#[test]
fn every_environment_variable_is_read() {
    let declarations = "crates/base/src/env.rs";
    let of_python = "python/mooncake/";
    let (declared, users): (Vec<_>, Vec<_>) = files()
        .into_iter()
        .filter(|file| file.is_code())
        .filter(|file| file.path == declarations || !file.path.starts_with("tests/tidy/"))
        .partition(|file| file.path == declarations);
    let row = regex(r#"(?m)^    ([A-Z][A-Z0-9_]+)(?: \([^)]*\))?: .* => ""#);
    let names: Vec<_> = row.captures_iter(&declared[0].text).map(|row| row[1].to_owned()).collect();
    assert!(names.len() > 40, "the rows were not found");
    let is_read = |name: &String| {
        let by_rust = regex(&format!(r"\b(env|environment)::{name}\b"));
        users.iter().any(|file| {
            by_rust.is_match(&file.text)
                || file.path.starts_with(of_python) && file.text.contains(name.as_str())
        })
    };
    let unread: Vec<_> = names.into_iter().filter(|name| !is_read(name)).collect();
    report("environment variables that no code reads", &unread);
}

#[test]
fn rules_have_no_clock_randomness_or_io() {
    let pattern = regex(concat!(
        r"\b(Instant|SystemTime|SystemClock|tokio|getrandom|thread_rng|async|Condvar|Mutex|RwLock)\b",
        r"|\.await\b|\bstd::(fs|io|thread|process|env)\b|\b(Tcp|Udp|Unix)(Stream|Listener|Socket)|\brand::|\btracing::|\bmpsc\b",
    ));
    let is_rule = |file: &&File| {
        file.path == "crates/master/src/state.rs"
            || file.path.starts_with("crates/master/src/state/")
            || file.path == "crates/election/src/rules.rs"
            || file.path.starts_with("crates/election/src/rules/")
            || file.path == "crates/store-client/src/protocol.rs"
            || file.path.starts_with("crates/store-client/src/protocol/")
    };
    let rules = rust();
    assert!(
        rules.iter().filter(is_rule).count() >= 4,
        "the rules lie in master/src/state and store-client/src/protocol"
    );
    let found: Vec<_> =
        rules.iter().filter(is_rule).flat_map(|file| file.matches(&pattern)).collect();
    report("clocks, randomness or I/O in the rules of the master or of the client", &found);
}

/// The folder of the rules of the master.
const STATE: &str = "crates/master/src/state/";

/// The layers of `master/src/state`, from below, each with those that it must not know.
const STATE_LAYERS: &[(&str, &[&str])] = &[
    ("catalog", &["pool", "ledger", "inventory", "calls", "State"]),
    ("pool", &["catalog", "ledger", "inventory", "calls", "State"]),
    ("ledger", &["inventory", "calls", "State"]),
    ("inventory", &["calls", "State"]),
    ("calls", &["State"]),
];

#[test]
fn layers_of_the_state_know_only_those_below() {
    let rust = rust();
    for (layer, above) in STATE_LAYERS {
        let (file, folder) = (format!("{STATE}{layer}.rs"), format!("{STATE}{layer}/"));
        let files: Vec<_> = rust
            .iter()
            .filter(|found| found.path == file || found.path.starts_with(&folder))
            .collect();
        assert!(files.len() >= 5, "{folder} has moved");
        // A name at the beginning of a path below `crate::state`, in one line or in a list.
        let pattern = regex(&format!(
            r"(?m)(crate::state::|super::super::|^    |crate::state::\{{)({})(::|,|;)",
            above.join("|")
        ));
        let found: Vec<_> = files.iter().flat_map(|file| file.matches(&pattern)).collect();
        report(&format!("names of upper layers in {folder}"), &found);
    }
}

/// The parts of the inventory whose fields calls read: data without invariants.
const PLAIN_PARTS: &[&str] = &["rules"];

/// Returns the fields of the inventory that others see, and chains through its parts to fields of theirs.
fn doors_of_the_inventory(files: &[File]) -> Vec<String> {
    let (file, folder) = (format!("{STATE}inventory.rs"), format!("{STATE}inventory/"));
    let field = regex(r"^    pub(\([^)]*\))? \w+: ");
    let chain = regex(r"\binventory\s*\.\s*(\w+)(\(\))?\s*\.\s*\w+\s*\.\s*\w");
    let mut found = Vec::new();
    for source in files {
        if source.path == file {
            let lines =
                source.code_lines().skip_while(|(_, line)| !line.contains("struct Inventory {"));
            let fields = lines.take_while(|(_, line)| !line.starts_with('}'));
            let open = fields.filter(|(_, line)| field.is_match(line));
            found.extend(open.map(|(number, line)| format!("{file}:{number}: {}", line.trim())));
        } else if source.path.starts_with(STATE)
            && !source.path.starts_with(&folder)
            && !source.path.starts_with(&format!("{STATE}tests"))
        {
            let chains = chain.captures_iter(&source.text);
            let chains = chains.filter(|chain| !PLAIN_PARTS.contains(&&chain[1]));
            found.extend(chains.map(|chain| format!("{}: {}", source.path, &chain[0])));
        }
    }
    found
}

#[test]
fn parts_of_the_inventory_are_its_own() {
    let rust = rust();
    assert!(rust.iter().any(|file| file.path == format!("{STATE}inventory.rs")), "it has moved");
    report("ways around the methods of the inventory", &doors_of_the_inventory(&rust));
}

#[test]
fn ways_around_the_inventory_are_found() {
    let file =
        |path: &str, text: &str| File { path: format!("{STATE}{path}"), text: text.to_owned() };
    let chain = "fn f() { self.inventory\n    .pool\n    .segments.at(slot); inventory.rules().tasks.max; }";
    let fields = "struct Inventory {\n    pub(in crate::state) pool: Pool,\n    rules: Rules,\n}\n";
    let files = [
        file("inventory.rs", fields),
        file("inventory/a.rs", chain),
        file("calls/a.rs", chain),
        file(
            "calls/b.rs",
            "self.inventory.pool().segments.at(slot); inventory.pool().is_synced(1);",
        ),
    ];
    assert_eq!(doors_of_the_inventory(&files).len(), 3);
}

/// The lint `match_bool` finds a `match` with two arms. It does not see arms with guards, matches on
/// references, and an `Option` that a flag filters.
#[test]
fn flags_are_tested_by_if() {
    let pattern = regex(r"^\s*(true|false)( if .*)? => |\.filter\(\|_\| ");
    let found: Vec<_> = rust().iter().flat_map(|file| file.matches(&pattern)).collect();
    report("flags that are tested by a pattern: use if", &found);
}

/// No limit is a reason to pass several arguments as one tuple. A range may be one argument.
#[test]
fn arguments_have_names_of_their_own() {
    let pattern = regex(r"^\s+\(\w+, .*\): \(|\bfn \w+.*[(,] ?\([a-z_]+, [a-z_ ,()]*\): \(");
    let range = regex(r"\((base|address), length\): \(");
    let mut found = Vec::new();
    let library = regex(r"^crates/[^/]+/src/");
    for file in rust() {
        if library.is_match(&file.path) {
            let tuples = file.matches(&pattern);
            found.extend(tuples.into_iter().filter(|line| !range.is_match(line)));
        }
    }
    report("arguments that share a tuple", &found);
}

/// Crates whose modules form layers: none needs itself, over whatever modules.
const LAYERED: &[&str] = &["collective", "daemon", "http", "rpc"];

#[test]
fn modules_of_a_layered_crate_form_no_circle() {
    let mut found = Vec::new();
    for owner in LAYERED {
        let mut left = modules_used(&format!("crates/{owner}/src/"));
        assert!(left.len() > 1, "{owner} has modules");
        loop {
            let known: BTreeSet<_> = left.keys().cloned().collect();
            let before = left.len();
            left.retain(|_, used| used.iter().any(|module| known.contains(module)));
            if left.len() == before {
                break;
            }
        }
        found.extend(
            left.into_iter()
                .map(|(module, used)| format!("crates/{owner}: {module} uses {used:?}")),
        );
    }
    report("modules that form a circle, or use one", &found);
}

/// Returns which modules of a crate each of its modules uses, submodules included; without its root and
/// tests.
fn modules_used(folder: &str) -> BTreeMap<String, BTreeSet<String>> {
    let import = regex(r"(?ms)^use crate::(.*?);");
    let mut modules: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for file in rust() {
        let Some(path) = file.path.strip_prefix(folder) else { continue };
        let name = path.split('/').next().unwrap_or(path).trim_end_matches(".rs");
        if ["lib", "main", "fuzz"].contains(&name) || path.ends_with("tests.rs") {
            continue;
        }
        let used = modules.entry(name.to_owned()).or_default();
        for list in import.captures_iter(&file.text) {
            used.extend(first_names(&list[1]).filter(|other| other != name));
        }
    }
    modules
}

/// Returns the first name of each path of an import, as `a` and `b` of `{a::{x, y}, b::z}`.
fn first_names(list: &str) -> impl Iterator<Item = String> {
    let list = list.strip_prefix('{').map_or(list, |list| list.trim_end_matches('}'));
    let (mut depth, mut names) = (0, vec![String::new()]);
    for letter in list.chars() {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => names.push(String::new()),
            _ if depth == 0 => names.last_mut().expect("there is one").push(letter),
            _ => {}
        }
    }
    names.into_iter().filter_map(|path| {
        let name = path.trim().split("::").next()?.to_owned();
        (!name.is_empty()).then_some(name)
    })
}

#[test]
fn no_unfinished_code_or_ignored_tests() {
    let pattern = regex(r"\b(todo|unimplemented)!|#\[ignore");
    // A function that a test runs in another process must be a test for the harness to find it.
    let is_entry = |line: &String| line.contains("#[ignore = \"not a test: ");
    let files = rust();
    let lines = files.iter().flat_map(|file| file.matches(&pattern));
    let found: Vec<_> = lines.filter(|line| !is_entry(line)).collect();
    report("unfinished code or ignored tests", &found);
}

#[test]
fn python_all_lists_are_sorted() {
    let list = regex(r"(?ms)^__all__(?:: [^=]+)? = [\[(](.*?)[\])]");
    let mut found = Vec::new();
    for file in files().iter().filter(|file| file.is("py") || file.is("pyi")) {
        for parts in list.captures_iter(&file.text) {
            let names: Vec<_> = parts[1].split('"').skip(1).step_by(2).collect();
            // Lists that have upstream's order say so to `ruff`.
            let is_ordered = parts[1].contains("# noqa: RUF022");
            if !is_ordered && !names.is_sorted_by_key(|name| (kind_of_name(name), *name)) {
                found.push(format!("{}: {names:?}", file.path));
            }
        }
    }
    report("__all__ out of order (constants, classes, functions; each by name)", &found);
}

#[test]
fn public_python_modules_declare_all() {
    let found: Vec<_> = files()
        .into_iter()
        .filter(|file| file.path.starts_with("python/mooncake/") && file.is("py"))
        .filter(|file| {
            let name = file.path.rsplit('/').next().unwrap_or_default();
            let is_private =
                file.path.split('/').any(|part| part.starts_with('_') && part != "__init__.py");
            !is_private && name != "__main__.py" && !file.text.contains("\n__all__")
        })
        .map(|file| file.path)
        .collect();
    report("public modules without __all__", &found);
}

/// Constants come first, then classes, then the rest, as `ruff` sorts them.
fn kind_of_name(name: &str) -> u8 {
    let has_lower = name.chars().any(char::is_lowercase);
    match name.chars().next() {
        Some(first) if first.is_uppercase() && !has_lower && name.len() > 1 => 0,
        Some(first) if first.is_uppercase() => 1,
        _ => 2,
    }
}

fn rust() -> Vec<File> {
    files()
        .into_iter()
        .filter(|file| {
            file.is("rs") && !file.is_generated() && !file.path.starts_with("tests/tidy/")
        })
        .collect()
}
