//! Tests of the state, called as the service calls it, with a manual clock.

mod annotations;
mod disks;
mod events;
mod evicted_to_disk;
mod groups;
mod handed_rest;
mod holds;
mod model;
mod moves;
mod noted_leases;
mod pool;
mod prepared;
mod promotions;
mod puts;
mod reads;
mod recovery;
mod released;
mod repeated_calls;
mod searches;
mod task_records;
mod tasks;
mod tenants;
mod unsynced;

use std::time::Duration;

use mooncake_base::{
    ClientId, Error, ErrorCode, Incarnation, JobId, KeyRef, Moment, ReplicaId, Result, SegmentId,
    TaskId, TenantId,
};

use crate::state::*;

const MIB: u64 = 1 << 20;
/// Two clients.
const A: ClientId = ClientId::from_bits(1);
const B: ClientId = ClientId::from_bits(2);

/// A pool and its clock.
struct Pool {
    state: State,
    now: Moment,
    tenant: TenantId,
}

impl Pool {
    /// Creates clients A and B, and a segment of `mib` MiB owned by A.
    fn new(mib: u64) -> Self {
        Self::with(Rules::default(), mib)
    }

    fn with(rules: Rules, mib: u64) -> Self {
        let now = Moment::from_boot(Duration::from_secs(1000));
        let mut pool = Self { state: State::new(rules, 42), now, tenant: TenantId::default() };
        pool.state.register(now, A, "host-a:1").unwrap();
        pool.state.register(now, B, "host-b:1").unwrap();
        pool.mount(A, 1, mib).unwrap();
        pool
    }

    fn mount(&mut self, client: ClientId, id: u128, mib: u64) -> Result<()> {
        self.state.mount(self.now, client, spec(client, id, 1, mib))
    }

    /// Advances the clock, sends heartbeats of the clients, and runs the timers.
    fn wait(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.now = self.now + Duration::from_secs(1);
            self.state.heartbeat(self.now, A);
            self.state.heartbeat(self.now, B);
            self.advance_all();
        }
    }

    fn advance_all(&mut self) {
        while self.state.advance(self.now).is_some_and(|due| due <= self.now) {}
    }

    fn start(&mut self, client: ClientId, key: &str, length: u64) -> Result<Started> {
        self.start_with(client, key, length, false, &PutOptions::default())
    }

    fn start_with(
        &mut self,
        client: ClientId,
        key: &str,
        length: u64,
        is_replacing: bool,
        options: &PutOptions,
    ) -> Result<Started> {
        let put = Put {
            key: KeyRef::new(key.as_bytes()).unwrap(),
            length,
            group: key.split_once('/').map_or("", |(group, _)| group).as_bytes(),
            options,
            is_replacing,
            if_version: None,
            request: 0,
        };
        self.state.puts().put_start(self.now, client, &self.tenant, put)
    }

    fn end(&mut self, client: ClientId, key: &str, started: &Started) -> Result<()> {
        let put = PutRef {
            key: key.as_bytes(),
            version: started.version,
            failed_replicas: &[],
            checksum: Some(7),
        };
        self.state.puts().put_end(self.now, client, &self.tenant, put)
    }

    fn revoke(&mut self, client: ClientId, key: &str, started: &Started) -> Result<()> {
        let put = PutRef {
            key: key.as_bytes(),
            version: started.version,
            failed_replicas: &[],
            checksum: None,
        };
        self.state.puts().put_revoke(self.now, client, &self.tenant, put)
    }

    fn renew(&mut self, client: ClientId, started: &Started) -> Result<()> {
        let put = PutRef::of(started.version);
        self.state.puts().put_renew(self.now, client, &self.tenant, put)
    }

    fn put(&mut self, key: &str, length: u64) -> Result<Started> {
        self.put_with(key, length, false, &PutOptions::default())
    }

    fn put_with(
        &mut self,
        key: &str,
        length: u64,
        is_replacing: bool,
        options: &PutOptions,
    ) -> Result<Started> {
        let started = self.start_with(A, key, length, is_replacing, options)?;
        self.end(A, key, &started)?;
        Ok(started)
    }

    /// Does a part of a put, which may stay pending.
    fn step(&mut self, key: &str, length: u64, progress: &mut PutProgress) -> Result<PutStep> {
        let put = Put {
            key: KeyRef::new(key.as_bytes()).unwrap(),
            length,
            group: b"",
            options: &PutOptions::default(),
            is_replacing: false,
            if_version: None,
            request: 0,
        };
        self.state.puts().put_step(self.now, A, &self.tenant, &put, progress)
    }

    fn upsert(&mut self, key: &str, length: u64) -> Result<Started> {
        self.put_with(key, length, true, &PutOptions::default())
    }

    fn locate(&mut self, key: &str, has_lease: bool, has_fence: bool) -> Result<LocatedObject> {
        let grant = LocateOptions { has_lease, has_fence };
        self.state.locate(self.now, &self.tenant, &[key], grant).objects.pop().unwrap()
    }

    fn remove(&mut self, key: &str, is_forced: bool) -> Result<()> {
        self.state.remove(self.now, &self.tenant, key.as_bytes(), is_forced)
    }

    fn probe(&mut self, key: &str) -> ObjectState {
        self.state.probe(self.now, &self.tenant, key.as_bytes(), false).state
    }

    fn exists(&mut self, key: &str) -> bool {
        self.probe(key) == ObjectState::Complete
    }

    fn list(&self, selector: Selector, after: Option<&str>, limit: usize) -> (Vec<String>, bool) {
        let after = after.map(str::as_bytes);
        let mut listing = Listing::new(self.tenant.clone(), selector, after, limit);
        while !self.state.list_objects(&mut listing) {}
        let page = listing.into_page();
        let names = page
            .objects
            .iter()
            .map(|object| String::from_utf8(object.key.as_bytes().to_vec()).unwrap());
        (names.collect(), page.is_last)
    }
}

/// The time from the start of a write to the end of a stop of its holder that goes unnoticed.
fn late_end() -> Duration {
    let rules = Rules::default();
    rules.write_end() + rules.client_ttl
}

fn spec(client: ClientId, id: u128, incarnation: u64, mib: u64) -> SegmentSpec {
    let host = if client == A { "host-a:1" } else { "host-b:1" };
    SegmentSpec {
        id: SegmentId::from_bits(id),
        incarnation: Incarnation(incarnation),
        name: host.to_owned(),
        endpoint: host.to_owned(),
        base: (id as u64) << 40,
        length: mib * MIB,
        protocol: "tcp".to_owned(),
    }
}

#[track_caller]
fn fails<T: std::fmt::Debug>(result: Result<T>, code: ErrorCode) -> Error {
    let error = result.unwrap_err();
    assert_eq!(error.code(), code, "{error}");
    error
}
