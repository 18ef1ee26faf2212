//! Instructions of calls on the hot path, against the counts in `benches/instructions.txt`.
//!
//! `make test-counts` compares, `make counts` writes the file. The counts are those of our crates
//! with optimisation level 1, which both commands set.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod calls;
mod large_pools;
mod rdma;

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    process::{Command, ExitCode},
};

use libtest_mimic::{Arguments, Trial, run};
use mooncake_base::{
    env::{EnvVar, ValueKind},
    requirement::trial,
};
use mooncake_benches::callgrind;

/// The share of the reference by which a count may be higher or lower, in percent.
///
/// A change elsewhere in a crate moves functions between code generation units, which decides what
/// the compiler inlines. Counts moved by up to 4 % with such a change, which then needs new ones.
const MARGIN_PERCENT: f64 = 3.0;

/// The argument that makes this program the counted one; it looks like a filter of tests.
const COUNTED: &str = "counted-calls";

const REFERENCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/instructions.txt");

static MOONCAKE_WRITE_COUNTS: EnvVar = EnvVar {
    name: "MOONCAKE_WRITE_COUNTS",
    aliases: &[],
    default: "",
    kind: ValueKind::Text,
    help: "Set to anything, the test of instruction counts writes its reference.",
};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [mode, wanted] = &arguments[..]
        && mode == COUNTED
    {
        let call = calls::ALL.iter().find(|call| call.name == wanted).unwrap();
        (call.run)();
        return ExitCode::SUCCESS;
    }
    let compare = || {
        assert_eq!(
            option_env!("CARGO_PROFILE_DEV_OPT_LEVEL"),
            Some("1"),
            "the counts are of another optimisation level; use `make test-counts`"
        );
        let counts = counts();
        match MOONCAKE_WRITE_COUNTS.read() {
            Some(_) => fs::write(REFERENCE, written(&counts)).unwrap(),
            None => compare(&counts),
        }
    };
    let trials: Vec<Trial> =
        vec![trial(missing(), "counts_are_within_margin_of_reference", compare)];
    run(&Arguments::from_args(), trials).exit_code()
}

fn counts() -> BTreeMap<&'static str, u64> {
    let count = |call: &calls::Call| {
        let instructions = callgrind::count(call.scope, &[COUNTED, call.name]).unwrap();
        (call.name, instructions / call.count as u64)
    };
    calls::ALL.iter().map(count).collect()
}

/// Returns why the counts cannot be compared here; `None` if they can.
fn missing() -> Option<String> {
    callgrind::missing().or_else(|| {
        let is_same = MOONCAKE_WRITE_COUNTS.read().is_some() || reference().contains(&compiler());
        (!is_same).then(|| "needs the compiler of benches/instructions.txt".to_owned())
    })
}

fn compiler() -> String {
    let version = Command::new("rustc").arg("--version").output().unwrap().stdout;
    String::from_utf8(version).unwrap().trim().to_owned()
}

fn reference() -> String {
    fs::read_to_string(REFERENCE).unwrap()
}

fn written(counts: &BTreeMap<&'static str, u64>) -> String {
    let mut text = format!(
        "# Instructions of one call of each kind, with {}; `make counts` writes this file.\n",
        compiler()
    );
    for (name, count) in counts {
        writeln!(text, "{count:>10}  {name}").unwrap();
    }
    text
}

fn compare(counts: &BTreeMap<&'static str, u64>) {
    let text = reference();
    let reference: BTreeMap<&str, u64> = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.trim().split_once("  ").expect("a count and a name"))
        .map(|(count, name)| (name, count.parse().unwrap()))
        .collect();
    assert!(
        reference.keys().eq(counts.keys()),
        "other calls are listed; `make counts` lists these"
    );
    let mut found = String::new();
    for call in &calls::ALL {
        let (count, reference) = (counts[call.name], reference[call.name]);
        let percent = (count as f64 / reference as f64 - 1.0) * 100.0;
        match call.limit {
            Some(limit) if count > limit => {
                writeln!(found, "{}: {count}, its limit is {limit}", call.name).unwrap();
            }
            None if percent.abs() > MARGIN_PERCENT => {
                writeln!(found, "{}: {count}, {percent:+.1} % of {reference}", call.name).unwrap();
            }
            _ => {}
        }
    }
    let to_peers = counts.iter().filter(|(name, _)| name.starts_with(calls::TO_PEERS));
    let to_peers: Vec<u64> = to_peers.map(|(_, count)| *count).collect();
    let (fewest, most) = (to_peers.iter().min().unwrap(), to_peers.iter().max().unwrap());
    if most * 10 > fewest * 11 {
        writeln!(found, "{}: {to_peers:?}, not within 10 %", calls::TO_PEERS).unwrap();
    }
    assert!(
        found.is_empty(),
        "outside a limit, or more than {MARGIN_PERCENT} % from the reference:\n{found}If that is \
         meant, or fewer are better, run `make counts` and commit benches/instructions.txt"
    );
}
