//! A master that is killed and starts anew from its log, under real clients: what was acknowledged
//! is there again, in the memory it lay in, and nobody has to do anything for it.

use std::time::{Duration, Instant};

use mooncake_base::env::EnvVar;
use mooncake_cluster_tests::{MasterProcess, NodeProcess, tally::Tally};
use mooncake_testkit::until;

/// No order may take longer.
const ORDER: Duration = Duration::from_secs(30);

/// Within so long the clients have found the new master and announced their memory.
const RECOVERY: Duration = Duration::from_secs(20);

static LONG: EnvVar = EnvVar {
    name: "MOONCAKE_LONG_TESTS",
    aliases: &[],
    default: "",
    help: "Whether tests also do what takes long.",
};

const ANYWHERE: &str = "127.0.0.1:0";

fn ask(node: &mut NodeProcess, order: &str) -> String {
    node.ask(order, ORDER).unwrap_or_else(|| panic!("no answer to {order:?} within {ORDER:?}"))
}

fn expect(node: &mut NodeProcess, order: &str, expected: &str) {
    assert_eq!(ask(node, order), expected, "{order}");
}

/// Asks until the answer is this one; the master may be away when it is asked first.
fn await_answer(node: &mut NodeProcess, order: &str, expected: &str) {
    let end = Instant::now() + RECOVERY;
    loop {
        let answer = ask(node, order);
        if answer == expected {
            return;
        }
        // Anything but an error would be an answer of the new master, and a wrong one.
        assert!(answer.starts_with("error") && Instant::now() < end, "{order}: {answer}");
    }
}

fn tally(node: &mut NodeProcess) -> Tally {
    ask(node, "tally").parse().expect("the node answers with a tally")
}

fn await_good(node: &mut NodeProcess, more: u64) {
    let before = tally(node).good;
    until(RECOVERY, "the loops go on", || (tally(node).good >= before + more).then_some(()));
}

/// A master whose log lies in that folder; at that address, if it had one before.
fn master(folder: &tempfile::TempDir, address: &str) -> MasterProcess {
    MasterProcess::start(address, &[&format!("--state_dir={}", folder.path().display())])
}

#[test]
fn every_acknowledged_object_is_readable_after_the_master_was_killed() {
    const KEYS: u32 = 150;
    let folder = tempfile::tempdir().unwrap();
    let mut running = master(&folder, ANYWHERE);
    let address = running.address.clone();
    let mut nodes = [(); 2].map(|()| NodeProcess::start(&address, &[]));
    for round in 0..2 {
        for at in 0..KEYS {
            let node = &mut nodes[at as usize % 2];
            expect(node, &format!("fill kept-{round}-{at} 60000 1"), "stored 1");
        }
        running.kill();
        running = master(&folder, &address);
        for before in 0..=round {
            for at in 0..KEYS {
                let node = &mut nodes[(at as usize + 1) % 2];
                await_answer(node, &format!("version kept-{before}-{at}"), "1");
            }
        }
    }
    // And what is put now lies beside it.
    for at in 0..KEYS {
        expect(&mut nodes[0], &format!("fill new-{at} 60000 1"), "stored 1");
    }
    for at in 0..KEYS {
        expect(&mut nodes[1], &format!("version kept-0-{at}"), "1");
        expect(&mut nodes[1], &format!("version new-{at}"), "1");
    }
}

#[test]
fn a_master_killed_amid_writes_loses_none_and_gives_no_memory_twice() {
    const DEATHS: u64 = 3;
    let folder = tempfile::tempdir().unwrap();
    let mut running = master(&folder, ANYWHERE);
    let address = running.address.clone();
    let mut nodes = [(); 2].map(|()| NodeProcess::start(&address, &[]));
    for (node, [own, other]) in nodes.iter_mut().zip([["a", "b"], ["b", "a"]]) {
        expect(node, &format!("fill kept-{own} 5000000 1"), "stored 1");
        expect(node, &format!("write-loop {own} 4 300000"), "started");
        expect(node, &format!("read-loop {other} 4"), "started");
    }
    for _ in 0..DEATHS {
        nodes.iter_mut().for_each(|node| await_good(node, 30));
        running.kill();
        running = master(&folder, &address);
        nodes.iter_mut().for_each(|node| await_good(node, 30));
    }
    for node in &mut nodes {
        let tally: Tally = ask(node, "stop").parse().expect("the node answers with a tally");
        assert_eq!(tally.wrong, 0, "{tally:?}");
        // A read right after the put counts so, too, when the master dies in between.
        assert!(tally.lost <= DEATHS, "{tally:?}");
        assert!(!tally.errors.contains_key("INTERNAL_ERROR"), "{tally:?}");
    }
    for (node, key) in nodes.iter_mut().zip(["kept-b", "kept-a"]) {
        expect(node, &format!("version {key}"), "1");
    }
}

