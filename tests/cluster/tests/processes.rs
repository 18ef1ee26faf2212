//! A master and nodes as real processes: they share objects, and survive the death of one of them.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use mooncake_cluster_tests::{MasterProcess, NodeProcess, hello_example};
use mooncake_testkit::until;

/// The longest call of a node, also when peers are dead. The node's own timeouts are 5 s.
const REPLY_TIMEOUT: Duration = Duration::from_secs(15);

const ANY_PORT: &str = "127.0.0.1:0";

fn request(node: &mut NodeProcess, command: &str) -> String {
    node.request(command, REPLY_TIMEOUT)
        .unwrap_or_else(|| panic!("no reply to {command:?} within {REPLY_TIMEOUT:?}"))
}

fn await_reply(node: &mut NodeProcess, command: &str, limit: Duration, expected: &str) {
    let what = format!("{command:?} is answered by {expected:?}");
    until(limit, &what, || (request(node, command) == expected).then_some(()));
}

fn check_shared(flags: &[&str], transport: &str) {
    let master = MasterProcess::start(ANY_PORT, &[]);
    let mut writer = NodeProcess::start(&master.address, flags);
    let reader_flags: Vec<_> = flags.iter().copied().chain(["--no-segment"]).collect();
    let mut reader = NodeProcess::start(&master.address, &reader_flags);
    for (length, seed) in [(1, 1), (4096, 2), (1_000_003, 3), (20_000_000, 4)] {
        assert_eq!(request(&mut writer, &format!("put k{seed} {length} {seed}")), "stored 1");
        assert_eq!(request(&mut reader, &format!("get k{seed} {length} {seed}")), "same");
        assert_eq!(request(&mut writer, &format!("get k{seed} {length} {seed}")), "same");
    }
    assert_eq!(request(&mut reader, "get none 1 1"), "missing");
    assert_eq!(request(&mut reader, "put k1 1 9"), "existed");
    assert_eq!(request(&mut reader, "put mine 5000 7"), "stored 1");
    assert_eq!(request(&mut writer, "get mine 5000 7"), "same");
    assert_eq!(request(&mut reader, "transports"), transport);
    assert!(reader.exits(REPLY_TIMEOUT) && writer.exits(REPLY_TIMEOUT));
}

#[test]
fn objects_are_shared_between_processes_over_shm() {
    check_shared(&[], "shm");
}

#[test]
fn objects_are_shared_between_processes_over_tcp() {
    check_shared(&["--tcp"], "tcp");
}

#[test]
fn killed_node_loses_only_its_own_keys() {
    let master = MasterProcess::start(ANY_PORT, &["--client_ttl=2"]);
    let mut victim = NodeProcess::start(&master.address, &[]);
    assert_eq!(request(&mut victim, "put lost 100000 1"), "stored 1");
    let mut living = NodeProcess::start(&master.address, &[]);
    for round in 1..=5 {
        let put = format!("put copied{round} 100000 {round} 2");
        assert_eq!(request(&mut living, &put), "stored 2");
    }
    victim.kill();
    let start = Instant::now();
    let reply = request(&mut living, "get lost 100000 1");
    assert!(reply == "missing" || reply.starts_with("error "), "{reply}");
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    for round in 1..=5 {
        assert_eq!(request(&mut living, &format!("get copied{round} 100000 {round}")), "same");
    }
    await_reply(&mut living, "get lost 100000 1", Duration::from_secs(20), "missing");
    await_reply(&mut living, "segments", Duration::from_secs(20), "1");
    assert_eq!(request(&mut living, "put lost 100000 2"), "stored 1");
    assert_eq!(request(&mut living, "get lost 100000 2"), "same");
}

#[test]
fn nodes_rejoin_restarted_master() {
    let mut master = MasterProcess::start(ANY_PORT, &[]);
    let mut node = NodeProcess::start(&master.address, &[]);
    assert_eq!(request(&mut node, "put before 1000 1"), "stored 1");
    master.kill();
    for command in ["get before 1000 1", "put during 1000 1", "segments"] {
        let start = Instant::now();
        let reply = request(&mut node, command);
        assert!(reply.starts_with("error "), "{command}: {reply}");
        assert!(reply.contains(&master.address), "no address in {reply}");
        assert!(start.elapsed() < Duration::from_secs(12), "{command}: {:?}", start.elapsed());
    }
    let successor = MasterProcess::start(&master.address, &[]);
    assert_eq!(successor.address, master.address);
    await_reply(&mut node, "segments", Duration::from_secs(20), "1");
    assert_eq!(request(&mut node, "put after 1000 2"), "stored 1");
    assert_eq!(request(&mut node, "get after 1000 2"), "same");
}

#[test]
fn close_is_quick_when_master_is_dead() {
    let mut master = MasterProcess::start(ANY_PORT, &[]);
    let mut node = NodeProcess::start(&master.address, &[]);
    assert_eq!(request(&mut node, "put k 1000 1"), "stored 1");
    master.kill();
    let millis: u64 = request(&mut node, "close").parse().unwrap();
    assert!(millis < 500, "{millis} ms");
    assert!(request(&mut node, "get k 1000 1").contains("closed"));
    assert!(node.exits(REPLY_TIMEOUT));
}

#[test]
fn readme_example_runs() {
    let master = MasterProcess::start(ANY_PORT, &[]);
    let ended = Command::new(hello_example()).arg(&master.address).status().unwrap();
    assert!(ended.success(), "{ended}");
}
