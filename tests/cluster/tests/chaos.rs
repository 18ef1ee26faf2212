//! Everything at once: writers, readers, eviction, and a killer of holders and masters. Every byte
//! tells where it belongs; nobody ever reads one that belongs elsewhere. One master forgets all when
//! it dies, the other goes on from its log.

use std::time::{Duration, Instant};

use mooncake_base::{
    env::{self, EnvVar},
    parse::read_number,
};
use mooncake_cluster_tests::{MasterProcess, NodeProcess, tally::Tally};
use mooncake_testkit::{Random, until};

/// No order may take longer: the longest waits for a call under way.
const ORDER: Duration = Duration::from_secs(30);

/// How long the loops may be without a good call after a death, also on a machine that has much else
/// to do.
const RECOVERY: Duration = Duration::from_secs(60);

/// How long a node stands still, in milliseconds: longer than a fence, so that what it reads right
/// then may be another object's, and not always for as long as it takes to be given up.
const FROZEN: (u64, u64) = (300, 2200);

/// Every so many deaths it is the master that dies.
const DEATHS_PER_MASTER: u64 = 6;

const LEASES: [&str; 2] = ["--client_ttl=2", "--default_kv_lease_ttl=50ms"];

static LONG: EnvVar = EnvVar {
    name: "MOONCAKE_LONG_TESTS",
    aliases: &[],
    default: "",
    help: "Whether tests also do what takes long.",
};

/// How long one such world lasts: the two together half a minute, or ten minutes each.
fn seconds() -> u64 {
    match env::MOONCAKE_TEST_CHAOS_SECONDS.read() {
        Some(text) => read_number(&text).expect("a number of seconds"),
        None if LONG.read().is_some() => 600,
        None => 15,
    }
}

fn ask(node: &mut NodeProcess, order: &str) -> String {
    node.ask(order, ORDER).unwrap_or_else(|| panic!("no answer to {order:?} within {ORDER:?}"))
}

fn start(node: &mut NodeProcess, orders: &[&str]) {
    for order in orders {
        assert_eq!(ask(node, order), "started", "{order}");
    }
}

/// No read brought bytes of something else, no copy was damaged, and nothing broke inside.
fn check(name: &str, line: &str) -> Tally {
    let tally: Tally = line.parse().expect("the node answers with a tally");
    assert_eq!(tally.wrong, 0, "{name}: {tally:?}");
    for code in ["CHECKSUM_MISMATCH", "INTERNAL_ERROR"] {
        assert!(!tally.errors.contains_key(code), "{name}: {tally:?}");
    }
    tally
}

/// Waits until the loops of a node have made more good calls.
fn await_good(name: &str, node: &mut NodeProcess, more: u64) {
    let before = check(name, &ask(node, "tally")).good;
    until(RECOVERY, &format!("calls of {name} succeed again"), || {
        (check(name, &ask(node, "tally")).good >= before + more).then_some(())
    });
}

/// Has a node stand still in the middle of what it does, while the others go on.
fn freeze(node: &NodeProcess, random: &mut Random) {
    let (least, most) = FROZEN;
    let end = Instant::now() + Duration::from_millis(least + random.below(most - least));
    node.freeze();
    // Time itself is what it loses: nothing happens that could be waited for.
    until(RECOVERY, "time passes", || (Instant::now() > end).then_some(()));
    node.thaw();
}

/// A node to be killed, which holds, writes and reads a share of everything.
fn victim(master: &str, number: u64, random: &mut Random) -> NodeProcess {
    let flags: &[&str] = match random.below(3) {
        0 => &["--lend-little", "--tcp"],
        1 => &["--lend-little", "--checksums"],
        _ => &["--lend-little"],
    };
    let mut node = NodeProcess::start(master, flags);
    let own = format!("churn-loop victim{number}- 12 1000001 1");
    start(&mut node, &[&own, "read-loop wide 16", "read-loop pair 8", "read-loop small 64"]);
    node
}

#[test]
fn no_reader_gets_bytes_of_another_object_whatever_dies_or_goes_meanwhile() {
    rage("--state_dir=none");
}

#[test]
fn no_reader_gets_bytes_of_another_object_when_masters_go_on_from_their_logs() {
    let folder = tempfile::tempdir().unwrap();
    rage(&format!("--state_dir={}", folder.path().display()));
}

/// Lets everything loose on each other, over masters that keep their log there.
fn rage(state: &str) {
    let mut random = Random::new();
    let start_master = |address: &str| {
        let flags = [state, LEASES[0], LEASES[1]];
        MasterProcess::start(address, &flags)
    };
    let mut master = start_master("127.0.0.1:0");
    let address = master.address.clone();
    // Those that live: together with the victim they lend less than is put.
    let mut summed = NodeProcess::start(&address, &["--lend-little", "--checksums"]);
    let mut plain = NodeProcess::start(&address, &["--lend-little"]);
    let mut remote = NodeProcess::start(&address, &["--tcp", "--lend-nothing"]);
    start(&mut summed, &["churn-loop wide 16 2000003 1", "churn-loop pair 8 700001 2"]);
    start(&mut plain, &["churn-loop small 64 5001 2", "read-loop wide 16", "read-loop pair 8"]);
    start(&mut remote, &["read-loop wide 16", "read-loop pair 8", "read-loop small 64"]);
    let mut deaths = 0;
    let mut dying = victim(&address, deaths, &mut random);
    // A machine that is busy gets the time that it takes for a master to die, too.
    let end = Instant::now() + Duration::from_secs(seconds());
    while Instant::now() < end || deaths <= DEATHS_PER_MASTER {
        await_good("victim", &mut dying, random.below(100));
        freeze([&summed, &plain, &remote][random.below(3) as usize], &mut random);
        deaths += 1;
        if deaths.is_multiple_of(DEATHS_PER_MASTER) {
            master.kill();
            master = start_master(&address);
        } else {
            dying.kill();
            dying = victim(&address, deaths, &mut random);
        }
        for (name, node) in
            [("summed", &mut summed), ("plain", &mut plain), ("remote", &mut remote)]
        {
            await_good(name, node, 10);
        }
    }
    for (name, node) in [("summed", &mut summed), ("plain", &mut plain), ("remote", &mut remote)] {
        let tally = check(name, &ask(node, "stop"));
        assert!(tally.good > deaths && tally.missing > 0, "{name}: {tally:?}");
    }
    check("victim", &ask(&mut dying, "stop"));
}