#[test]
fn a_holder_that_died_with_the_master_takes_its_objects_along_and_no_others() {
    let folder = tempfile::tempdir().unwrap();
    let mut running = master(&folder, ANYWHERE);
    let address = running.address.clone();
    let mut keeper = NodeProcess::start(&address, &[]);
    let mut dying = NodeProcess::start(&address, &[]);
    for (key, holder) in [("kept", ask(&mut keeper, "name")), ("gone", ask(&mut dying, "name"))] {
        expect(&mut keeper, &format!("fill {key} 1000000 1 {holder}"), "stored 1");
    }
    running.kill();
    dying.kill();
    let _running = master(&folder, &address);
    await_answer(&mut keeper, "version kept", "1");
    // Its holder may still come back, until the grace is over.
    await_answer(&mut keeper, "version gone", "missing");
    expect(&mut keeper, "fill gone 1000000 2", "stored 1");
    expect(&mut keeper, "version gone", "2");
}

#[test]
fn a_master_that_was_stopped_for_longer_than_clients_live_expires_nobody() {
    let (ttl, pause) = if LONG.read().is_some() { (10, 30) } else { (2, 5) };
    let flags = ["--state_dir=none", &format!("--client_ttl={ttl}")];
    let running = MasterProcess::start(ANYWHERE, &flags);
    let mut nodes = [(); 2].map(|()| NodeProcess::start(&running.address, &[]));
    for (at, node) in nodes.iter_mut().enumerate() {
        let holder = ask(node, "name");
        expect(node, &format!("fill kept-{at} 1000000 1 {holder}"), "stored 1");
    }
    let signal = |name: &str| {
        let status =
            std::process::Command::new("kill").args([name, &running.id().to_string()]).status();
        assert!(status.is_ok_and(|status| status.success()));
    };
    signal("-STOP");
    let end = Instant::now() + Duration::from_secs(pause);
    // Time itself is what is tested: nothing happens that could be waited for.
    until(2 * RECOVERY, "time passes", || (Instant::now() > end).then_some(()));
    signal("-CONT");
    for node in &mut nodes {
        await_answer(node, "version kept-0", "1");
        await_answer(node, "version kept-1", "1");
        expect(node, "segments", "2");
    }
}

/// Asks about something under way until it is over; the master may be away meanwhile.
fn await_end(node: &mut NodeProcess, order: &str) -> String {
    until(RECOVERY + ORDER, order, || {
        let answer = ask(node, order);
        let is_over = ["Success", "Failed", "Succeeded"].iter().any(|end| answer.starts_with(end));
        is_over.then_some(answer)
    })
}

#[test]
fn tasks_and_a_drain_go_on_after_the_master_was_killed() {
    const KEYS: u32 = 200;
    let folder = tempfile::tempdir().unwrap();
    let mut running = master(&folder, ANYWHERE);
    let address = running.address.clone();
    let mut first = NodeProcess::start(&address, &[]);
    let mut second = NodeProcess::start(&address, &[]);
    let [from, to] = [&mut first, &mut second].map(|node| ask(node, "name"));
    for at in 0..KEYS {
        expect(&mut first, &format!("fill drained-{at} 150000 1 {from}"), "stored 1");
    }
    for at in 0..20 {
        expect(&mut first, &format!("fill copied-{at} 150000 1 {to}"), "stored 1");
    }
    let job = ask(&mut first, &format!("drain {from}"));
    let mut third = NodeProcess::start(&address, &[]);
    let third_name = ask(&mut third, "name");
    let tasks: Vec<String> =
        (0..20).map(|at| ask(&mut second, &format!("copy copied-{at} {third_name}"))).collect();
    let moved = |node: &mut NodeProcess| {
        let answer = ask(node, &format!("drained {job}"));
        let mut words = answer.split(' ').map(str::to_owned);
        let is_over = words.next().is_some_and(|status| status == "Succeeded");
        assert!(!is_over, "killed too late to tell: {answer}");
        words.next().unwrap().parse::<u32>().unwrap()
    };
    // Some have left, and more have not.
    let before =
        until(ORDER, "the drain has begun", || Some(moved(&mut second)).filter(|&moved| moved > 2));
    assert!(before < KEYS, "{before}");
    running.kill();
    running = master(&folder, &address);
    let drained = await_end(&mut second, &format!("drained {job}"));
    assert_eq!(drained, format!("Succeeded {KEYS} {}", KEYS * 150_000));
    for (at, task) in tasks.iter().enumerate() {
        let end = await_end(&mut second, &format!("task {task}"));
        assert!(end.starts_with("Success"), "{task}: {end}");
        expect(&mut second, &format!("copies copied-{at}"), "2");
    }
    // What was drained needs its first holder no more, nor what was copied its first copy.
    first.kill();
    for at in 0..KEYS {
        await_answer(&mut third, &format!("version drained-{at}"), "1");
    }
    second.kill();
    for at in 0..20 {
        await_answer(&mut third, &format!("version copied-{at}"), "1");
    }
    drop(running);
}
