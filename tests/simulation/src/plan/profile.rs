//! Profiles: the sizes of a run, and the rules of its master.

use std::time::Duration;

use mooncake_master::state::{EvictionKind, Rules, TaskRules, Watermark};

use crate::random::Random;

/// How large a run is.
#[derive(Debug, Clone)]
pub(crate) struct Profile {
    pub(crate) clients: u64,
    pub(crate) workers: u64,
    pub(crate) keys: u64,
    pub(crate) object_words: u64,
    pub(crate) segment_words: u64,
    /// The time with operations and faults, before the audit.
    pub(crate) active: Duration,
    /// The share of operations that put, per mille.
    pub(crate) puts: u64,
    /// The share of operations that request a copy, a move or a drain, per mille.
    pub(crate) task_requests: u64,
    /// The longest pause of a worker between two operations.
    pub(crate) pause_micros: u64,
}

impl Profile {
    /// Few clients, keys and objects, so that operations meet each other often.
    pub(crate) fn dense(random: &mut Random) -> Self {
        let object_words = random.between(1, 64);
        Self {
            clients: random.between(2, 5),
            workers: random.between(1, 4),
            keys: random.between(1, 24),
            object_words,
            segment_words: object_words * random.between(3, 24),
            active: Duration::from_secs(random.between(5, 25)),
            puts: 450,
            task_requests: random.between(20, 150),
            pause_micros: 60_000,
        }
    }

    /// Objects that stay for long, and are copied and moved again and again.
    pub(crate) fn calm(random: &mut Random) -> Self {
        let object_words = random.between(1, 32);
        Self {
            clients: random.between(3, 6),
            workers: random.between(1, 3),
            keys: random.between(4, 24),
            object_words,
            segment_words: object_words * random.between(20, 40),
            active: Duration::from_secs(random.between(15, 30)),
            puts: 60,
            task_requests: random.between(300, 600),
            pause_micros: 100_000,
        }
    }

    /// Many clients and keys: sweeps in slices, large groups, many holders.
    pub(crate) fn large(random: &mut Random) -> Self {
        let object_words = random.between(1, 16);
        Self {
            clients: random.between(10, 24),
            workers: random.between(1, 3),
            keys: random.between(200, 3000),
            object_words,
            segment_words: object_words * random.between(60, 200),
            active: Duration::from_secs(random.between(3, 6)),
            puts: 450,
            task_requests: 60,
            pause_micros: 40_000,
        }
    }
}

/// Returns rules with short times, so that a short run covers much. `put_discard` and `put_release`
/// must be longer than the write window, the latter also than that and the stop of a process.
pub(crate) fn rules(random: &mut Random, is_multi_tenant: bool) -> Rules {
    let kinds = [EvictionKind::Adaptive, EvictionKind::Lru, EvictionKind::S3Fifo];
    let window = Duration::from_millis(random.between(500, 4000));
    let client_ttl = Duration::from_millis(random.between(1000, 6000));
    Rules {
        client_ttl,
        stop_max: client_ttl,
        lease_ttl: Duration::from_millis(random.between(1, 2000)),
        write_window: window,
        put_discard: window + Duration::from_millis(2100),
        put_release: window + client_ttl + Duration::from_millis(2100 + random.below(4000)),
        resume_grace: Duration::from_millis(random.between(100, 3000)),
        unclaimed_ttl: Duration::from_millis(random.between(3000, 10_000)),
        eviction: *random.pick(&kinds).unwrap_or(&EvictionKind::Adaptive),
        watermark: random.happens(250).then(|| Watermark {
            high: random.between(30, 95) as f64 / 100.0,
            ratio: random.between(5, 30) as f64 / 100.0,
        }),
        is_multi_tenant,
        soft_pin_ttl: Duration::from_secs(random.between(1, 20)),
        booted: Duration::from_secs(1_700_000_000),
        tasks: TaskRules {
            pending_timeout: Duration::from_millis(random.between(3000, 20_000)),
            processing_timeout: Duration::from_millis(random.between(3000, 20_000)),
            retries_max: random.below(5) as u32,
            ..TaskRules::default()
        },
        ..Rules::default()
    }
}
