//! Real processes that are killed in the middle of their own or others' calls: whatever is read
//! is whole and belongs to its key, and no call lasts longer than its limits.

use std::time::{Duration, Instant};

use mooncake_cluster_tests::{MasterProcess, NodeProcess, tally::Tally};
use mooncake_testkit::{Random, until};

/// No order may take longer: the longest is a call under way, which has limits of its own.
const ORDER: Duration = Duration::from_secs(15);

/// No call of a loop may take longer, whoever was killed: a node gives the master 5 s and its
/// peers 5 s.
const CALL: Duration = Duration::from_secs(6);

/// Within so long everything that a death disturbed goes on.
const RECOVERY: Duration = Duration::from_secs(8);

const ANYWHERE: &str = "127.0.0.1:0";

fn ask(node: &mut NodeProcess, order: &str) -> String {
    node.ask(order, ORDER).unwrap_or_else(|| panic!("no answer to {order:?} within {ORDER:?}"))
}

fn expect(node: &mut NodeProcess, order: &str, expected: &str) {
    assert_eq!(ask(node, order), expected, "{order}");
}

fn tally(node: &mut NodeProcess) -> Tally {
    ask(node, "tally").parse().expect("the node answers with a tally")
}

/// Waits until the loops of a node have come so far.
fn await_tally(node: &mut NodeProcess, what: &str, is_there: impl Fn(&Tally) -> bool) -> Tally {
    let deadline = Instant::now() + RECOVERY;
    until(2 * RECOVERY, what, || {
        let tally = tally(node);
        if is_there(&tally) {
            return Some(tally);
        }
        assert!(Instant::now() < deadline, "{what}: still {tally:?}");
        None
    })
}

/// Waits until the loops have made so many more good calls.
fn await_good(node: &mut NodeProcess, more: u64, what: &str) -> Tally {
    let before = tally(node).good;
    await_tally(node, what, |tally| tally.good >= before + more)
}

/// Ends the loops of a node, which saw so many deaths and else nothing but what they may see.
fn stop(node: &mut NodeProcess, deaths: u64) {
    let tally: Tally = ask(node, "stop").parse().expect("the node answers with a tally");
    assert_eq!(tally.wrong, 0, "{tally:?}");
    assert!(tally.worst < CALL, "{tally:?}");
    assert!(!tally.errors.contains_key("INTERNAL_ERROR"), "{tally:?}");
    // What was acknowledged a moment before a death may go with the dead, and nothing else.
    assert!(tally.lost <= deaths, "{tally:?}");
}

/// Kills a node that others read from and write to; what others hold must not notice.
fn kill_a_holder(
    random: &mut Random,
    name: &str,
    master: &MasterProcess,
    nodes: [&mut NodeProcess; 2],
    flags: &[&str],
) {
    let [keeper, reader] = nodes;
    let mut dying = NodeProcess::start(&master.address, flags);
    let segment = ask(&mut dying, "name");
    for at in 0..3 {
        expect(&mut dying, &format!("fill {name}{at} 4000000 1 {segment}"), "stored 1");
    }
    for node in [&mut *keeper, &mut *reader] {
        expect(node, &format!("read-loop {name} 3"), "started");
    }
    expect(reader, &format!("write-loop {name}-written 3 2000000 {segment}"), "started");
    for node in [&mut *keeper, &mut *reader] {
        await_good(node, 5 + random.below(20), "reads before the death");
    }
    dying.kill();
    let gone = format!("{name} goes with its holder");
    for node in [&mut *keeper, &mut *reader] {
        let before = tally(node).missing;
        // The loop that writes misses only what it removed itself: most are of the other one.
        await_tally(node, &gone, |tally| tally.missing >= before + 30);
    }
    until(RECOVERY, "the segment goes", || (ask(keeper, "segments") == "1").then_some(()));
    await_good(reader, 12, "puts land elsewhere");
    stop(reader, 1);
    stop(keeper, 1);
    for at in 0..3 {
        expect(reader, &format!("version kept{at}"), "1");
        expect(reader, &format!("version {name}{at}"), "missing");
    }
}

