//! The counted calls: a client and a master in this process, joined by the codec of the native
//! protocol, and the state of the master alone.

use std::{sync::Arc, time::Duration};

use bytes::BytesMut;
use mooncake_base::{ClientId, Incarnation, Moment, ObjectKey, SegmentId, TenantId};
use mooncake_benches::callgrind::{Scope, counted};
use mooncake_master::{
    MasterConfig, Origin, Service,
    state::{Put, PutOptions as StatePutOptions, PutRef, Rules, SegmentSpec, Started, State},
};
use mooncake_proto::native_frame::{self, FRAME_BYTES_MAX};
use mooncake_store_client::{
    Client, ClientConfig, InProcessLink, ProbeTerms, PutItem, PutOptions, PutOutcome, Read,
};
use mooncake_transfer_engine::{Engine, EngineConfig, LocalRange};
use prost::Message;
use tokio::runtime::Builder;

use crate::{large_pools, rdma};

/// How many items the counted calls of one kind have in all. Many, since some of what happens to an
/// item is decided by chance: the eviction policy learns from a sample of the keys.
const COUNTED_ITEMS: usize = 4000;

/// How often a call with one item is counted.
const SINGLE_ROUNDS: usize = 400;

/// A call that is counted.
pub(crate) struct Call {
    pub(crate) name: &'static str,
    /// How often the program makes it.
    pub(crate) count: usize,
    pub(crate) scope: Scope,
    /// The most that it may take, if chance decides more than the margin of the reference.
    pub(crate) limit: Option<u64>,
    pub(crate) run: fn(),
}

/// Makes a call with this number of items.
const fn call(name: &'static str, items: usize, run: fn()) -> Call {
    Call { name, count: rounds_of(items), scope: Scope::Calls, limit: None, run }
}

pub(crate) const ALL: [Call; 16] = [
    call("put of 4 KiB", 1, || with_client(|client| puts(client, 1, 4 << 10))),
    call("get of 4 KiB", 1, || with_client(|client| gets(client, 1, 4 << 10))),
    call("exists", 1, || with_client(|client| probes(client, 1))),
    call("put of 1,000 objects of 64 bytes", 1000, || with_client(|client| puts(client, 1000, 64))),
    call("get of 1,000 objects of 64 bytes", 1000, || with_client(|client| gets(client, 1000, 64))),
    call("exists of 1,000 keys", 1000, || with_client(|client| probes(client, 1000))),
    call("state: start of 100 puts", STATE_PUTS, start_puts),
    call("state: end of 100 puts", STATE_PUTS, end_puts),
    avoiding("master: put, 0 of 1,000 peers avoided", large_pools::puts_avoiding_none),
    avoiding("master: put, 250 of 1,000 peers avoided", large_pools::puts_avoiding_quarter),
    Call {
        name: "listener: connection of 1,500 gives way",
        count: large_pools::DISPLACEMENTS,
        scope: Scope::Functions("*ConnectionTable::displace*"),
        // How often the listener looks before one has waited long enough depends on the time.
        limit: Some(6000),
        run: large_pools::displacements,
    },
    Call {
        name: "rdma: 100 slices, by the caller",
        count: rdma::SLICES / 100,
        scope: Scope::CallsWithout("mooncake_verbs::fake::functions::post_send"),
        limit: None,
        run: rdma::transfers,
    },
    to_peers("rdma: 100 slices to 1 peer", rdma::transfers_to_one),
    to_peers("rdma: 100 slices to 10 peers", rdma::transfers_to_ten),
    to_peers("rdma: 100 slices to 1,000 peers", rdma::transfers_to_thousand),
    Call {
        name: "rdma: 100 slices, by the device's thread",
        // The first transfer counts, too.
        count: 2 * rdma::SLICES / 100,
        scope: Scope::Functions("*mooncake_rdma::nic::Nic::complete*"),
        // How many completions the thread finds at once depends on when it runs.
        limit: Some(2500),
        run: rdma::transfers,
    },
];

/// How the names of [`to_peers`] begin.
pub(crate) const TO_PEERS: &str = "rdma: 100 slices to ";

/// Transfers of few slices each, by the calling thread, in turn to peers. How often the caller has to
/// wait for the device's thread differs, and with it the count.
const fn to_peers(name: &'static str, run: fn()) -> Call {
    let scope = Scope::CallsWithout("mooncake_verbs::fake::functions::post_send");
    Call { name, count: rdma::SLICES_IN_TURN / 100, scope, limit: Some(62_500), run }
}

/// Puts of one object each into a large pool.
const fn avoiding(name: &'static str, run: fn()) -> Call {
    Call { name, count: large_pools::PUTS, scope: Scope::Calls, limit: None, run }
}

/// Runs calls of a client whose master is in this process.
fn with_client(run: impl FnOnce(&Client)) {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let master = runtime.block_on(mooncake_master::start(MasterConfig::embedded())).unwrap();
    let engine = EngineConfig { name: "127.0.0.1".to_owned(), ..EngineConfig::default() };
    let engine = Engine::start(engine, runtime.handle().clone()).unwrap();
    let config = ClientConfig { segment_bytes: 64 << 20, ..ClientConfig::default() };
    let client = Client::connect(config, engine, Arc::new(link(master.service()))).unwrap();
    run(&client);
    drop(client);
    runtime.block_on(master.stop());
}

