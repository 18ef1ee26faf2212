//! Chaos test: writers, readers and eviction, while holders and masters are killed. Every byte depends
//! on its key, version and position, and no reader may get a byte of another object. One variant runs
//! masters without a log, the other restarts them from their log.

use std::time::{Duration, Instant};

use mooncake_base::{env, parse::read_number, requirement::is_long_run};
use mooncake_cluster_tests::{MasterProcess, NodeProcess, tally::Tally};
use mooncake_testkit::{Random, until};

/// The longest wait for a reply of a node: the end of a call in progress.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// The longest time without a successful call after a death, also on a busy machine.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(60);

/// The range of suspensions of a node, in milliseconds: longer than a fence, so that the memory under
/// a read may be reused, and sometimes, but not always, longer than `client_ttl`.
const SUSPENSION_MS: (u64, u64) = (300, 2200);

/// One of this many kills hits the master.
const DEATHS_PER_MASTER: u64 = 6;

const LEASES: [&str; 2] = ["--client_ttl=2", "--default_kv_lease_ttl=50ms"];

/// Returns the seconds that each test lasts: 15, or 600 in long runs.
fn seconds() -> u64 {
    match env::MOONCAKE_TEST_CHAOS_SECONDS.read() {
        Some(text) => read_number(&text).expect("a number of seconds"),
        None if is_long_run() => 600,
        None => 15,
    }
}

fn request(node: &mut NodeProcess, command: &str) -> String {
    node.request(command, REPLY_TIMEOUT)
        .unwrap_or_else(|| panic!("no reply to {command:?} within {REPLY_TIMEOUT:?}"))
}

fn start_loops(node: &mut NodeProcess, commands: &[&str]) {
    for command in commands {
        assert_eq!(request(node, command), "started", "{command}");
    }
}

/// Checks that there were no wrong bytes, no checksum mismatches and no internal errors.
fn parse_checked(name: &str, line: &str) -> Tally {
    let tally: Tally = line.parse().expect("the node answers with a tally");
    assert_eq!(tally.wrong, 0, "{name}: {tally:?}");
    for code in ["CHECKSUM_MISMATCH", "INTERNAL_ERROR"] {
        assert!(!tally.errors.contains_key(code), "{name}: {tally:?}");
    }
    tally
}

/// Waits until the loops of a node have made `more` successful calls.
fn await_good(name: &str, node: &mut NodeProcess, more: u64) {
    let before = parse_checked(name, &request(node, "tally")).good;
    until(RECOVERY_TIMEOUT, &format!("calls of {name} succeed again"), || {
        (parse_checked(name, &request(node, "tally")).good >= before + more).then_some(())
    });
}

/// Suspends a node for a random time while the other nodes continue.
fn suspend(node: &NodeProcess, random: &mut Random) {
    let (least, most) = SUSPENSION_MS;
    let end = Instant::now() + Duration::from_millis(least + random.below(most - least));
    node.suspend();
    // Only time passes: there is no event to wait for.
    until(RECOVERY_TIMEOUT, "time passes", || (Instant::now() > end).then_some(()));
    node.resume();
}

/// Starts a node that will be killed. It holds, writes and reads a part of the objects.
fn start_victim(master: &str, number: u64, random: &mut Random) -> NodeProcess {
    let flags: &[&str] = match random.below(3) {
        0 => &["--small-segment", "--tcp"],
        1 => &["--small-segment", "--checksums"],
        _ => &["--small-segment"],
    };
    let mut node = NodeProcess::start(master, flags);
    let own = format!("churn-loop victim{number}- 12 1000001 1");
    start_loops(&mut node, &[&own, "read-loop wide 16", "read-loop pair 8", "read-loop small 64"]);
    node
}

#[test]
fn no_wrong_bytes_when_holders_and_masters_are_killed() {
    run_chaos("--state_dir=none");
}

#[test]
fn no_wrong_bytes_when_masters_restart_from_their_logs() {
    let folder = tempfile::tempdir().unwrap();
    run_chaos(&format!("--state_dir={}", folder.path().display()));
}

/// Runs load under random kills and suspensions. `state` is the master's `--state_dir` flag.
fn run_chaos(state: &str) {
    let mut random = Random::new();
    let start_master = |address: &str| {
        let flags = [state, LEASES[0], LEASES[1]];
        MasterProcess::start(address, &flags)
    };
    let mut master = start_master("127.0.0.1:0");
    let address = master.address.clone();
    // The nodes that survive. Together with the victim they hold less than is put, so objects are
    // evicted.
    let mut checksummed = NodeProcess::start(&address, &["--small-segment", "--checksums"]);
    let mut plain = NodeProcess::start(&address, &["--small-segment"]);
    let mut remote = NodeProcess::start(&address, &["--tcp", "--no-segment"]);
    start_loops(&mut checksummed, &["churn-loop wide 16 2000003 1", "churn-loop pair 8 700001 2"]);
    start_loops(
        &mut plain,
        &["churn-loop small 64 5001 2", "read-loop wide 16", "read-loop pair 8"],
    );
    start_loops(&mut remote, &["read-loop wide 16", "read-loop pair 8", "read-loop small 64"]);
    let mut deaths = 0;
    let mut victim_node = start_victim(&address, deaths, &mut random);
    // On a busy machine the test continues until a master was killed, too.
    let end = Instant::now() + Duration::from_secs(seconds());
    while Instant::now() < end || deaths <= DEATHS_PER_MASTER {
        await_good("victim", &mut victim_node, random.below(100));
        suspend([&checksummed, &plain, &remote][random.below(3) as usize], &mut random);
        deaths += 1;
        if deaths.is_multiple_of(DEATHS_PER_MASTER) {
            master.kill();
            master = start_master(&address);
        } else {
            victim_node.kill();
            victim_node = start_victim(&address, deaths, &mut random);
        }
        for (name, node) in
            [("checksummed", &mut checksummed), ("plain", &mut plain), ("remote", &mut remote)]
        {
            await_good(name, node, 10);
        }
    }
    for (name, node) in
        [("checksummed", &mut checksummed), ("plain", &mut plain), ("remote", &mut remote)]
    {
        let tally = parse_checked(name, &request(node, "stop"));
        assert!(tally.good > deaths && tally.missing > 0, "{name}: {tally:?}");
    }
    parse_checked("victim", &request(&mut victim_node, "stop"));
}
