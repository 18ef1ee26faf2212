//! Puts over a link to the master that is cut at random places: what was acknowledged is readable.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use mooncake_base::{ErrorCode, Result, Version, requirement::is_long_run};
use mooncake_proto::v1::request::Call;
use mooncake_store_client::{
    ClientConfig, LinkConfig, Parts, ProbeTerms, PutItem, PutOptions, PutOutcome, SocketLink,
};
use mooncake_testkit::{
    Cluster, ClusterSettings, CutRule, CuttingProxy, Fault, Node, Random,
    cluster::{key, range},
    until,
};

const LIMIT: Duration = Duration::from_secs(20);

/// The most attempts of an application to put one value.
const TRIES: usize = 20;

/// The pause of an application before it puts again.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// The most rounds of new keys: nothing may be evicted.
const ROUNDS_MAX: usize = 3000;

/// How a thread of the application puts.
#[derive(Debug, Clone, Copy)]
enum Way {
    Single,
    Batch,
    Upsert,
    Session,
}

fn upsert() -> PutOptions {
    PutOptions { is_upsert: true, ..PutOptions::default() }
}

/// Joins directly, with a client that waits this long for the master.
fn join_with_timeout(cluster: &Cluster, rpc_timeout: Duration) -> Node {
    let config = ClientConfig { segment_bytes: 16 << 20, rpc_timeout, ..ClientConfig::default() };
    cluster.join_with(config).expect("the client joins")
}

/// Joins over the proxy. Calls time out early, so that many puts are given up.
fn join_over(cluster: &Cluster, cut: &CuttingProxy, rpc_timeout: Duration) -> Node {
    let settings = LinkConfig { may_use_unix_socket: false, ..LinkConfig::default() };
    let config = ClientConfig { segment_bytes: 256 << 20, rpc_timeout, ..ClientConfig::default() };
    until(LIMIT, "the node joins", || {
        let link = SocketLink::new(&cut.address().to_string(), settings.clone())
            .expect("the address is valid");
        cluster.join_by(config.clone(), Arc::new(link)).ok()
    })
}

/// Puts once; `true` for values that were acknowledged.
fn put_once(node: &Node, way: Way, values: &[(String, Vec<u8>)]) -> Vec<Result<PutOutcome>> {
    let memory = node.engine().allocate(64 << 10).expect("64 KiB are free");
    let mut offset = 0;
    let mut ranges = Vec::new();
    let keys: Vec<_> = values.iter().map(|(name, _)| key(name)).collect();
    for (_, value) in values {
        memory.write(offset as u64, value).expect("the value fits");
        ranges.push([range(&memory, offset, value.len())]);
        offset += value.len();
    }
    match way {
        Way::Single | Way::Batch | Way::Upsert => {
            let items = keys.iter().zip(&ranges);
            let items: Vec<_> =
                items.map(|(key, parts)| PutItem { key: key.into(), parts }).collect();
            let is_upsert = matches!(way, Way::Upsert);
            node.client.put(&items, &PutOptions { is_upsert, ..PutOptions::default() })
        }
        Way::Session => {
            let client = &node.client;
            let items: Vec<_> = keys
                .iter()
                .zip(values)
                .map(|(key, (_, v))| (key.clone(), v.len() as u64))
                .collect();
            let begun = client.sessions().begin_writes(&items, &PutOptions::default());
            let end = |at: usize, begun: Result<()>| match begun {
                Err(error) if error.code() == ErrorCode::OBJECT_ALREADY_EXISTS => {
                    Ok(PutOutcome::Existed)
                }
                Err(error) => Err(error),
                Ok(()) => {
                    let parts = [Parts { key: &keys[at], offsets: &[0], memory: &ranges[at] }];
                    let written = client.sessions().write(&parts).remove(0);
                    client.sessions().end_writes(std::slice::from_ref(&keys[at])).remove(0)?;
                    written.map(|_| PutOutcome::Stored { replicas: 1, version: Version(0) })
                }
            };
            begun.into_iter().enumerate().map(|(at, begun)| end(at, begun)).collect()
        }
    }
}

/// Puts until the deadline and returns, by key, the last value that was acknowledged and those that
/// failed after it.
fn put_until(node: &Node, way: Way, end: Instant) -> HashMap<String, (Vec<u8>, Vec<Vec<u8>>)> {
    let mut random = Random::new();
    let mut known: HashMap<String, (Vec<u8>, Vec<Vec<u8>>)> = HashMap::new();
    let mut doubtful: HashMap<String, Vec<Vec<u8>>> = HashMap::new();
    for round in 0.. {
        let is_full = round >= ROUNDS_MAX && !matches!(way, Way::Upsert);
        if Instant::now() > end || is_full {
            break;
        }
        let count = if matches!(way, Way::Batch) { 20 } else { 1 };
        let name = |at: usize| match way {
            Way::Upsert => format!("{way:?}-{}", round % 5),
            _ => format!("{way:?}-{round}-{at}"),
        };
        let mut values: Vec<_> =
            (0..count).map(|at| (name(at), random.bytes(1 + random_length(round, at)))).collect();
        for _ in 0..TRIES {
            let outcomes = put_once(node, way, &values);
            let mut failed = Vec::new();
            for ((name, value), outcome) in values.into_iter().zip(outcomes) {
                if outcome.is_ok() {
                    doubtful.remove(&name);
                    known.insert(name, (value, Vec::new()));
                } else {
                    doubtful.entry(name.clone()).or_default().push(value.clone());
                    failed.push((name, value));
                }
            }
            values = failed;
            if values.is_empty() {
                break;
            }
            // Nothing unparks this thread: it only gives the link time to come back.
            std::thread::park_timeout(RETRY_PAUSE);
        }
    }
    for (name, values) in doubtful {
        if let Some((_, later)) = known.get_mut(&name) {
            later.extend(values);
        }
    }
    known
}

