//! Puts over a link to the master that is cut at random: every acknowledged value can be read
//! afterwards, and no value is wrong.
#![allow(
    clippy::unwrap_used,
    reason = "integration tests are tests as a whole, which the lint does not see"
)]

use std::{
    slice::from_ref,
    sync::Arc,
    time::{Duration, Instant},
};

use mooncake_base::{ObjectKey, requirement::is_long_run};
use mooncake_cluster_tests::{MasterProcess, NodeProcess, overload::Overload, pattern};
use mooncake_store_client::{
    Client, ClientConfig, LinkConfig, Parts, PutItem, PutOptions, SocketLink,
};
use mooncake_testkit::{
    CutRule, CuttingProxy, Random,
    cluster::{key, range},
    until,
};
use mooncake_transfer_engine::{Engine, EngineConfig, SharedMemory};
use tokio::runtime::{Builder, Runtime};

/// The longest time until the writer has joined over the link.
const JOIN_TIMEOUT: Duration = Duration::from_secs(20);

/// The pause before a failed put is repeated.
const PAUSE: Duration = Duration::from_millis(1);

/// The fewest cuts of a run, and the longest time until they have happened.
const CUTS_MIN: u64 = 20;
const CUTS_TIMEOUT: Duration = Duration::from_secs(60);

/// One of this many pieces of the link is followed by a cut.
const PIECES_PER_CUT: u64 = 100;

const VALUE_BYTES: usize = 100;
const BATCH: usize = 8;
/// More items than a call has that the master admits at once.
const LARGE_BATCH: usize = 1100;
/// The most large batches: all values are read at the end.
const LARGE_BATCHES_MAX: u64 = 5;
const UPSERTED_KEYS: u64 = 64;

/// A put is repeated this often, as an application does, and given up then.
const TRIES: u32 = 20;

/// The most keys of one writer. All values fit into the pool, so that none is evicted.
const KEYS_MAX: u64 = 60_000;

/// How a writer puts its values.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Put,
    Upsert,
    Batch,
    LargeBatch,
    Session,
}

/// A value that must be readable: its key, and the versions that may be read.
struct Acknowledged {
    key: String,
    versions: std::ops::RangeInclusive<u64>,
}

/// A client over a link of its own.
fn client(master: &str, runtime: &Runtime) -> Client {
    let engine = EngineConfig { name: "127.0.0.1".to_owned(), ..EngineConfig::default() };
    let engine = Engine::start(engine, runtime.handle().clone()).unwrap();
    let link = LinkConfig { may_use_unix_socket: false, ..LinkConfig::default() };
    let config = ClientConfig { rpc_timeout: Duration::from_secs(5), ..ClientConfig::default() };
    until(JOIN_TIMEOUT, "the client joins", || {
        let link = SocketLink::new(master, link.clone()).unwrap();
        Client::connect(config.clone(), engine.clone(), Arc::new(link)).ok()
    })
}

/// Puts until `is_over` and returns what was acknowledged.
fn write_all(client: &Client, kind: Kind, is_over: &dyn Fn() -> bool) -> Vec<Acknowledged> {
    let memory = client.engine().allocate((LARGE_BATCH * VALUE_BYTES) as u64).unwrap();
    let mut acknowledged = Vec::new();
    let mut upserted = vec![0; UPSERTED_KEYS as usize];
    let most = if kind == Kind::LargeBatch { LARGE_BATCHES_MAX } else { KEYS_MAX };
    for number in 0..most {
        if is_over() {
            break;
        }
        let once = |key: String| Acknowledged { key, versions: 1..=1 };
        match kind {
            Kind::Put => {
                let key = format!("put-{number}");
                if put(client, &key, 1, &PutOptions::default()) {
                    acknowledged.push(once(key));
                }
            }
            Kind::Upsert => {
                let (name, version) = (number % UPSERTED_KEYS, number / UPSERTED_KEYS + 1);
                let options = PutOptions { is_upsert: true, ..PutOptions::default() };
                if put(client, &format!("upsert-{name}"), version, &options) {
                    upserted[name as usize] = version;
                }
            }
            Kind::Batch | Kind::LargeBatch => {
                let items = if kind == Kind::Batch { BATCH } else { LARGE_BATCH };
                let keys = (0..items).map(|at| format!("{kind:?}-{number}-{at}")).collect();
                acknowledged.extend(put_batch(client, &memory, keys).into_iter().map(once));
            }
            Kind::Session => {
                let key = format!("session-{number}");
                if put_in_session(client, &memory, &key) {
                    acknowledged.push(once(key));
                }
            }
        }
    }
    let upserted = upserted.into_iter().enumerate().filter(|(_, version)| *version > 0);
    acknowledged.extend(upserted.map(|(name, version)| Acknowledged {
        key: format!("upsert-{name}"),
        // A later upsert that failed may have been carried out.
        versions: version..=u64::MAX,
    }));
    acknowledged
}

/// Puts until it is acknowledged. Returns whether it was.
fn put(client: &Client, name: &str, version: u64, options: &PutOptions) -> bool {
    let value = pattern::value(name, version, VALUE_BYTES);
    (0..TRIES)
        .any(|_| client.put_bytes(&key(name), &value, options).inspect_err(|_| pause()).is_ok())
}

