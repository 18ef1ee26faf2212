//! Real processes that are killed during their own or others' calls: every read is complete and
//! belongs to its key, and no call exceeds its timeouts.

use std::time::{Duration, Instant};

use mooncake_cluster_tests::{MasterProcess, NodeProcess, tally::Tally};
use mooncake_testkit::{Random, until};

/// The longest call of a loop, also when the master or a peer is killed: a node has a timeout of 5 s
/// for the master and 5 s for its peers.
const CALL_MAX: Duration = Duration::from_secs(6);

/// The longest time until calls succeed again after a death.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(8);

const ANY_PORT: &str = "127.0.0.1:0";

/// Waits until the counts of a node's loops meet a condition.
fn await_tally(node: &mut NodeProcess, what: &str, is_there: impl Fn(&Tally) -> bool) -> Tally {
    let deadline = Instant::now() + RECOVERY_TIMEOUT;
    until(2 * RECOVERY_TIMEOUT, what, || {
        let tally = node.tally();
        if is_there(&tally) {
            return Some(tally);
        }
        assert!(Instant::now() < deadline, "{what}: still {tally:?}");
        None
    })
}

/// Waits until the loops have made `more` successful calls.
fn await_good(node: &mut NodeProcess, more: u64, what: &str) -> Tally {
    let before = node.tally().good;
    await_tally(node, what, |tally| tally.good >= before + more)
}

/// Stops the loops of a node and checks their counts. Up to `lost_max` objects may have been lost
/// with dead processes.
fn stop(node: &mut NodeProcess, lost_max: u64) {
    let tally = node.stop_loops();
    assert_eq!(tally.wrong, 0, "{tally:?}");
    assert!(tally.latency_max < CALL_MAX, "{tally:?}");
    assert!(!tally.errors.contains_key("INTERNAL_ERROR"), "{tally:?}");
    assert!(tally.lost <= lost_max, "{tally:?}");
}

/// Kills a node that others read from and write to. Objects of other holders must stay readable.
fn check_killed_holder(
    random: &mut Random,
    name: &str,
    master: &MasterProcess,
    nodes: [&mut NodeProcess; 2],
    flags: &[&str],
) {
    let [survivor, reader] = nodes;
    let mut victim = NodeProcess::start(&master.address, flags);
    let segment = victim.request("name");
    for at in 0..3 {
        victim.expect_reply(&format!("fill {name}{at} 4000000 1 {segment}"), "stored 1");
    }
    for node in [&mut *survivor, &mut *reader] {
        node.expect_reply(&format!("read-loop {name} 3"), "started");
    }
    reader.expect_reply(&format!("write-loop {name}-written 3 2000000 {segment}"), "started");
    for node in [&mut *survivor, &mut *reader] {
        await_good(node, 5 + random.below(20), "reads before the death");
    }
    victim.kill();
    let gone = format!("objects {name} vanish with their holder");
    for node in [&mut *survivor, &mut *reader] {
        let before = node.tally().missing;
        // The writing loop misses only keys that it removed itself, so most misses are of the reads.
        await_tally(node, &gone, |tally| tally.missing >= before + 30);
    }
    until(RECOVERY_TIMEOUT, "the segment is removed", || {
        (survivor.request("segments") == "1").then_some(())
    });
    await_good(reader, 12, "puts succeed on other segments");
    // The objects that the reader wrote, on the segment of the dead holder.
    stop(reader, 3);
    stop(survivor, 0);
    for at in 0..3 {
        reader.expect_reply(&format!("version kept{at}"), "1");
        reader.expect_reply(&format!("version {name}{at}"), "missing");
    }
}

fn check_killed_holders(flags: &[&str], transport: &str) {
    let mut random = Random::new();
    let master = MasterProcess::start(ANY_PORT, &["--client_ttl=2"]);
    let mut survivor = NodeProcess::start(&master.address, flags);
    let reader_flags: Vec<_> = flags.iter().copied().chain(["--no-segment"]).collect();
    let mut reader = NodeProcess::start(&master.address, &reader_flags);
    for at in 0..3 {
        survivor.expect_reply(&format!("fill kept{at} 1000000 1"), "stored 1");
    }
    for name in ["first", "second"] {
        check_killed_holder(&mut random, name, &master, [&mut survivor, &mut reader], flags);
    }
    // The client probes other transports at times, so more than one may have carried bytes.
    let transports = reader.request("transports");
    assert!(transports.split(' ').any(|name| name == transport), "{transports}");
}

