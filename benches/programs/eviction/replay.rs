//! Replays one trace against one eviction policy, through the calls that a client makes.

use std::{
    collections::{BinaryHeap, HashMap},
    time::Duration,
};

use mooncake_base::{ClientId, Incarnation, KeyRef, Moment, SegmentId, TenantId};
use mooncake_master::state::{
    EvictionKind, LocateOptions, ObjectState, Put, PutOptions, PutRef, Rules, SegmentSpec, State,
};

use super::Request;

const CLIENT: ClientId = ClientId::from_bits(1);
/// The size of a block in the pool.
const BLOCK_BYTES: u64 = 4096;
/// The time between two calls: longer than a lease, so that leases do not affect eviction.
const STEP: Duration = Duration::from_millis(2);
/// The most blocks that a client puts before another client continues.
const PUTS_PER_STEP: usize = 8;

/// Returns the hit rate. Several clients take requests from the same list and interleave: while one
/// client puts the blocks that it missed, others probe and put.
pub(super) fn replay(
    requests: &[Request],
    blocks: usize,
    clients: usize,
    kind: EvictionKind,
) -> f64 {
    let mut pool = Pool::new(blocks, kind);
    let (mut hits, mut total) = (0, 0);
    let mut missing: Vec<Vec<u32>> = vec![Vec::new(); clients];
    let mut turn = 0_usize;
    let mut requests = requests.iter();
    loop {
        // Pseudo-random, so that the interleaving does not correlate with a pattern of the trace.
        turn = turn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let at = (turn >> 33) % clients;
        if missing[at].is_empty() {
            let Some(request) = requests.next() else { break };
            let held = pool.probe(request);
            let prefix = held.iter().take_while(|is_held| **is_held).count();
            (hits, total) = (hits + prefix, total + request.len());
            if let Some(last) = prefix.checked_sub(1) {
                pool.read(request[last]);
            }
            let missed = request.iter().zip(&held).filter(|(_, is_held)| !**is_held);
            missing[at] = missed.map(|(block, _)| *block).rev().collect();
        } else {
            let first = missing[at].len().saturating_sub(PUTS_PER_STEP);
            for block in missing[at].split_off(first).into_iter().rev() {
                pool.put(block);
            }
        }
    }
    hits as f64 / total.max(1) as f64
}

/// Returns the hit rate of Belady's optimum, which evicts the block with the latest next use.
pub(super) fn optimum(requests: &[Request], blocks: usize) -> f64 {
    let uses: Vec<u32> = requests.iter().flatten().copied().collect();
    let mut next = vec![usize::MAX; uses.len()];
    let mut last = HashMap::new();
    for (index, block) in uses.iter().enumerate().rev() {
        next[index] = last.insert(*block, index).unwrap_or(usize::MAX);
    }
    let mut held: HashMap<u32, usize> = HashMap::new();
    let mut queue = BinaryHeap::new();
    let mut hits = 0;
    for (index, block) in uses.iter().enumerate() {
        if held.insert(*block, next[index]).is_some() {
            hits += 1;
        } else {
            while held.len() > blocks {
                let Some((wanted, other)) = queue.pop() else { break };
                if held.get(&other) == Some(&wanted) {
                    held.remove(&other);
                }
            }
        }
        queue.push((next[index], *block));
    }
    f64::from(hits) / uses.len().max(1) as f64
}

/// A state machine with one segment, and its clock.
struct Pool {
    state: State,
    now: Moment,
    tenant: TenantId,
    options: PutOptions,
}

impl Pool {
    fn new(blocks: usize, eviction: EvictionKind) -> Self {
        let now = Moment::from_boot(Duration::from_secs(1000));
        let rules = Rules {
            eviction,
            lease_ttl: Duration::from_millis(1),
            client_ttl: Duration::from_secs(1 << 30),
            ..Rules::default()
        };
        let mut state = State::new(rules, 1);
        let segment = SegmentSpec {
            id: SegmentId::from_bits(1),
            incarnation: Incarnation(1),
            name: "host:1".to_owned(),
            endpoint: "host:1".to_owned(),
            base: 0,
            length: blocks as u64 * BLOCK_BYTES,
            protocol: "tcp".to_owned(),
        };
        state
            .register(now, CLIENT, "host:1")
            .and_then(|()| state.mount(now, CLIENT, segment))
            .expect("an empty pool accepts a client and its segment");
        Self { state, now, tenant: TenantId::default(), options: PutOptions::default() }
    }

    /// Returns for each block whether it is in the pool.
    fn probe(&mut self, request: &[u32]) -> Vec<bool> {
        self.now = self.now + STEP;
        let mut is_held = |block: &u32| {
            let probed = self.state.probe(self.now, &self.tenant, &block.to_le_bytes(), true);
            probed.state == ObjectState::Complete
        };
        request.iter().map(&mut is_held).collect()
    }

    fn read(&mut self, block: u32) {
        self.now = self.now + STEP;
        let grant = LocateOptions { has_lease: true, has_fence: false };
        self.state.locate(self.now, &self.tenant, &[block.to_le_bytes()], grant);
    }

    /// Puts a block. The block may exist already if another client was faster; any other failure is a
    /// bug.
    fn put(&mut self, block: u32) {
        self.now = self.now + STEP;
        let named = block.to_le_bytes();
        let key = KeyRef::new(&named).expect("four bytes are a key");
        let put = Put {
            key,
            length: BLOCK_BYTES,
            group: b"",
            options: &self.options,
            is_replacing: false,
            if_version: None,
            request: 0,
        };
        let started = match self.state.puts().put_start(self.now, CLIENT, &self.tenant, put) {
            Ok(started) => started,
            Err(error) => {
                let is_there = error.code() == mooncake_base::ErrorCode::OBJECT_ALREADY_EXISTS;
                assert!(is_there, "a put failed: {error}");
                return;
            }
        };
        let put =
            PutRef { key: &named, version: started.version, failed_replicas: &[], checksum: None };
        self.state
            .puts()
            .put_end(self.now, CLIENT, &self.tenant, put)
            .expect("the put was started");
    }
}
