//! The plan of a run, derived from a seed: its profile, the rules of the master, and fault rates.

mod bug;
mod disks;
mod faults;
mod profile;

use std::time::Duration;

use mooncake_master::{LogSync, OnLogFailure, state::Rules};

use self::profile::Profile;
use crate::random::Random;

pub use self::bug::Bug;
pub(crate) use self::{
    disks::{DiskFaults, DiskPlan},
    faults::Faults,
};

/// Bytes of a word, the smallest unit of simulated memory.
pub(crate) const WORD_BYTES: u64 = 8;

/// The parameters of a run.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The seed of all randomness.
    pub seed: u64,
    /// The planted bug, if any.
    pub bug: Option<Bug>,
    /// True if every event is printed.
    pub is_traced: bool,
    pub(crate) clients: u64,
    pub(crate) workers: u64,
    pub(crate) keys: u64,
    pub(crate) segment_words: u64,
    pub(crate) object_words: u64,
    pub(crate) pause_micros: u64,
    /// The time with operations and faults, before the audit.
    pub(crate) active: Duration,
    /// The number of tenants. More than one have quotas.
    pub(crate) tenants: u64,
    /// The number of groups that objects may belong to.
    pub(crate) groups: u64,
    /// The share of puts with each of the less usual options, per mille.
    pub(crate) optional: u64,
    /// The share of operations that put, per mille.
    pub(crate) puts: u64,
    /// The share of these that put several objects with one call, per mille.
    pub(crate) batches: u64,
    /// The share of writers that pause between two pieces, per mille.
    pub(crate) slow_puts: u64,
    /// The share of segments that leave the pool while their objects are viewed, per mille.
    pub(crate) sweep_views: u64,
    /// The share of operations that request a copy, a move or a drain, per mille.
    pub(crate) task_requests: u64,
    /// The share of operations that describe objects and list them, per mille.
    pub(crate) views: u64,
    /// The number of connections of a client to the master.
    pub(crate) connections: usize,
    /// The time after which a caller stops waiting for a reply.
    pub(crate) call_timeout: Duration,
    /// The largest difference between the clocks of two hosts.
    pub(crate) clock_skew_ms: u64,
    pub(crate) faults: Faults,
    pub(crate) rules: Rules,
    pub(crate) log_sync: LogSync,
    /// What the master does when its log cannot be written.
    pub(crate) on_log_failure: OnLogFailure,
    /// The directories of records, if there are any.
    pub(crate) disks: Option<DiskPlan>,
}

impl Plan {
    /// Derives the plan of a seed.
    pub fn new(seed: u64) -> Self {
        Self::without_disks(seed).with_disks()
    }

    fn without_disks(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0x0009_0f11);
        let profile = match seed % 16 {
            15 => Profile::large(&mut random),
            3 | 7 | 11 => Profile::calm(&mut random),
            _ => Profile::dense(&mut random),
        };
        let tenants = if random.happens(250) { random.between(2, 4) } else { 1 };
        let call_timeout = *random.pick(&[1500, 1500, 5000]).unwrap_or(&1500);
        let views = random.below(150);
        let plan = Self {
            seed,
            bug: None,
            is_traced: false,
            clients: profile.clients,
            workers: profile.workers,
            keys: profile.keys,
            segment_words: profile.segment_words,
            object_words: profile.object_words,
            pause_micros: profile.pause_micros,
            active: profile.active,
            tenants,
            groups: if random.happens(500) { random.between(1, 4) } else { 0 },
            optional: if random.happens(400) { 0 } else { random.below(150) },
            puts: profile.puts,
            batches: 0,
            slow_puts: 0,
            sweep_views: 0,
            task_requests: profile.task_requests,
            views,
            connections: random.between(1, 6) as usize,
            call_timeout: Duration::from_millis(call_timeout),
            clock_skew_ms: 1_000_000,
            faults: Faults::new(seed),
            rules: profile::rules(&mut random, tenants > 1),
            log_sync: LogSync::Always,
            on_log_failure: OnLogFailure::Continue,
            disks: None,
        };
        plan.with_power_losses().with_batches()
    }

    /// Derives the puts of several objects, the slow ones, and the views during sweeps from a generator
    /// of their own.
    fn with_batches(mut self) -> Self {
        let mut random = Random::new(self.seed ^ 0x0ba7_c4e5);
        self.batches = random.between(20, 300);
        self.slow_puts = random.between(10, 120);
        self.sweep_views = random.between(200, 900);
        self
    }

    /// Derives the losses of power from a generator of their own.
    fn with_power_losses(mut self) -> Self {
        let mut random = Random::new(self.seed ^ 0x0dd_ba11);
        let interval = LogSync::Interval(Duration::from_millis(random.between(20, 1500)));
        let kinds = [LogSync::Always, interval, interval, LogSync::Never];
        self.log_sync = *random.pick(&kinds).unwrap_or(&interval);
        if random.happens(600) {
            self.faults.power_loss = random.below(800);
            self.faults.damage = random.below(100);
        }
        if random.happens(400) {
            self.on_log_failure = OnLogFailure::Stop;
        }
        self
    }

    pub(crate) fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// Returns whether heartbeats have a connection of their own.
    pub(crate) fn has_heartbeat_connection(&self) -> bool {
        !self.has(Bug::HeartbeatsShareConnections)
    }

    /// Returns the quota of a tenant in bytes: less than the pool for some.
    pub(crate) fn quota_of(&self, tenant: u64) -> u64 {
        let pool = self.clients * self.segment_words * WORD_BYTES;
        (pool * (2 + tenant) / 4).max(1)
    }
}
