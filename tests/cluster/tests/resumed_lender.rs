//! Puts to a lender right after it was suspended (SIGSTOP) and resumed (SIGCONT), for a time around
//! that after which the master gives it up: what is acknowledged then can be read.

use std::time::{Duration, Instant};

use mooncake_base::requirement::is_long_run;
use mooncake_cluster_tests::{MasterProcess, NodeProcess, REPLY_TIMEOUT};
use mooncake_testkit::{Random, until};

/// The time after which the master gives up a silent client, in milliseconds.
const TTL_MS: u64 = 2000;

const PUTS: u32 = 20;

/// Suspends the lender for a time, then puts to it at once. Returns the acknowledged keys.
fn puts_after_pause(
    lender: &NodeProcess,
    writer: &mut NodeProcess,
    segment: &str,
    (round, pause_ms): (usize, u64),
) -> Vec<String> {
    lender.suspend();
    let end = Instant::now() + Duration::from_millis(pause_ms);
    // Only time passes: there is no event to wait for.
    until(REPLY_TIMEOUT, "time passes", || (Instant::now() > end).then_some(()));
    lender.resume();
    let keys = (0..PUTS).map(|at| format!("after-{round}-{at}"));
    let stored = |key: &String| {
        let reply = writer.request(&format!("fill {key} 50000 1 {segment}"));
        assert!(reply == "stored 1" || reply.starts_with("error"), "{key}: {reply}");
        reply == "stored 1"
    };
    keys.filter(stored).collect()
}

fn check_resumed_lender(flags: &[&str]) {
    let mut random = Random::new();
    let ttl = format!("--client_ttl={}", TTL_MS / 1000);
    let master = MasterProcess::start("127.0.0.1:0", &[&ttl]);
    let mut lender = NodeProcess::start(&master.address, flags);
    let _other = NodeProcess::start(&master.address, flags);
    let user_flags: Vec<_> = flags.iter().copied().chain(["--no-segment"]).collect();
    let mut writer = NodeProcess::start(&master.address, &user_flags);
    let mut reader = NodeProcess::start(&master.address, &user_flags);
    let segment = lender.request("name");
    let rounds = if is_long_run() { 60 } else { 6 };
    let mut acknowledged = 0;
    for round in 0..rounds {
        let pause_ms = match round {
            0 => TTL_MS / 4,
            1 => 2 * TTL_MS,
            _ => TTL_MS * 9 / 10 + random.below(TTL_MS / 5),
        };
        let keys = puts_after_pause(&lender, &mut writer, &segment, (round, pause_ms));
        acknowledged += keys.len();
        for key in keys {
            let version = reader.request(&format!("version {key}"));
            assert_eq!(version, "1", "{key} after a pause of {pause_ms} ms");
        }
    }
    assert!(acknowledged > 0, "no put succeeded");
}

#[test]
fn puts_after_lender_resumes_are_readable_over_shm() {
    check_resumed_lender(&[]);
}

#[test]
fn puts_after_lender_resumes_are_readable_over_tcp() {
    check_resumed_lender(&["--tcp"]);
}
