//! A master that is killed and restarted from its log, with real clients: every acknowledged object
//! is recovered in place, without any action by its users.

use std::time::{Duration, Instant};

use mooncake_base::requirement::is_long_run;
use mooncake_cluster_tests::{MasterProcess, NodeProcess, REPLY_TIMEOUT};
use mooncake_testkit::until;

/// The longest time until clients have found the new master and resumed their segments.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(20);

const ANY_PORT: &str = "127.0.0.1:0";

/// Repeats a command until the reply is `expected`. Errors are allowed while the master is away.
fn await_reply(node: &mut NodeProcess, command: &str, expected: &str) {
    let end = Instant::now() + RECOVERY_TIMEOUT;
    loop {
        let reply = node.request(command);
        if reply == expected {
            return;
        }
        // A reply other than an error comes from the new master, and is wrong.
        assert!(reply.starts_with("error") && Instant::now() < end, "{command}: {reply}");
    }
}

fn await_good(node: &mut NodeProcess, more: u64) {
    let before = node.tally().good;
    until(RECOVERY_TIMEOUT, "the loops continue", || {
        (node.tally().good >= before + more).then_some(())
    });
}

/// Starts a master with its log in `folder`, at the given address.
fn master(folder: &tempfile::TempDir, address: &str) -> MasterProcess {
    MasterProcess::start(address, &[&format!("--state_dir={}", folder.path().display())])
}

#[test]
fn acknowledged_objects_survive_master_kill() {
    const KEYS: u32 = 150;
    let folder = tempfile::tempdir().unwrap();
    let mut running = master(&folder, ANY_PORT);
    let address = running.address.clone();
    let mut nodes = [(); 2].map(|()| NodeProcess::start(&address, &[]));
    for round in 0..2 {
        for at in 0..KEYS {
            let node = &mut nodes[at as usize % 2];
            node.expect_reply(&format!("fill kept-{round}-{at} 60000 1"), "stored 1");
        }
        running.kill();
        running = master(&folder, &address);
        for before in 0..=round {
            for at in 0..KEYS {
                let node = &mut nodes[(at as usize + 1) % 2];
                await_reply(node, &format!("version kept-{before}-{at}"), "1");
            }
        }
    }
    // New objects must not overwrite the recovered ones.
    for at in 0..KEYS {
        nodes[0].expect_reply(&format!("fill new-{at} 60000 1"), "stored 1");
    }
    for at in 0..KEYS {
        nodes[1].expect_reply(&format!("version kept-0-{at}"), "1");
        nodes[1].expect_reply(&format!("version new-{at}"), "1");
    }
}

#[test]
fn master_killed_amid_writes_loses_no_object() {
    const DEATHS: u64 = 3;
    let folder = tempfile::tempdir().unwrap();
    let mut running = master(&folder, ANY_PORT);
    let address = running.address.clone();
    let mut nodes = [(); 2].map(|()| NodeProcess::start(&address, &[]));
    for (node, [own, other]) in nodes.iter_mut().zip([["a", "b"], ["b", "a"]]) {
        node.expect_reply(&format!("fill kept-{own} 5000000 1"), "stored 1");
        node.expect_reply(&format!("write-loop {own} 4 300000"), "started");
        node.expect_reply(&format!("read-loop {other} 4"), "started");
    }
    for _ in 0..DEATHS {
        nodes.iter_mut().for_each(|node| await_good(node, 30));
        running.kill();
        running = master(&folder, &address);
        nodes.iter_mut().for_each(|node| await_good(node, 30));
    }
    for node in &mut nodes {
        let tally = node.stop_loops();
        assert_eq!(tally.wrong, 0, "{tally:?}");
        assert_eq!(tally.lost, 0, "{tally:?}");
        assert!(!tally.errors.contains_key("INTERNAL_ERROR"), "{tally:?}");
    }
    for (node, key) in nodes.iter_mut().zip(["kept-b", "kept-a"]) {
        node.expect_reply(&format!("version {key}"), "1");
    }
}

