//! A master and nodes as real processes: what they share, and what is left when one is killed.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use mooncake_cluster_tests::{MasterProcess, NodeProcess, hello_example};
use mooncake_testkit::until;

/// No call of a node may take longer, whoever is dead: its own limits are 5 s.
const CALL: Duration = Duration::from_secs(15);

const ANYWHERE: &str = "127.0.0.1:0";

fn ask(node: &mut NodeProcess, order: &str) -> String {
    node.ask(order, CALL).unwrap_or_else(|| panic!("no answer to {order:?} within {CALL:?}"))
}

fn await_answer(node: &mut NodeProcess, order: &str, limit: Duration, expected: &str) {
    let what = format!("{order:?} is answered by {expected:?}");
    until(limit, &what, || (ask(node, order) == expected).then_some(()));
}

fn check_shared(flags: &[&str], transport: &str) {
    let master = MasterProcess::start(ANYWHERE, &[]);
    let mut writer = NodeProcess::start(&master.address, flags);
    let reader_flags: Vec<_> = flags.iter().copied().chain(["--lend-nothing"]).collect();
    let mut reader = NodeProcess::start(&master.address, &reader_flags);
    for (length, seed) in [(1, 1), (4096, 2), (1_000_003, 3), (20_000_000, 4)] {
        assert_eq!(ask(&mut writer, &format!("put k{seed} {length} {seed}")), "stored 1");
        assert_eq!(ask(&mut reader, &format!("get k{seed} {length} {seed}")), "same");
        assert_eq!(ask(&mut writer, &format!("get k{seed} {length} {seed}")), "same");
    }
    assert_eq!(ask(&mut reader, "get none 1 1"), "missing");
    assert_eq!(ask(&mut reader, "put k1 1 9"), "existed");
    assert_eq!(ask(&mut reader, "put mine 5000 7"), "stored 1");
    assert_eq!(ask(&mut writer, "get mine 5000 7"), "same");
    assert_eq!(ask(&mut reader, "served"), transport);
    assert!(reader.ends(CALL) && writer.ends(CALL));
}

#[test]
fn what_one_process_puts_another_gets_through_shared_memory() {
    check_shared(&[], "shm");
}

#[test]
fn what_one_process_puts_another_gets_over_tcp() {
    check_shared(&["--tcp"], "tcp");
}

#[test]
fn a_killed_node_takes_its_own_keys_with_it_and_nothing_else() {
    let master = MasterProcess::start(ANYWHERE, &["--client_ttl=2"]);
    let mut dying = NodeProcess::start(&master.address, &[]);
    assert_eq!(ask(&mut dying, "put lost 100000 1"), "stored 1");
    let mut living = NodeProcess::start(&master.address, &[]);
    for round in 1..=5 {
        let put = format!("put copied{round} 100000 {round} 2");
        assert_eq!(ask(&mut living, &put), "stored 2");
    }
    dying.kill();
    let start = Instant::now();
    let answer = ask(&mut living, "get lost 100000 1");
    assert!(answer == "missing" || answer.starts_with("error "), "{answer}");
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    for round in 1..=5 {
        assert_eq!(ask(&mut living, &format!("get copied{round} 100000 {round}")), "same");
    }
    await_answer(&mut living, "get lost 100000 1", Duration::from_secs(20), "missing");
    await_answer(&mut living, "segments", Duration::from_secs(20), "1");
    assert_eq!(ask(&mut living, "put lost 100000 2"), "stored 1");
    assert_eq!(ask(&mut living, "get lost 100000 2"), "same");
}

#[test]
fn a_killed_master_costs_errors_and_its_successor_finds_the_nodes_again() {
    let mut master = MasterProcess::start(ANYWHERE, &[]);
    let mut node = NodeProcess::start(&master.address, &[]);
    assert_eq!(ask(&mut node, "put before 1000 1"), "stored 1");
    master.kill();
    for order in ["get before 1000 1", "put during 1000 1", "segments"] {
        let start = Instant::now();
        let answer = ask(&mut node, order);
        assert!(answer.starts_with("error "), "{order}: {answer}");
        assert!(answer.contains(&master.address), "the address is named: {answer}");
        assert!(start.elapsed() < Duration::from_secs(12), "{order}: {:?}", start.elapsed());
    }
    let successor = MasterProcess::start(&master.address, &[]);
    assert_eq!(successor.address, master.address);
    await_answer(&mut node, "segments", Duration::from_secs(20), "1");
    assert_eq!(ask(&mut node, "put after 1000 2"), "stored 1");
    assert_eq!(ask(&mut node, "get after 1000 2"), "same");
}

#[test]
fn closing_is_quick_though_the_master_is_dead() {
    let mut master = MasterProcess::start(ANYWHERE, &[]);
    let mut node = NodeProcess::start(&master.address, &[]);
    assert_eq!(ask(&mut node, "put k 1000 1"), "stored 1");
    master.kill();
    let millis: u64 = ask(&mut node, "close").parse().unwrap();
    assert!(millis < 500, "{millis} ms");
    assert!(ask(&mut node, "get k 1000 1").contains("closed"));
    assert!(node.ends(CALL));
}

#[test]
fn the_program_of_the_readme_runs() {
    let master = MasterProcess::start(ANYWHERE, &[]);
    let ended = Command::new(hello_example()).arg(&master.address).status().unwrap();
    assert!(ended.success(), "{ended}");
}
