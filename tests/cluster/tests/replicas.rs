//! Objects with two copies, in real processes: reads spread over equal holders, and the death of one
//! of them costs nothing.

use std::time::Duration;

use mooncake_cluster_tests::{MasterProcess, NodeProcess, tally::Tally};
use mooncake_testkit::until;

/// No order may take longer: the longest is a call under way, which has limits of its own.
const ORDER: Duration = Duration::from_secs(15);

/// Within so long everything that a death disturbed goes on.
const RECOVERY: Duration = Duration::from_secs(20);

/// Within so long a holder that seemed slow is tried again, some times over.
const BALANCE: Duration = Duration::from_secs(60);

/// What eight reads bring: from then on a holder is known by what it did.
const ENOUGH_BYTES: u64 = 8 * LENGTH as u64;

const KEYS: usize = 8;
const LENGTH: usize = 200_000;

fn ask(node: &mut NodeProcess, order: &str) -> String {
    node.ask(order, ORDER).unwrap_or_else(|| panic!("no answer to {order:?} within {ORDER:?}"))
}

fn number(node: &mut NodeProcess, order: &str) -> u64 {
    ask(node, order).parse().unwrap_or_else(|_| panic!("{order:?} has no number for an answer"))
}

fn tally(node: &mut NodeProcess, order: &str) -> Tally {
    ask(node, order).parse().expect("the node answers with a tally")
}

/// Waits until the loops have made so many more good calls.
fn await_good(node: &mut NodeProcess, more: u64, what: &str) {
    let before = tally(node, "tally").good;
    until(RECOVERY, what, || (tally(node, "tally").good >= before + more).then_some(()));
}

/// Ends loops that saw nothing but whole objects.
fn stop_clean(node: &mut NodeProcess) {
    let seen = tally(node, "stop");
    assert_eq!((seen.wrong, seen.missing, seen.failed()), (0, 0, 0), "{seen:?}");
}

/// Two holders, a reader that holds nothing, and objects of which both holders have a copy.
fn two_holders(flags: &[&str]) -> (MasterProcess, [NodeProcess; 2], NodeProcess) {
    let master = MasterProcess::start("127.0.0.1:0", &["--client_ttl=2"]);
    let holders = [(); 2].map(|()| NodeProcess::start(&master.address, flags));
    let guest: Vec<_> = flags.iter().copied().chain(["--lend-nothing"]).collect();
    let mut reader = NodeProcess::start(&master.address, &guest);
    for at in 0..KEYS {
        assert_eq!(ask(&mut reader, &format!("fill-twice two{at} {LENGTH} 1")), "stored 2");
    }
    (master, holders, reader)
}

/// Reads until both holders were asked often enough to be measured. Which of two equals gets more
/// after that is chance on a busy machine (one whose bytes lie in the processor's cache is faster);
/// how equals take turns is tested where the rule lives.
fn check_balance(flags: &[&str]) {
    let (_master, mut holders, mut reader) = two_holders(flags);
    let names = holders.each_mut().map(|holder| ask(holder, "name"));
    assert_eq!(ask(&mut reader, &format!("read-loop two {KEYS}")), "started");
    until(BALANCE, "both holders bring their part", || {
        let brought = names.each_ref().map(|name| number(&mut reader, &format!("brought {name}")));
        (*brought.iter().min()? >= ENOUGH_BYTES).then_some(())
    });
    stop_clean(&mut reader);
}

#[test]
fn reads_spread_over_two_equal_holders() {
    check_balance(&[]);
    check_balance(&["--tcp"]);
}

fn check_loss(flags: &[&str]) {
    let (_master, [mut dying, mut keeper], mut reader) = two_holders(flags);
    let [gone, kept] = [&mut dying, &mut keeper].map(|node| ask(node, "name"));
    assert_eq!(ask(&mut reader, &format!("read-loop two {KEYS}")), "started");
    await_good(&mut reader, 50, "reads before the death");
    dying.kill();
    await_good(&mut reader, 200, "reads after the death");
    until(RECOVERY, "the master forgets the dead", || {
        (ask(&mut keeper, "segments") == "1").then_some(())
    });
    await_good(&mut reader, 50, "reads of what is left");
    stop_clean(&mut reader);
    for at in 0..KEYS {
        assert_eq!(ask(&mut reader, &format!("version two{at}")), "1");
    }
    // Whoever met the death read elsewhere, and says so.
    let errors = number(&mut reader, &format!("errors {gone}"));
    let skipped = number(&mut reader, "skipped");
    assert!(skipped <= errors, "{skipped} copies were skipped for {errors} errors");
    assert_eq!(number(&mut reader, &format!("errors {kept}")), 0);
}

#[test]
fn the_death_of_one_of_two_holders_costs_no_read() {
    check_loss(&[]);
    check_loss(&["--tcp"]);
}