fn random_length(round: usize, at: usize) -> usize {
    (round * 7 + at * 131) % 2000
}

#[test]
fn acknowledged_puts_are_readable_after_cuts() {
    let time = Duration::from_secs(if is_long_run() { 60 } else { 3 });
    let cluster =
        Cluster::start(ClusterSettings { nodes: 0, ..ClusterSettings::default() }).unwrap();
    let cut =
        CuttingProxy::start(cluster.address(), CutRule::MeanBytes(3000), Random::new()).unwrap();
    let node = join_over(&cluster, &cut, Duration::from_millis(150));
    let end = Instant::now() + time;
    let ways = [Way::Single, Way::Batch, Way::Upsert, Way::Session];
    let known: Vec<_> = std::thread::scope(|scope| {
        let node = &node;
        let start = |way| move || put_until(node, way, end);
        let threads: Vec<_> = ways.iter().map(|&way| (way, scope.spawn(start(way)))).collect();
        threads.into_iter().map(|(way, thread)| (way, thread.join().unwrap())).collect()
    });
    assert!(cut.cuts() > 20, "the link was cut only {} times", cut.cuts());
    cut.heal();
    let objects: usize = known.iter().map(|(_, known)| known.len()).sum();
    assert!(objects > 10, "only {objects} objects were put");
    for (way, known) in known {
        for (name, (value, later)) in known {
            let found = until(LIMIT, "the master answers", || match node.get(&name) {
                Err(error) if error.code() == ErrorCode::RPC_TIMEOUT => None,
                Err(error) if error.code() == ErrorCode::RPC_FAIL => None,
                found => Some(found),
            });
            let found = found.unwrap_or_else(|error| panic!("{way:?}, {name}: {error}"));
            let found = found.unwrap_or_else(|| panic!("{name} was acknowledged and is gone"));
            assert!(found == value || later.contains(&found), "{name} has another value");
        }
    }
}

#[test]
fn put_after_an_unconfirmed_one_stores_its_own_value() {
    let cluster = Cluster::start(ClusterSettings::default()).unwrap();
    let node = join_with_timeout(&cluster, Duration::from_millis(200));
    for (name, options) in [("put", PutOptions::default()), ("upsert", upsert())] {
        node.link.inject(usize::MAX, Fault::LoseRequest, |call| {
            matches!(call, Call::PutEnd(_) | Call::PutRevoke(_))
        });
        let put = |value: &[u8]| node.client.put_bytes(&key(name), value, &options);
        assert_eq!(put(b"first").unwrap_err().code(), ErrorCode::RPC_TIMEOUT);
        // The first put cannot be settled yet, so that another one cannot start.
        assert_eq!(put(b"second").unwrap_err().code(), ErrorCode::RPC_TIMEOUT);
        node.link.heal();
        assert!(matches!(put(b"third").unwrap(), PutOutcome::Stored { replicas: 1, .. }));
        assert_eq!(node.get(name).unwrap().unwrap(), b"third");
    }
}

#[test]
fn put_after_a_lost_start_stores_its_own_value() {
    let cluster = Cluster::start(ClusterSettings::default()).unwrap();
    let node = join_with_timeout(&cluster, Duration::from_millis(100));
    node.link.inject(usize::MAX, Fault::LoseAnswer, |call| matches!(call, Call::PutStart(_)));
    assert_eq!(node.put("k", b"first").unwrap_err().code(), ErrorCode::RPC_TIMEOUT);
    node.link.heal();
    assert!(matches!(node.put("k", b"second").unwrap(), PutOutcome::Stored { replicas: 1, .. }));
    assert_eq!(node.get("k").unwrap().unwrap(), b"second");
}

#[test]
fn dropped_reservation_does_not_stand_in_the_way() {
    let cluster =
        Cluster::start(ClusterSettings { nodes: 1, ..ClusterSettings::default() }).unwrap();
    let node = &cluster.nodes[0];
    let options = PutOptions::default();
    let mut reserved = node.client.reserve(&[(key("k"), 3), (key("other"), 3)], &options);
    let other = reserved.pop().unwrap().unwrap();
    assert_eq!(node.put("other", b"abc").unwrap(), PutOutcome::Existed, "it is still reserved");
    drop(reserved);
    assert!(matches!(node.put("k", b"abc").unwrap(), PutOutcome::Stored { replicas: 1, .. }));
    assert_eq!(node.get("k").unwrap().unwrap(), b"abc");
    drop(other);
    until(LIMIT, "dropped reservations are revoked", || {
        let status = node.client.status().ok()?;
        (status.keys == 1).then_some(())
    });
}

#[test]
fn unconfirmed_puts_are_settled_in_the_background() {
    let cluster = Cluster::start(ClusterSettings::default()).unwrap();
    let node = join_with_timeout(&cluster, Duration::from_millis(100));
    node.link.inject(usize::MAX, Fault::LoseRequest, |call| {
        matches!(call, Call::PutEnd(_) | Call::PutRevoke(_))
    });
    assert!(node.put("k", b"value").is_err());
    // The short time limit may also pass on a busy machine.
    let probe = || node.client.exists(&[key("k")], ProbeTerms::default()).remove(0).ok();
    assert!(until(LIMIT, "the master answers", probe).is_some(), "it is unfinished");
    node.link.heal();
    until(LIMIT, "the heartbeat settles it", || probe()?.is_none().then_some(()));
}
