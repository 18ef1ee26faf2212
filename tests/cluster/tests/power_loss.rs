//! A host that loses power while puts go on in a full pool, so that memory is reused all the time:
//! no object that is readable afterwards has bytes of another one.
#![allow(
    clippy::unwrap_used,
    reason = "integration tests are tests as a whole, which the lint does not see"
)]

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use mooncake_base::{ErrorCode, requirement::is_long_run};
use mooncake_cluster_tests::{MasterProcess, NodeProcess, pattern, power_loss};
use mooncake_store_client::{Client, ClientConfig, LinkConfig, PutOptions, SocketLink};
use mooncake_testkit::{cluster::key, until};
use mooncake_transfer_engine::{Engine, EngineConfig};
use tokio::runtime::{Builder, Runtime};

const VALUE_BYTES: usize = 64 << 10;

/// The values that fit into the 64 MiB of the holder.
const POOL_VALUES: u64 = 1024;

/// The values that are put before the state directory is copied: the pool is full by then.
const VALUES_BEFORE: u64 = 2 * POOL_VALUES;

/// The age of a copy of the state directory that takes the place of the directory.
const AGE: Duration = Duration::from_millis(700);

/// The least number of values that are put meanwhile, whose memory an older object had.
const REUSED_VALUES: u64 = 64;

/// The longest time until a number of values are put, or until a call is answered after the restart.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What is read after the restart.
#[derive(Debug, Default)]
struct Found {
    right: u64,
    absent: u64,
    wrong: Vec<String>,
}

fn master(folder: &Path, address: &str) -> MasterProcess {
    // Leases would keep what was read from eviction.
    let flags = [&format!("--state_dir={}", folder.display()), "--default_kv_lease_ttl=10"];
    MasterProcess::start(address, &flags)
}

/// A client that lends no memory.
fn client(master: &str, runtime: &Runtime) -> Client {
    let engine = EngineConfig { name: "127.0.0.1".to_owned(), ..EngineConfig::default() };
    let engine = Engine::start(engine, runtime.handle().clone()).unwrap();
    let link = SocketLink::new(master, LinkConfig::default()).unwrap();
    let config = ClientConfig { rpc_timeout: Duration::from_secs(10), ..ClientConfig::default() };
    Client::connect(config, engine, Arc::new(link)).unwrap()
}

fn name(number: u64) -> String {
    format!("value-{number}")
}

/// Puts values without pause until told to stop. `count` is the number of puts so far, of which those
/// during the crash may have failed.
fn write_all(client: &Client, count: &AtomicU64, is_over: &AtomicBool) {
    while !is_over.load(Ordering::SeqCst) {
        let name = name(count.load(Ordering::SeqCst));
        let value = pattern::value(&name, 1, VALUE_BYTES);
        let outcome = client.put_bytes(&key(&name), &value, &PutOptions::default());
        assert!(outcome.is_ok() || is_over.load(Ordering::SeqCst), "{name}: {outcome:?}");
        count.fetch_add(1, Ordering::SeqCst);
    }
}

/// Reads the first `count` values, each until the master that was restarted answers.
fn read_all(client: &Client, count: u64) -> Found {
    let mut found = Found::default();
    for name in (0..count).map(name) {
        let value = until(TIMEOUT, "a read is answered", || match client.get_bytes(&key(&name)) {
            // What is left of the log has the start of the put and not its end.
            Err(error) if error.code() == ErrorCode::REPLICA_IS_NOT_READY => Some(None),
            outcome => outcome.ok(),
        });
        match value.map(|value| pattern::version_of(&name, &value)) {
            None => found.absent += 1,
            Some(Ok(1)) => found.right += 1,
            Some(Ok(version)) => found.wrong.push(format!("{name}: version {version}")),
            Some(Err(what)) => found.wrong.push(what),
        }
    }
    found
}

fn await_puts(count: &AtomicU64, more: u64) {
    let target = count.load(Ordering::SeqCst) + more;
    until(TIMEOUT, "values are put", || (count.load(Ordering::SeqCst) >= target).then_some(()));
}

/// What a loss of power takes from the log.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Loss {
    /// What the log does not call synced.
    Unsynced,
    /// Also what was synced lately: the disk did not keep it, or an older copy was put in place.
    Synced,
}

/// Puts into a full pool, kills the master, and starts it at the same address, with what the loss left
/// and as after a reboot. Returns what is readable then.
fn lose_power(loss: Loss) -> Found {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (state, left) = (folder.path().join("state"), folder.path().join("left"));
    let mut running = master(&state, "127.0.0.1:0");
    let address = running.address.clone();
    let _holder = NodeProcess::start(&address, &[]);
    let client = client(&address, &runtime);
    let (count, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| write_all(&client, &count, &is_over));
        await_puts(&count, VALUES_BEFORE);
        if loss == Loss::Synced {
            power_loss::copy(&state, &left).unwrap();
            let end = Instant::now() + AGE;
            await_puts(&count, REUSED_VALUES);
            // The age of the copy is under test: there is no event to wait for.
            until(TIMEOUT, "the copy is old", || (Instant::now() >= end).then_some(()));
        }
        is_over.store(true, Ordering::SeqCst);
        running.kill();
        if loss == Loss::Unsynced {
            power_loss::copy(&state, &left).unwrap();
            power_loss::drop_unsynced(&left).unwrap();
        }
        power_loss::change_boot(&left).unwrap();
        running = master(&left, &address);
    });
    let found = read_all(&client, count.load(Ordering::SeqCst));
    let wrong = found.wrong.iter().take(3).collect::<Vec<_>>();
    let (right, absent) = (found.right, found.absent);
    assert!(
        wrong.is_empty(),
        "{loss:?}: {} wrong, {right} right, {absent} absent, such as {wrong:?}",
        found.wrong.len()
    );
    found
}

fn rounds() -> u64 {
    if is_long_run() { 10 } else { 1 }
}

#[test]
fn loss_of_unsynced_frames_recovers_no_wrong_byte() {
    for _ in 0..rounds() {
        // All is dropped if a client heard of a sync that no frame behind it records.
        let is_recovered = (0..3).any(|_| lose_power(Loss::Unsynced).right > 0);
        assert!(is_recovered, "nothing is readable");
    }
}

#[test]
fn loss_of_synced_frames_recovers_no_wrong_byte() {
    for _ in 0..rounds() {
        lose_power(Loss::Synced);
    }
}