fn check_killed_holders(flags: &[&str], transport: &str) {
    let mut random = Random::new();
    let master = MasterProcess::start(ANYWHERE, &["--client_ttl=2"]);
    let mut keeper = NodeProcess::start(&master.address, flags);
    let guest: Vec<_> = flags.iter().copied().chain(["--lend-nothing"]).collect();
    let mut reader = NodeProcess::start(&master.address, &guest);
    for at in 0..3 {
        expect(&mut keeper, &format!("fill kept{at} 1000000 1"), "stored 1");
    }
    for name in ["first", "second"] {
        kill_a_holder(&mut random, name, &master, [&mut keeper, &mut reader], flags);
    }
    // Ways are measured, and others than the best are tried now and then.
    let served = ask(&mut reader, "served");
    assert!(served.split(' ').any(|way| way == transport), "{served}");
}

#[test]
fn a_holder_killed_while_it_is_read_through_shared_memory_costs_no_wrong_byte() {
    check_killed_holders(&[], "shm");
}

#[test]
fn a_holder_killed_while_it_is_read_over_tcp_costs_no_wrong_byte() {
    check_killed_holders(&["--tcp"], "tcp");
}

#[test]
fn a_master_killed_amid_calls_costs_errors_only_and_its_successor_is_found_in_seconds() {
    const DEATHS: u64 = 3;
    let mut random = Random::new();
    let mut master = MasterProcess::start(ANYWHERE, &[]);
    let address = master.address.clone();
    let mut nodes = [(); 2].map(|()| NodeProcess::start(&address, &[]));
    for (node, [own, other]) in nodes.iter_mut().zip([["a", "b"], ["b", "a"]]) {
        expect(node, &format!("write-loop {own} 4 300000"), "started");
        expect(node, &format!("read-loop {other} 4"), "started");
    }
    for _ in 0..DEATHS {
        for node in &mut nodes {
            await_good(node, 20 + random.below(40), "calls before the death");
        }
        let failed = nodes.each_mut().map(|node| tally(node).failed());
        master.kill();
        for (node, failed) in nodes.iter_mut().zip(failed) {
            await_tally(node, "calls fail", |tally| tally.failed() > failed);
        }
        master = MasterProcess::start(&address, &[]);
        for node in &mut nodes {
            await_good(node, 40, "new puts and gets work");
        }
    }
    nodes.iter_mut().for_each(|node| stop(node, DEATHS));
    for (reader, key) in [(0, "after-b0"), (1, "after-a0")] {
        expect(&mut nodes[1 - reader], &format!("fill {key} 100000 1"), "stored 1");
        expect(&mut nodes[reader], &format!("version {key}"), "1");
    }
}

/// Puts a key again that a dead writer had begun, as soon as that is possible.
fn put_again(node: &mut NodeProcess, key: &str) {
    let put = format!("fill {key} 5000000 2");
    until(RECOVERY, "the half put is discarded", || match ask(node, &put).as_str() {
        "stored 1" => Some(()),
        "existed" => None,
        other => panic!("{put}: {other}"),
    });
}

#[test]
fn a_put_whose_writer_is_killed_is_never_seen_half_and_its_key_can_be_put_again() {
    let master = MasterProcess::start(ANYWHERE, &["--put_start_discard_timeout_sec=2"]);
    let mut keeper = NodeProcess::start(&master.address, &[]);
    let mut reader = NodeProcess::start(&master.address, &["--tcp"]);
    let guest = ["--tcp", "--lend-nothing"];
    let mut writer = NodeProcess::start(&master.address, &guest);
    for node in [&mut keeper, &mut reader] {
        expect(node, "read-loop half 1", "started");
        expect(node, "read-loop raced 2", "started");
    }
    expect(&mut writer, "begin half0 10000000 1", "begun");
    expect(&mut reader, "status half0", "writing");
    writer.kill();
    for key in ["raced0", "raced1"] {
        let mut writer = NodeProcess::start(&master.address, &guest);
        writer.tell(&format!("fill {key} 24000000 1"));
        let status = until(RECOVERY, "the put begins", || {
            Some(ask(&mut reader, &format!("status {key}"))).filter(|status| status != "missing")
        });
        writer.kill();
        match status.as_str() {
            "writing" => {}
            // It was too quick for us; then it is there, whole.
            _ => expect(&mut reader, &format!("version {key}"), "1"),
        }
    }
    put_again(&mut keeper, "half0");
    expect(&mut reader, "version half0", "2");
    for key in ["raced0", "raced1"] {
        // The last call of the dead may have been the one that published its put.
        if ask(&mut reader, &format!("version {key}")) != "1" {
            put_again(&mut keeper, key);
            expect(&mut reader, &format!("version {key}"), "2");
        }
    }
    for node in [&mut keeper, &mut reader] {
        await_good(node, 3, "what was put again is read");
        stop(node, 0);
    }
}