#[test]
fn holder_dead_with_master_loses_only_its_objects() {
    let folder = tempfile::tempdir().unwrap();
    let mut running = master(&folder, ANY_PORT);
    let address = running.address.clone();
    let mut survivor = NodeProcess::start(&address, &[]);
    let mut victim = NodeProcess::start(&address, &[]);
    for (key, holder) in [("kept", survivor.request("name")), ("gone", victim.request("name"))] {
        survivor.expect_reply(&format!("fill {key} 1000000 1 {holder}"), "stored 1");
    }
    running.kill();
    victim.kill();
    let _running = master(&folder, &address);
    await_reply(&mut survivor, "version kept", "1");
    // The holder may resume its segment until the grace period ends.
    await_reply(&mut survivor, "version gone", "missing");
    survivor.expect_reply("fill gone 1000000 2", "stored 1");
    survivor.expect_reply("version gone", "2");
}

#[test]
fn master_suspended_beyond_client_ttl_expires_no_client() {
    let (ttl, pause) = if is_long_run() { (10, 30) } else { (2, 5) };
    let flags = ["--state_dir=none", &format!("--client_ttl={ttl}")];
    let running = MasterProcess::start(ANY_PORT, &flags);
    let mut nodes = [(); 2].map(|()| NodeProcess::start(&running.address, &[]));
    for (at, node) in nodes.iter_mut().enumerate() {
        let holder = node.request("name");
        node.expect_reply(&format!("fill kept-{at} 1000000 1 {holder}"), "stored 1");
    }
    running.suspend();
    let end = Instant::now() + Duration::from_secs(pause);
    // The passing of time is under test: there is no event to wait for.
    until(2 * RECOVERY_TIMEOUT, "time passes", || (Instant::now() > end).then_some(()));
    running.resume();
    for node in &mut nodes {
        await_reply(node, "version kept-0", "1");
        await_reply(node, "version kept-1", "1");
        node.expect_reply("segments", "2");
    }
}

/// Polls the status of a task or drain until its end. The master may be away meanwhile.
fn await_end(node: &mut NodeProcess, command: &str) -> String {
    until(RECOVERY_TIMEOUT + REPLY_TIMEOUT, command, || {
        let reply = node.request(command);
        let is_over = ["Success", "Failed", "Succeeded"].iter().any(|end| reply.starts_with(end));
        is_over.then_some(reply)
    })
}

#[test]
fn tasks_and_drain_continue_after_master_kill() {
    const KEYS: u32 = 200;
    let folder = tempfile::tempdir().unwrap();
    let mut running = master(&folder, ANY_PORT);
    let address = running.address.clone();
    let mut first = NodeProcess::start(&address, &[]);
    let mut second = NodeProcess::start(&address, &[]);
    let [from, to] = [&mut first, &mut second].map(|node| node.request("name"));
    for at in 0..KEYS {
        first.expect_reply(&format!("fill drained-{at} 150000 1 {from}"), "stored 1");
    }
    for at in 0..20 {
        first.expect_reply(&format!("fill copied-{at} 150000 1 {to}"), "stored 1");
    }
    let job = first.request(&format!("drain {from}"));
    let mut third = NodeProcess::start(&address, &[]);
    let third_name = third.request("name");
    let tasks: Vec<String> =
        (0..20).map(|at| second.request(&format!("copy copied-{at} {third_name}"))).collect();
    let moved = |node: &mut NodeProcess| {
        let reply = node.request(&format!("drained {job}"));
        let mut words = reply.split(' ').map(str::to_owned);
        let is_over = words.next().is_some_and(|status| status == "Succeeded");
        assert!(!is_over, "the drain ended before the kill: {reply}");
        words.next().unwrap().parse::<u32>().unwrap()
    };
    // Some objects have moved, most have not.
    let before = until(REPLY_TIMEOUT, "the drain has started", || {
        Some(moved(&mut second)).filter(|&moved| moved > 2)
    });
    assert!(before < KEYS, "{before}");
    running.kill();
    running = master(&folder, &address);
    let drained = await_end(&mut second, &format!("drained {job}"));
    assert_eq!(drained, format!("Succeeded {KEYS} {}", KEYS * 150_000));
    for (at, task) in tasks.iter().enumerate() {
        let end = await_end(&mut second, &format!("task {task}"));
        assert!(end.starts_with("Success"), "{task}: {end}");
        second.expect_reply(&format!("copies copied-{at}"), "2");
    }
    // Drained objects no longer need their first holder, nor copied ones their first copy.
    first.kill();
    for at in 0..KEYS {
        await_reply(&mut third, &format!("version drained-{at}"), "1");
    }
    second.kill();
    for at in 0..20 {
        await_reply(&mut third, &format!("version copied-{at}"), "1");
    }
    drop(running);
}