#[test]
fn holder_killed_during_shm_reads_causes_no_wrong_byte() {
    check_killed_holders(&[], "shm");
}

#[test]
fn holder_killed_during_tcp_reads_causes_no_wrong_byte() {
    check_killed_holders(&["--tcp"], "tcp");
}

#[test]
fn master_killed_amid_calls_causes_errors_only() {
    const DEATHS: u64 = 3;
    // The loop of each node writes so many objects, which its master forgets when it dies.
    const KEYS: u64 = 4;
    let mut random = Random::new();
    let mut master = MasterProcess::start(ANY_PORT, &[]);
    let address = master.address.clone();
    let mut nodes = [(); 2].map(|()| NodeProcess::start(&address, &[]));
    for (node, [own, other]) in nodes.iter_mut().zip([["a", "b"], ["b", "a"]]) {
        node.expect_reply(&format!("write-loop {own} {KEYS} 300000"), "started");
        node.expect_reply(&format!("read-loop {other} 4"), "started");
    }
    for _ in 0..DEATHS {
        for node in &mut nodes {
            await_good(node, 20 + random.below(40), "calls before the death");
        }
        let failed = nodes.each_mut().map(|node| node.tally().failed());
        master.kill();
        for (node, failed) in nodes.iter_mut().zip(failed) {
            await_tally(node, "calls fail", |tally| tally.failed() > failed);
        }
        master = MasterProcess::start(&address, &[]);
        for node in &mut nodes {
            await_good(node, 40, "new puts and gets work");
        }
    }
    nodes.iter_mut().for_each(|node| stop(node, DEATHS * KEYS));
    for (reader, key) in [(0, "after-b0"), (1, "after-a0")] {
        nodes[1 - reader].expect_reply(&format!("fill {key} 100000 1"), "stored 1");
        nodes[reader].expect_reply(&format!("version {key}"), "1");
    }
}

/// Retries a put until the unfinished put of a dead writer is discarded.
fn put_again(node: &mut NodeProcess, key: &str) {
    let put = format!("fill {key} 5000000 2");
    until(RECOVERY_TIMEOUT, "the unfinished put is discarded", || {
        match node.request(&put).as_str() {
            "stored 1" => Some(()),
            "existed" => None,
            other => panic!("{put}: {other}"),
        }
    });
}

#[test]
fn put_of_killed_writer_is_atomic_and_repeatable() {
    let master = MasterProcess::start(ANY_PORT, &["--put_start_discard_timeout_sec=2"]);
    let mut survivor = NodeProcess::start(&master.address, &[]);
    let mut reader = NodeProcess::start(&master.address, &["--tcp"]);
    let writer_flags = ["--tcp", "--no-segment"];
    let mut writer = NodeProcess::start(&master.address, &writer_flags);
    for node in [&mut survivor, &mut reader] {
        node.expect_reply("read-loop half 1", "started");
        node.expect_reply("read-loop raced 2", "started");
    }
    until(RECOVERY_TIMEOUT, "the half is written before its put is discarded", || {
        (writer.request("start-put half0 10000000 1") == "started").then_some(())
    });
    reader.expect_reply("status half0", "writing");
    writer.kill();
    for key in ["raced0", "raced1"] {
        let mut writer = NodeProcess::start(&master.address, &writer_flags);
        writer.send(&format!("fill {key} 24000000 1"));
        let status = until(RECOVERY_TIMEOUT, "the put starts", || {
            Some(reader.request(&format!("status {key}"))).filter(|status| status != "missing")
        });
        writer.kill();
        match status.as_str() {
            "writing" => {}
            // The put ended before the kill, so the object must be complete.
            _ => reader.expect_reply(&format!("version {key}"), "1"),
        }
    }
    put_again(&mut survivor, "half0");
    reader.expect_reply("version half0", "2");
    for key in ["raced0", "raced1"] {
        // The last call of the killed writer may have published its put.
        if reader.request(&format!("version {key}")) != "1" {
            put_again(&mut survivor, key);
            reader.expect_reply(&format!("version {key}"), "2");
        }
    }
    for node in [&mut survivor, &mut reader] {
        await_good(node, 3, "the repeated puts are read");
        stop(node, 0);
    }
}
