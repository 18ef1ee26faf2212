//! A master and nodes as real processes: they share objects, and survive the death of one of them.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use mooncake_cluster_tests::{MasterProcess, NodeProcess, hello_example};
use mooncake_testkit::until;

const ANY_PORT: &str = "127.0.0.1:0";

fn await_reply(node: &mut NodeProcess, command: &str, limit: Duration, expected: &str) {
    let what = format!("{command:?} is answered by {expected:?}");
    until(limit, &what, || (node.request(command) == expected).then_some(()));
}

fn check_shared(flags: &[&str], transport: &str) {
    let master = MasterProcess::start(ANY_PORT, &[]);
    let mut writer = NodeProcess::start(&master.address, flags);
    let reader_flags: Vec<_> = flags.iter().copied().chain(["--no-segment"]).collect();
    let mut reader = NodeProcess::start(&master.address, &reader_flags);
    for (length, seed) in [(1, 1), (4096, 2), (1_000_003, 3), (20_000_000, 4)] {
        assert_eq!(writer.request(&format!("put k{seed} {length} {seed}")), "stored 1");
        assert_eq!(reader.request(&format!("get k{seed} {length} {seed}")), "same");
        assert_eq!(writer.request(&format!("get k{seed} {length} {seed}")), "same");
    }
    assert_eq!(reader.request("get none 1 1"), "missing");
    assert_eq!(reader.request("put k1 1 9"), "existed");
    assert_eq!(reader.request("put mine 5000 7"), "stored 1");
    assert_eq!(writer.request("get mine 5000 7"), "same");
    assert_eq!(reader.request("transports"), transport);
    assert!(reader.exits() && writer.exits());
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
    assert_eq!(victim.request("put lost 100000 1"), "stored 1");
    let mut living = NodeProcess::start(&master.address, &[]);
    for round in 1..=5 {
        let put = format!("put copied{round} 100000 {round} 2");
        assert_eq!(living.request(&put), "stored 2");
    }
    victim.kill();
    let start = Instant::now();
    let reply = living.request("get lost 100000 1");
    assert!(reply == "missing" || reply.starts_with("error "), "{reply}");
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    for round in 1..=5 {
        assert_eq!(living.request(&format!("get copied{round} 100000 {round}")), "same");
    }
    await_reply(&mut living, "get lost 100000 1", Duration::from_secs(20), "missing");
    await_reply(&mut living, "segments", Duration::from_secs(20), "1");
    assert_eq!(living.request("put lost 100000 2"), "stored 1");
    assert_eq!(living.request("get lost 100000 2"), "same");
}

#[test]
fn nodes_rejoin_restarted_master() {
    let mut master = MasterProcess::start(ANY_PORT, &[]);
    let mut node = NodeProcess::start(&master.address, &[]);
    assert_eq!(node.request("put before 1000 1"), "stored 1");
    master.kill();
    for command in ["get before 1000 1", "put during 1000 1", "segments"] {
        let start = Instant::now();
        let reply = node.request(command);
        assert!(reply.starts_with("error "), "{command}: {reply}");
        assert!(reply.contains(&master.address), "no address in {reply}");
        assert!(start.elapsed() < Duration::from_secs(12), "{command}: {:?}", start.elapsed());
    }
    let successor = MasterProcess::start(&master.address, &[]);
    assert_eq!(successor.address, master.address);
    await_reply(&mut node, "segments", Duration::from_secs(20), "1");
    assert_eq!(node.request("put after 1000 2"), "stored 1");
    assert_eq!(node.request("get after 1000 2"), "same");
}

#[test]
fn close_is_quick_when_master_is_dead() {
    let mut master = MasterProcess::start(ANY_PORT, &[]);
    let mut node = NodeProcess::start(&master.address, &[]);
    assert_eq!(node.request("put k 1000 1"), "stored 1");
    master.kill();
    let millis: u64 = node.request("close").parse().unwrap();
    assert!(millis < 500, "{millis} ms");
    assert!(node.request("get k 1000 1").contains("closed"));
    assert!(node.exits());
}

#[test]
fn readme_example_runs() {
    let master = MasterProcess::start(ANY_PORT, &[]);
    let _lender = NodeProcess::start(&master.address, &[]);
    let ended = Command::new(hello_example()).arg(&master.address).status().unwrap();
    assert!(ended.success(), "{ended}");
}