/// A link whose messages are encoded and decoded, as over a socket.
fn link(service: Arc<Service>) -> InProcessLink {
    fn coded<M: Message + Default>(message: &M) -> M {
        let mut wire = BytesMut::new();
        native_frame::encode(message, &mut wire).unwrap();
        native_frame::decode(&mut wire, FRAME_BYTES_MAX).unwrap().unwrap()
    }
    let origin = Origin::in_process();
    InProcessLink::new("here", move |request| {
        Ok(coded(&service.dispatch(coded(&request), &origin)))
    })
}

/// Returns how often a call with this number of items is counted.
const fn rounds_of(items: usize) -> usize {
    let rounds = COUNTED_ITEMS / items;
    if rounds < SINGLE_ROUNDS { rounds } else { SINGLE_ROUNDS }
}

/// Returns the keys of the rounds: the first one is not counted, since it opens what later calls
/// find open.
fn keys_of_rounds(items: usize) -> Vec<Vec<ObjectKey>> {
    let key = |number: usize| ObjectKey::new(format!("{number:064}").into_bytes()).unwrap();
    (0..=rounds_of(items))
        .map(|round| (0..items).map(|item| key(round * items + item)).collect())
        .collect()
}

/// Runs the first round, and counts the others.
fn count_rounds(items: usize, mut call: impl FnMut(&[ObjectKey])) {
    let rounds = keys_of_rounds(items);
    call(&rounds[0]);
    rounds[1..].iter().for_each(|keys| counted(&mut || call(keys)));
}

fn puts(client: &Client, items: usize, bytes: usize) {
    let mut memory = vec![7; items * bytes];
    let ranges = ranges(&mut memory, bytes);
    count_rounds(items, |keys| put(client, keys, &ranges));
}

fn gets(client: &Client, items: usize, bytes: usize) {
    let mut memory = vec![7; items * bytes];
    let ranges = ranges(&mut memory, bytes);
    keys_of_rounds(items).iter().for_each(|keys| put(client, keys, &ranges));
    count_rounds(items, |keys| {
        let located = client.locate(keys);
        let pairs = located.iter().zip(&ranges);
        let reads: Vec<_> =
            pairs.map(|(found, into)| Read::whole(found.as_ref().unwrap(), into)).collect();
        for outcome in client.read(&reads) {
            assert_eq!(outcome.unwrap(), bytes as u64);
        }
    });
}

fn probes(client: &Client, items: usize) {
    let mut memory = vec![7; items];
    let ranges = ranges(&mut memory, 1);
    keys_of_rounds(items).iter().for_each(|keys| put(client, keys, &ranges));
    count_rounds(items, |keys| {
        for status in client.exists(keys, ProbeTerms { takes_lease: true, ..ProbeTerms::default() })
        {
            assert!(status.unwrap().is_some());
        }
    });
}

/// Cuts memory into ranges of this length, for as long as the caller keeps it.
fn ranges(memory: &mut [u8], bytes: usize) -> Vec<[LocalRange; 1]> {
    let range = |part: &mut [u8]| {
        // SAFETY: every caller keeps the memory until its last call has returned, and does not touch
        // it meanwhile.
        [unsafe { LocalRange::held(part.as_mut_ptr(), bytes) }]
    };
    memory.chunks_exact_mut(bytes).map(range).collect()
}

fn put(client: &Client, keys: &[ObjectKey], ranges: &[[LocalRange; 1]]) {
    let parts = keys.iter().zip(ranges);
    let items: Vec<_> = parts.map(|(key, parts)| PutItem { key: key.into(), parts }).collect();
    for outcome in client.put(&items, &PutOptions::default()) {
        assert!(matches!(outcome.unwrap(), PutOutcome::Stored { replicas: 1, .. }));
    }
}

const CLIENT: ClientId = ClientId::from_bits(1);
const NOW: Moment = Moment::from_boot(Duration::from_secs(1000));
const STATE_PUTS: usize = 100;

fn pool() -> State {
    let mut state = State::new(Rules::default(), 1);
    state.register(NOW, CLIENT, "host:1").unwrap();
    let spec = SegmentSpec {
        id: SegmentId::from_bits(1),
        incarnation: Incarnation(1),
        name: "host:1".to_owned(),
        endpoint: "host:1".to_owned(),
        base: 1 << 40,
        length: 1 << 30,
        protocol: "tcp".to_owned(),
    };
    state.mount(NOW, CLIENT, spec).unwrap();
    state
}

fn start_puts() {
    let mut state = pool();
    count_rounds(STATE_PUTS, |keys| {
        start(&mut state, keys);
    });
}

fn end_puts() {
    let mut state = pool();
    let started: Vec<_> =
        keys_of_rounds(STATE_PUTS).iter().map(|keys| start(&mut state, keys)).collect();
    let mut started = started.iter();
    count_rounds(STATE_PUTS, |_| {
        for Started { version, .. } in started.next().unwrap() {
            let put = PutRef { key: b"", version: *version, failed_replicas: &[], checksum: None };
            state.puts().put_end(NOW, CLIENT, &TenantId::default(), put).unwrap();
        }
    });
}

fn start(state: &mut State, keys: &[ObjectKey]) -> Vec<Started> {
    let (tenant, options) = (TenantId::default(), StatePutOptions::default());
    let mut start = |key: &ObjectKey| {
        let put = Put {
            key: key.into(),
            length: 4096,
            group: b"",
            options: &options,
            is_replacing: false,
            if_version: None,
            request: 0,
        };
        state.puts().put_start(NOW, CLIENT, &tenant, put).unwrap()
    };
    keys.iter().map(&mut start).collect()
}
