//! Objects with two copies, in real processes: reads spread over equal holders, and survive the death
//! of one holder.

use std::time::Duration;

use mooncake_cluster_tests::{MasterProcess, NodeProcess, tally::Tally};
use mooncake_testkit::until;

/// The longest time until calls succeed again after a death.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(20);

/// Long enough for several retries of a holder that was measured as slow.
const BALANCE_TIMEOUT: Duration = Duration::from_secs(60);

/// The bytes of the read that measures a holder, and of one more. A holder that was measured as slow, as
/// on a busy machine, is read from once in 10 s.
const MEASURED_BYTES: u64 = 2 * LENGTH as u64;

const KEYS: usize = 8;
const LENGTH: usize = 200_000;

fn number(node: &mut NodeProcess, command: &str) -> u64 {
    node.request(command)
        .parse()
        .unwrap_or_else(|_| panic!("{command:?} is not answered with a number"))
}

fn tally(node: &mut NodeProcess, command: &str) -> Tally {
    node.request(command).parse().expect("the node answers with a tally")
}

/// Waits until the loops have made `more` successful calls.
fn await_good(node: &mut NodeProcess, more: u64, what: &str) {
    let before = tally(node, "tally").good;
    until(RECOVERY_TIMEOUT, what, || (tally(node, "tally").good >= before + more).then_some(()));
}

/// Stops the loops and checks that every read succeeded.
fn stop_clean(node: &mut NodeProcess) {
    let seen = tally(node, "stop");
    assert_eq!((seen.wrong, seen.missing, seen.failed()), (0, 0, 0), "{seen:?}");
}

/// Starts two holders and a reader without a segment, and puts objects with a copy on each holder.
fn two_holders(flags: &[&str]) -> (MasterProcess, [NodeProcess; 2], NodeProcess) {
    let master = MasterProcess::start("127.0.0.1:0", &["--client_ttl=2"]);
    let holders = [(); 2].map(|()| NodeProcess::start(&master.address, flags));
    let reader_flags: Vec<_> = flags.iter().copied().chain(["--no-segment"]).collect();
    let mut reader = NodeProcess::start(&master.address, &reader_flags);
    for at in 0..KEYS {
        assert_eq!(reader.request(&format!("fill-twice two{at} {LENGTH} 1")), "stored 2");
    }
    (master, holders, reader)
}

/// Reads until both holders have served enough bytes to be measured. The split after that is random
/// on a busy machine: a holder whose bytes are in the processor's cache is faster. The unit tests of
/// replica selection cover how equal holders alternate.
fn check_balance(flags: &[&str]) {
    let (_master, mut holders, mut reader) = two_holders(flags);
    let names = holders.each_mut().map(|holder| holder.request("name"));
    assert_eq!(reader.request(&format!("read-loop two {KEYS}")), "started");
    until(BALANCE_TIMEOUT, "both holders serve reads", || {
        let bytes_from =
            names.each_ref().map(|name| number(&mut reader, &format!("bytes-from {name}")));
        (*bytes_from.iter().min()? >= MEASURED_BYTES).then_some(())
    });
    stop_clean(&mut reader);
}

#[test]
fn reads_spread_over_two_equal_holders() {
    check_balance(&[]);
    check_balance(&["--tcp"]);
}

fn check_loss(flags: &[&str]) {
    let (_master, [mut victim, mut survivor], mut reader) = two_holders(flags);
    let [gone, kept] = [&mut victim, &mut survivor].map(|node| node.request("name"));
    assert_eq!(reader.request(&format!("read-loop two {KEYS}")), "started");
    await_good(&mut reader, 50, "reads before the death");
    victim.kill();
    await_good(&mut reader, 200, "reads after the death");
    until(RECOVERY_TIMEOUT, "the master expires the dead holder", || {
        (survivor.request("segments") == "1").then_some(())
    });
    await_good(&mut reader, 50, "reads of the remaining copies");
    stop_clean(&mut reader);
    for at in 0..KEYS {
        assert_eq!(reader.request(&format!("version two{at}")), "1");
    }
    // A copy is skipped only after an error of its holder.
    let errors = number(&mut reader, &format!("errors {gone}"));
    let skipped = number(&mut reader, "skipped");
    assert!(skipped <= errors, "{skipped} copies were skipped for {errors} errors");
    assert_eq!(number(&mut reader, &format!("errors {kept}")), 0);
}

#[test]
fn death_of_one_of_two_holders_fails_no_read() {
    check_loss(&[]);
    check_loss(&["--tcp"]);
}
