//! Chaos test: writers, readers and eviction, while holders, clients and masters are killed and
//! suspended at random moments. Every byte depends on its key, version and position, and no reader may
//! get a byte of another object. One variant runs masters without a log. The other restarts them from
//! their log; there, no acknowledged object of a holder that lives may be missing.

use std::time::{Duration, Instant};

use mooncake_base::{env, parse::read_number, requirement::is_long_run};
use mooncake_cluster_tests::{MasterProcess, NodeProcess, tally::Tally};
use mooncake_testkit::{Random, until};

/// The longest time without a successful call after a fault, also on a busy machine.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(60);

/// The range of suspensions, in milliseconds: longer than a fence, so that the memory under a read may
/// be reused, and sometimes, but not always, longer than `client_ttl`.
const SUSPENSION_MS: (u64, u64) = (300, 2200);

/// The longest time between two faults, in milliseconds.
const PAUSE_MS_MAX: u64 = 1000;

const LEASES: [&str; 2] = ["--client_ttl=2", "--default_kv_lease_ttl=50ms"];

/// The last of the survivors in one of the tests, to which nothing happens: a suspension could last
/// longer than `client_ttl`, after which the master has dropped its objects.
const KEEPER: &str = "keeper";

/// What happens to one of the processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    KillMaster,
    SuspendMaster,
    /// Kills a process that lends memory, writes and reads.
    KillLender,
    /// Kills a process that only writes and reads.
    KillClient,
    SuspendLender,
    /// Suspends a process that lives until the end.
    SuspendSurvivor,
}

/// Each fault happens at least once.
const FAULTS: [Fault; 6] = [
    Fault::KillMaster,
    Fault::SuspendMaster,
    Fault::KillLender,
    Fault::KillClient,
    Fault::SuspendLender,
    Fault::SuspendSurvivor,
];

/// The processes under test.
struct Cluster {
    random: Random,
    master: MasterProcess,
    /// The master's `--state_dir` flag.
    state: String,
    lender: NodeProcess,
    client: NodeProcess,
    /// The lenders and clients started so far.
    started: u64,
    /// The nodes that live until the end. Together with the lender they hold less than is put, so
    /// objects are evicted.
    survivors: Vec<(&'static str, NodeProcess)>,
}

/// Returns the seconds that each test lasts: 15, or 600 in long runs.
fn seconds() -> u64 {
    match env::MOONCAKE_TEST_CHAOS_SECONDS.read() {
        Some(text) => read_number(&text).expect("a number of seconds"),
        None if is_long_run() => 600,
        None => 15,
    }
}

fn start_master(address: &str, state: &str) -> MasterProcess {
    MasterProcess::start(address, &[state, LEASES[0], LEASES[1]])
}

fn start_node(master: &str, flags: &[&str], loops: &[&str]) -> NodeProcess {
    let mut node = NodeProcess::start(master, flags);
    for command in loops {
        node.expect_reply(command, "started");
    }
    node
}

/// Checks that there were no wrong bytes, no checksum mismatches and no internal errors.
fn check(name: &str, tally: Tally) -> Tally {
    assert_eq!(tally.wrong, 0, "{name}: {tally:?}");
    for code in ["CHECKSUM_MISMATCH", "INTERNAL_ERROR"] {
        assert!(!tally.errors.contains_key(code), "{name}: {tally:?}");
    }
    tally
}

/// Waits until the loops of a node have made `more` successful calls.
fn await_good(name: &str, node: &mut NodeProcess, more: u64) {
    let before = check(name, node.tally()).good;
    until(RECOVERY_TIMEOUT, &format!("calls of {name} succeed again"), || {
        (check(name, node.tally()).good >= before + more).then_some(())
    });
}

/// Lets time pass: there is no event to wait for.
fn pass(milliseconds: u64) {
    let end = Instant::now() + Duration::from_millis(milliseconds);
    until(RECOVERY_TIMEOUT, "time passes", || (Instant::now() > end).then_some(()));
}

impl Cluster {
    fn start(state: String) -> Self {
        let mut random = Random::new();
        let master = start_master("127.0.0.1:0", &state);
        let address = &master.address;
        let reads = ["read-loop wide 16", "read-loop pair 8", "read-loop small 64"];
        let survivors = vec![
            (
                "checksummed",
                start_node(
                    address,
                    &["--small-segment", "--checksums"],
                    &["churn-loop wide 16 2000003 1", "churn-loop pair 8 700001 2"],
                ),
            ),
            (
                "plain",
                start_node(
                    address,
                    &["--small-segment"],
                    &["churn-loop small 64 5001 2", reads[0], reads[1]],
                ),
            ),
            ("remote", start_node(address, &["--tcp", "--no-segment"], &reads)),
        ];
        let lender = start_lender(address, 0, &mut random);
        let client = start_client(address, 0);
        Self { random, master, state, lender, client, started: 0, survivors }
    }

