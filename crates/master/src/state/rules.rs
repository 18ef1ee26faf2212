//! The numbers the rules go by.

use std::time::Duration;

/// How fast a reader is taken to be at the least, when a fence is sized.
const FENCE_BYTES_PER_SECOND: u64 = 256 << 20;
/// What every fence lasts, however few bytes it covers: a round trip and a pause of the reader. A
/// reader that needs longer asks once more, which costs less than memory that rests for long.
const FENCE_BASE: Duration = Duration::from_millis(250);
/// What a write that began inside its window may take longer.
const WRITE_MARGIN: Duration = Duration::from_secs(2);
/// A pause of the master that is not longer is none.
const STALL_MIN: Duration = Duration::from_millis(500);
/// No fence lasts longer. A reader that needs more asks afterwards whether its replica stands.
const FENCE_MAX: Duration = Duration::from_secs(60);

/// Settings of the rules, a documented default each.
#[derive(Debug, Clone, PartialEq)]
pub struct Rules {
    /// After this long without a heartbeat a client counts as gone.
    pub client_ttl: Duration,
    /// How long a retention lease lasts from the last read or probe.
    pub lease_ttl: Duration,
    /// How long a soft pin lasts when the put names no time.
    pub soft_pin_ttl: Duration,
    /// The longest soft pin that a put may ask for.
    pub soft_pin_ttl_max: Duration,
    /// Whether soft-pinned objects are evicted once nothing else is left.
    pub is_soft_pin_evictable: bool,
    /// No byte may be written later than this after a put started. Below `put_discard`.
    pub write_window: Duration,
    /// An unfinished put older than this may be displaced by another put of its key.
    pub put_discard: Duration,
    /// Space of an unfinished put is given to others this long after its start, not sooner,
    /// unless its writer is known to be dead.
    pub put_release: Duration,
    /// How long after a restart calls wait for the owners of what the log knows.
    pub resume_grace: Duration,
    /// How long after a restart memory that nobody has announced is kept.
    pub unclaimed_ttl: Duration,
    /// Evict ahead of need; `None`: only when a put needs the room.
    pub watermark: Option<Watermark>,
    /// Which segment a copy goes to.
    pub allocation: AllocationStrategy,
    /// Which object goes first.
    pub eviction: EvictionKind,
    /// Limits of copies and moves.
    pub tasks: TaskRules,
    /// Only tenants with a quota may write, and no more than that.
    pub is_multi_tenant: bool,
}

/// Limits of the copies and moves that clients carry out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskRules {
    /// Finished ones that are remembered.
    pub finished_max: usize,
    /// The most that may wait.
    pub pending_max: usize,
    /// The most that may run.
    pub processing_max: usize,
    /// How long one may wait; zero: for ever.
    pub pending_timeout: Duration,
    /// How long one may run, all tries together; zero: for ever.
    pub processing_timeout: Duration,
    /// How often one is tried again.
    pub retries_max: u32,
}

impl Default for TaskRules {
    fn default() -> Self {
        Self {
            finished_max: 10_000,
            pending_max: 10_000,
            processing_max: 10_000,
            pending_timeout: Duration::from_secs(300),
            processing_timeout: Duration::from_secs(300),
            retries_max: 10,
        }
    }
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            client_ttl: Duration::from_secs(10),
            lease_ttl: Duration::from_secs(10),
            soft_pin_ttl: Duration::from_secs(30 * 60),
            soft_pin_ttl_max: Duration::from_secs(24 * 60 * 60),
            is_soft_pin_evictable: true,
            write_window: Duration::from_secs(20),
            put_discard: Duration::from_secs(30),
            put_release: Duration::from_secs(600),
            resume_grace: Duration::from_secs(5),
            unclaimed_ttl: Duration::from_secs(30),
            watermark: None,
            allocation: AllocationStrategy::Random,
            eviction: EvictionKind::default(),
            tasks: TaskRules::default(),
            is_multi_tenant: false,
        }
    }
}

impl Rules {
    /// How long memory is fenced for a reader of so many bytes: 250 ms and the time the bytes take
    /// at 256 MiB/s, at most 60 s.
    pub fn fence(&self, bytes: u64) -> Duration {
        let seconds = bytes as f64 / FENCE_BYTES_PER_SECOND as f64;
        FENCE_MAX.min(FENCE_BASE + Duration::from_secs_f64(seconds.min(FENCE_MAX.as_secs_f64())))
    }

    /// A master that did not look at the time for longer than this was stopped.
    pub(super) fn stall(&self) -> Duration {
        STALL_MIN.max(self.client_ttl / 5)
    }

    /// The longest fence there may be.
    pub(super) fn fence_max(&self) -> Duration {
        FENCE_MAX
    }

    /// How long after its start a writer that keeps its window cannot touch its memory any more.
    pub(crate) fn write_end(&self) -> Duration {
        self.write_window + WRITE_MARGIN
    }
}

/// Eviction ahead of need, in shares of the capacity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Watermark {
    /// Eviction starts when more than this share is used.
    pub high: f64,
    /// And goes on until the use has fallen this much below.
    pub ratio: f64,
}

/// Which segment a copy goes to, preferred segments aside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AllocationStrategy {
    /// Any, all alike.
    #[default]
    Random,
    /// The emptiest of a sample.
    FreeRatioFirst,
    /// The writer's host first, then the hosts after it by name. For single copies.
    LocalFirst,
    /// Segments of CXL memory, then any.
    CxlFirst,
    /// The one whose owner has the most room on its disk; by memory where no disk is reported.
    SsdFreeRatioFirst,
}

/// Which object is evicted first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EvictionKind {
    /// The one that was not used for the longest time; those seen more often later, as far as that
    /// is found to serve.
    #[default]
    Adaptive,
    /// The one that was not used for the longest time.
    Lru,
    /// Newcomers that were not used again first; resists scans.
    S3Fifo,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fence_grows_with_the_bytes_up_to_its_limit() {
        let rules = Rules::default();
        assert_eq!(rules.fence(0), Duration::from_millis(250));
        assert_eq!(rules.fence(512 << 20), Duration::from_millis(2250));
        assert_eq!(rules.fence(u64::MAX), Duration::from_secs(60));
    }

    #[test]
    fn a_writer_stops_before_its_put_may_be_displaced() {
        let rules = Rules::default();
        assert!(rules.write_end() < rules.put_discard && rules.put_discard < rules.put_release);
    }
}