/// Puts a batch, and what failed of it again. Returns the acknowledged keys.
fn put_batch(client: &Client, memory: &SharedMemory, keys: Vec<String>) -> Vec<String> {
    let (mut left, mut acknowledged) = (keys, Vec::new());
    for _ in 0..TRIES {
        let objects: Vec<ObjectKey> = left.iter().map(|name| key(name)).collect();
        let parts: Vec<_> = (0..left.len())
            .map(|at| {
                let value = pattern::value(&left[at], 1, VALUE_BYTES);
                memory.write((at * VALUE_BYTES) as u64, &value).unwrap();
                range(memory, at * VALUE_BYTES, VALUE_BYTES)
            })
            .collect();
        let items: Vec<_> = objects
            .iter()
            .zip(&parts)
            .map(|(key, part)| PutItem { key: key.into(), parts: from_ref(part) })
            .collect();
        let outcomes = client.put(&items, &PutOptions::default());
        let (done, failed): (Vec<_>, Vec<_>) =
            left.into_iter().zip(outcomes).partition(|(_, outcome)| outcome.is_ok());
        acknowledged.extend(done.into_iter().map(|(name, _)| name));
        left = failed.into_iter().map(|(name, _)| name).collect();
        if left.is_empty() {
            break;
        }
        pause();
    }
    acknowledged
}

/// Writes a value in two parts. Returns whether its end was acknowledged.
fn put_in_session(client: &Client, memory: &SharedMemory, name: &str) -> bool {
    let key = key(name);
    memory.write(0, &pattern::value(name, 1, VALUE_BYTES)).unwrap();
    let begun = client
        .sessions()
        .begin_writes(&[(key.clone(), VALUE_BYTES as u64)], &PutOptions::default());
    if begun.into_iter().any(|begun| begun.is_err()) {
        pause();
        return false;
    }
    let half = VALUE_BYTES / 2;
    let is_written = [0, half].into_iter().all(|offset| {
        let memory = [range(memory, offset, half)];
        let parts = [Parts { key: &key, offsets: &[offset as u64], memory: &memory }];
        client.sessions().write(&parts).remove(0).is_ok()
    });
    let keys = from_ref(&key);
    let finished = if is_written {
        client.sessions().end_writes(keys)
    } else {
        client.sessions().revoke_writes(keys)
    };
    is_written && finished.into_iter().all(|outcome| outcome.is_ok())
}

#[allow(clippy::disallowed_methods, reason = "limits the rate of calls over a broken link")]
fn pause() {
    std::thread::sleep(PAUSE);
}

/// Reads what was acknowledged. Returns the unreadable keys and the wrong values.
fn read_all(client: &Client, acknowledged: &[Acknowledged]) -> (Vec<String>, Vec<String>) {
    let (mut unreadable, mut wrong) = (Vec::new(), Vec::new());
    for Acknowledged { key: name, versions } in acknowledged {
        match client.get_bytes(&key(name)) {
            Ok(Some(value)) => match pattern::version_of(name, &value) {
                Ok(version) if versions.contains(&version) => {}
                Ok(version) => wrong.push(format!("{name}: version {version}, not {versions:?}")),
                Err(what) => wrong.push(what),
            },
            Ok(None) => unreadable.push(name.clone()),
            Err(error) => unreadable.push(format!("{name}: {error}")),
        }
    }
    (unreadable, wrong)
}

/// Puts over a link that is cut, and checks that what was acknowledged can be read.
fn check_acknowledged(kinds: &[Kind], is_overloaded: bool) {
    let seconds = if is_long_run() { 60 } else { 4 };
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let master = MasterProcess::start("127.0.0.1:0", &[]);
    let _holder = NodeProcess::start(&master.address, &[]);
    let rule = CutRule::OnePieceIn(PIECES_PER_CUT);
    let proxy = CuttingProxy::start(master.address.parse().unwrap(), rule, Random::new()).unwrap();
    let writer = client(&proxy.address().to_string(), &runtime);
    let overload = is_overloaded.then(|| Overload::start(&master.address));
    let start = Instant::now();
    let is_over = || {
        // On a busy machine fewer bytes pass in the same time.
        let is_cut = proxy.cuts() >= CUTS_MIN || start.elapsed() > CUTS_TIMEOUT;
        start.elapsed() >= Duration::from_secs(seconds) && is_cut
    };
    let acknowledged: Vec<(Kind, Vec<Acknowledged>)> = std::thread::scope(|scope| {
        let (writer, is_over) = (&writer, &is_over);
        let start = |&kind| (kind, scope.spawn(move || write_all(writer, kind, is_over)));
        let writers: Vec<_> = kinds.iter().map(start).collect();
        writers.into_iter().map(|(kind, thread)| (kind, thread.join().unwrap())).collect()
    });
    let cuts = proxy.cuts();
    assert!(cuts >= CUTS_MIN, "the link was cut {cuts} times only");
    if let Some(overload) = overload {
        assert!(overload.refused() > 0, "the master was not overloaded");
    }
    let reader = client(&master.address, &runtime);
    for (kind, acknowledged) in &acknowledged {
        let count = acknowledged.len();
        assert!(count >= 50, "{kind:?}: {count} acknowledged only, {cuts} cuts");
        let (unreadable, wrong) = read_all(&reader, acknowledged);
        let first = unreadable.iter().chain(&wrong).take(3).collect::<Vec<_>>();
        let found = (unreadable.len(), wrong.len());
        assert_eq!(found, (0, 0), "{kind:?}: of {count} with {cuts} cuts, such as {first:?}");
    }
}

#[test]
fn acknowledged_puts_over_a_link_that_is_cut_are_readable() {
    check_acknowledged(&[Kind::Put, Kind::Upsert, Kind::Batch, Kind::Session], false);
}

#[test]
fn overloaded_master_with_cut_link_loses_no_acknowledged_put() {
    check_acknowledged(&[Kind::Put, Kind::Upsert, Kind::LargeBatch], true);
}