    fn inject(&mut self, fault: Fault) {
        let (least, most) = SUSPENSION_MS;
        let suspension = least + self.random.below(most - least);
        let address = self.master.address.clone();
        self.started += 1;
        match fault {
            Fault::KillMaster => {
                self.master.kill();
                self.master = start_master(&address, &self.state);
            }
            Fault::SuspendMaster => {
                self.master.suspend();
                pass(suspension);
                self.master.resume();
            }
            Fault::KillLender => {
                self.lender.kill();
                self.lender = start_lender(&address, self.started, &mut self.random);
            }
            Fault::KillClient => {
                self.client.kill();
                self.client = start_client(&address, self.started);
            }
            Fault::SuspendLender | Fault::SuspendSurvivor => {
                let suspended = self.survivors.iter().filter(|(name, _)| *name != KEEPER).count();
                let survivor = self.random.below(suspended as u64) as usize;
                let node = match fault {
                    Fault::SuspendLender => &self.lender,
                    _ => &self.survivors[survivor].1,
                };
                node.suspend();
                pass(suspension);
                node.resume();
            }
        }
    }
}

/// Starts a node that will be killed. It holds, writes and reads a part of the objects.
fn start_lender(master: &str, number: u64, random: &mut Random) -> NodeProcess {
    let flags: &[&str] = match random.below(3) {
        0 => &["--small-segment", "--tcp"],
        1 => &["--small-segment", "--checksums"],
        _ => &["--small-segment"],
    };
    let own = format!("churn-loop lender{number}- 12 1000001 1");
    let loops = [&own, "read-loop wide 16", "read-loop pair 8", "read-loop small 64"];
    start_node(master, flags, &loops)
}

/// Starts a node that will be killed, and that lends no memory.
fn start_client(master: &str, number: u64) -> NodeProcess {
    let own = format!("churn-loop client{number}- 12 300001 1");
    start_node(master, &["--no-segment"], &[&own, "read-loop wide 16"])
}

#[test]
fn no_wrong_bytes_when_processes_and_masters_are_killed() {
    run_chaos(Cluster::start("--state_dir=none".to_owned()));
}

#[test]
fn no_lost_puts_when_masters_restart_from_their_logs() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(format!("--state_dir={}", folder.path().display()));
    // The only node that holds pinned objects. It has room for them.
    let mut keeper = NodeProcess::start(&cluster.master.address, &[]);
    let segment = keeper.request("name");
    keeper.expect_reply(&format!("write-loop kept 8 100000 {segment}"), "started");
    cluster.survivors.push((KEEPER, keeper));
    for (name, tally) in run_chaos(cluster) {
        assert!(name != KEEPER || tally.lost == 0, "{tally:?}");
    }
}

/// Runs load under random faults. Returns the counts of the survivors.
fn run_chaos(mut cluster: Cluster) -> Vec<(&'static str, Tally)> {
    let end = Instant::now() + Duration::from_secs(seconds());
    let mut faults = 0;
    // On a busy machine the test continues until each fault has happened.
    while Instant::now() < end || faults < FAULTS.len() {
        pass(cluster.random.below(PAUSE_MS_MAX));
        let random = cluster.random.below(FAULTS.len() as u64) as usize;
        let fault = FAULTS.get(faults).copied().unwrap_or(FAULTS[random]);
        cluster.inject(fault);
        faults += 1;
        for (name, node) in &mut cluster.survivors {
            await_good(name, node, 10);
        }
    }
    check("lender", cluster.lender.stop_loops());
    check("client", cluster.client.stop_loops());
    let stop = |(name, mut node): (&'static str, NodeProcess)| {
        let tally = check(name, node.stop_loops());
        assert!(tally.good > faults as u64 && tally.missing > 0, "{name}: {tally:?}");
        (name, tally)
    };
    cluster.survivors.into_iter().map(stop).collect()
}
