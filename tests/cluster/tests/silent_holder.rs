//! A holder that is stopped (SIGSTOP) and keeps its connections: nobody waits for it longer than for
//! the stall limit while another holder can serve.

use std::time::{Duration, Instant};

use mooncake_cluster_tests::{MasterProcess, NodeProcess, REPLY_TIMEOUT};
use mooncake_testkit::until;

/// The longest time that a call may take while one of two holders is stopped.
const CALL_MAX: Duration = Duration::from_secs(3);

const KEYS: usize = 6;

/// Returns the reply and how long it took.
fn timed(node: &mut NodeProcess, command: &str) -> (String, Duration) {
    let begin = Instant::now();
    let reply = node.request(command);
    (reply, begin.elapsed())
}

fn check(node: &mut NodeProcess, command: &str, expected: &str) {
    let (reply, took) = timed(node, command);
    assert!(reply.starts_with(expected), "{command}: {reply}");
    assert!(took < CALL_MAX, "{command} took {took:?}");
}

/// Puts objects with two copies, stops one holder, and then reads and puts.
fn check_stopped_holder(length: usize) {
    // The master must not notice the stop: the test is about the clients.
    let master = MasterProcess::start("127.0.0.1:0", &["--client_ttl=120"]);
    let mut holders = [(); 2].map(|()| NodeProcess::start(&master.address, &["--tcp"]));
    let mut user = NodeProcess::start(&master.address, &["--tcp", "--no-segment"]);
    for at in 0..KEYS {
        check(&mut user, &format!("put old{at} {length} {at} 2"), "stored 2");
        check(&mut user, &format!("get old{at} {length} {at}"), "same");
    }
    let names = holders.each_mut().map(|holder| timed(holder, "name").0);
    holders[0].suspend();
    for at in 0..KEYS {
        check(&mut user, &format!("get old{at} {length} {at}"), "same");
        check(&mut user, &format!("put two{at} {length} {at} 2"), "stored 1");
        check(&mut user, &format!("put one{at} {length} {at}"), "stored 1");
        check(&mut user, &format!("get two{at} {length} {at}"), "same");
        check(&mut user, &format!("get one{at} {length} {at}"), "same");
    }
    let errors = names.each_ref().map(|name| timed(&mut user, &format!("errors {name}")).0);
    assert_ne!(errors[0], "0", "the stopped holder is counted");
    assert_eq!(errors[1], "0", "the healthy holder is not blamed");
    // A process that has no connection to the stopped holder yet.
    let mut newcomer = NodeProcess::start(&master.address, &["--tcp", "--no-segment"]);
    for at in 0..KEYS {
        check(&mut newcomer, &format!("get old{at} {length} {at}"), "same");
        check(&mut newcomer, &format!("put new{at} {length} {at}"), "stored 1");
    }
    holders[0].resume();
    for at in 0..KEYS {
        check(&mut newcomer, &format!("get old{at} {length} {at}"), "same");
    }
}

#[test]
fn stopped_holder_delays_small_objects_by_less_than_3_s() {
    check_stopped_holder(4_000);
}

#[test]
fn stopped_holder_delays_large_objects_by_less_than_3_s() {
    check_stopped_holder(3_000_000);
}

/// Without another holder the calls wait, and succeed when the holder goes on.
#[test]
fn only_holder_is_waited_for() {
    let master = MasterProcess::start("127.0.0.1:0", &["--client_ttl=120"]);
    let mut holder = NodeProcess::start(&master.address, &["--tcp"]);
    let mut reader = NodeProcess::start(&master.address, &["--tcp", "--no-segment"]);
    let mut writer = NodeProcess::start(&master.address, &["--tcp", "--no-segment"]);
    check(&mut reader, "put old 2000000 1", "stored 1");
    check(&mut writer, "put warm 2000000 1", "stored 1");
    assert_eq!(timed(&mut holder, "segments").0, "1");
    holder.suspend();
    reader.send("get old 2000000 1");
    writer.send("put new 2000000 2");
    // Longer than the stall limit, after which both would have turned to another holder.
    let pause = Duration::from_millis(2500);
    assert_eq!(reader.reply_within(pause), None);
    assert_eq!(writer.reply_within(Duration::from_millis(1)), None);
    holder.resume();
    assert_eq!(reader.reply("get"), "same");
    assert_eq!(writer.reply("put"), "stored 1");
    check(&mut reader, "get new 2000000 2", "same");
}

/// The bytes of the first attempt lie in the system of the holder: after the object is removed, no other
/// gets its memory before they can no longer arrive.
#[test]
fn memory_of_readmitted_replica_rests_after_removal() {
    let master = MasterProcess::start("127.0.0.1:0", &["--client_ttl=120"]);
    let mut holder = NodeProcess::start(&master.address, &["--tcp", "--small-segment"]);
    let mut writer = NodeProcess::start(&master.address, &["--tcp", "--no-segment"]);
    // Two objects do not fit side by side.
    for key in ["one", "two"] {
        check(&mut writer, &format!("put {key} 10000000 1"), "stored 1");
        check(&mut writer, &format!("remove {key}"), "removed");
    }
    assert_eq!(timed(&mut holder, "segments").0, "1");
    holder.suspend();
    writer.send("put late 10000000 2");
    // Longer than the stall limit: the holder is left, and taken back as the only one.
    assert_eq!(writer.reply_within(Duration::from_millis(2500)), None);
    holder.resume();
    assert_eq!(writer.reply("put"), "stored 1");
    check(&mut writer, "get late 10000000 2", "same");
    check(&mut writer, "remove late", "removed");
    let reply = writer.request("put next 10000000 3");
    assert!(reply.contains("late writers"), "{reply}");
}

/// A holder is stopped within a write and goes on before it expires. Its system has taken bytes of that
/// write, and other processes of the host write to its memory meanwhile.
#[test]
fn bytes_of_failed_write_reach_no_other_object() {
    let flags = ["--client_ttl=6", "--put_start_discard_timeout_sec=4"];
    let master = MasterProcess::start("127.0.0.1:0", &flags);
    let mut holder = NodeProcess::start(&master.address, &["--small-segment"]);
    let mut remote = NodeProcess::start(&master.address, &["--tcp", "--no-segment"]);
    let mut local = NodeProcess::start(&master.address, &["--no-segment"]);
    for user in [&mut remote, &mut local] {
        check(user, "fill warm 10000000 1", "stored 1");
        check(user, "version warm", "1");
        check(user, "remove warm", "removed");
    }
    assert_eq!(timed(&mut holder, "segments").0, "1");
    holder.suspend();
    let stopped = Instant::now();
    let reply = remote.request("fill failed 10000000 2");
    assert!(reply.starts_with("error"), "{reply}");
    let resumed = std::thread::spawn(move || {
        let end = Duration::from_millis(4500);
        // Only time passes: there is no event to wait for.
        until(REPLY_TIMEOUT, "time passes", || (stopped.elapsed() > end).then_some(()));
        holder.resume();
        holder
    });
    until(REPLY_TIMEOUT, "memory is free", || {
        (local.request("fill other 10000000 3") == "stored 1").then_some(())
    });
    let _holder = resumed.join().unwrap();
    check(&mut local, "version other", "3");
    check(&mut remote, "version other", "3");
}
