//! Parameters of the rules.

use std::time::Duration;

use mooncake_base::Moment;

/// Lowest read rate assumed when a fence is sized.
const FENCE_BYTES_PER_SECOND: u64 = 256 << 20;

/// Minimum length of a fence: a round trip and a pause of the reader. A reader that needs longer
/// locates again, which costs less than long quarantines.
const FENCE_BASE: Duration = Duration::from_millis(250);

/// Extra time of a write that started inside its window.
const WRITE_MARGIN: Duration = Duration::from_secs(2);

/// Shorter pauses of the master are ignored.
const STALL_MIN: Duration = Duration::from_millis(500);

/// Maximum length of a fence. A slower reader verifies its replica after the read.
const FENCE_MAX: Duration = Duration::from_secs(60);

/// Parameters of the rules; each has a documented default.
#[derive(Debug, Clone, PartialEq)]
pub struct Rules {
    /// A client without a heartbeat for this long has expired.
    pub client_ttl: Duration,
    /// Longest time for which a process may be stopped and not expire: `client_ttl` or more. The
    /// memory of a write that failed is reused only after a stop of this length cannot delay its
    /// bytes any more.
    pub stop_max: Duration,
    /// Length of a retention lease from the last read or probe.
    pub lease_ttl: Duration,
    /// Length of a soft pin if the put names none.
    pub soft_pin_ttl: Duration,
    /// Maximum length of a soft pin.
    pub soft_pin_ttl_max: Duration,
    /// Allow evicting soft-pinned objects, after all others.
    pub is_soft_pin_evictable: bool,
    /// Time from the start of a put within which its bytes must be written. Below `put_discard`.
    pub write_window: Duration,
    /// An unfinished put older than this may be displaced by another put of its key.
    pub put_discard: Duration,
    /// The memory of an unfinished put is freed this long after its start, not sooner, unless its
    /// writer is known to be dead. Not below [`late_end`](Self::late_end).
    pub put_release: Duration,
    /// Time after a restart during which calls wait for the owners of unclaimed segments.
    pub resume_grace: Duration,
    /// Time after a restart before unclaimed segments are dropped.
    pub unclaimed_ttl: Duration,
    /// Eviction ahead of need; `None`: evict only when a put needs memory.
    pub watermark: Option<Watermark>,
    /// Placement of replicas.
    pub allocation: AllocationStrategy,
    /// Order of eviction.
    pub eviction: EvictionKind,
    /// Limits of tasks.
    pub tasks: TaskRules,
    /// Allow writes only to tenants with a quota, up to the quota.
    pub is_multi_tenant: bool,
    /// Maximum number of mounted segments of a client.
    pub segments_per_client_max: usize,
    /// Maximum number of objects of a tenant, unfinished ones included.
    pub objects_per_tenant_max: u64,
    /// Maximum number of unfinished puts of a client.
    pub unfinished_puts_per_client_max: u64,
    /// The disk tier; `None`: objects are in memory only.
    pub offload: Option<OffloadRules>,
    /// How objects come back from disks.
    pub promotion: PromotionRules,
    /// Time for which the copies on a disk that nobody has open are kept, hidden.
    pub disk_away_ttl: Duration,
    /// When the machine was booted, since 1970. The log has the expiry of objects in this time, so
    /// that they also expire after a restart on another machine.
    pub booted: Duration,
}

/// How objects get to disks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OffloadRules {
    /// Maximum number of objects that wait to be written.
    pub queue_max: usize,
    /// Whether records that no object is known for become objects.
    pub adopts_records: bool,
    /// Whether objects are written when they are evicted, and not when they are put.
    pub is_on_eviction: bool,
    /// Whether eviction drops objects for which too many others wait. Otherwise the puts that need
    /// their memory wait, too.
    pub drops_when_full: bool,
    /// Maximum number of objects that wait because of eviction.
    pub moves_max: usize,
}

impl Default for OffloadRules {
    fn default() -> Self {
        Self {
            queue_max: 50_000,
            adopts_records: false,
            is_on_eviction: false,
            drops_when_full: false,
            moves_max: 25_000,
        }
    }
}

/// How objects come back from disks to memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromotionRules {
    /// Maximum number of objects that wait.
    pub queue_max: usize,
    /// Number of reads within a minute that bring an object back; `None`: reads never do.
    pub hits_min: Option<u8>,
}

impl Default for PromotionRules {
    fn default() -> Self {
        Self { queue_max: 50_000, hits_min: None }
    }
}

/// Limits of the copy and move tasks that clients carry out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskRules {
    /// Finished tasks that are remembered.
    pub finished_max: usize,
    /// Maximum number of waiting tasks.
    pub pending_max: usize,
    /// Maximum number of running tasks.
    pub processing_max: usize,
    /// Maximum wait of a task; zero: no limit.
    pub pending_timeout: Duration,
    /// Maximum run time of a task, all attempts together; zero: no limit.
    pub processing_timeout: Duration,
    /// Maximum number of retries of a task.
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
            stop_max: Duration::from_secs(10),
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
            // A client lends a few large segments. The limit bounds the work of one mount message,
            // and of the expiry of one client, to some milliseconds.
            segments_per_client_max: 1024,
            objects_per_tenant_max: 100_000_000,
            unfinished_puts_per_client_max: 1_000_000,
            offload: None,
            promotion: PromotionRules::default(),
            disk_away_ttl: Duration::from_secs(24 * 60 * 60),
            booted: Duration::ZERO,
        }
    }
}

impl Rules {
    /// Returns the time since 1970 at a moment.
    pub(in crate::state) fn unix_time(&self, at: Moment) -> Duration {
        self.booted.saturating_add(at.since_boot())
    }

    /// Returns the moment of a time since 1970; of one before boot, the moment of boot.
    pub(in crate::state) fn moment_of(&self, unix_time: Duration) -> Moment {
        Moment::from_boot(unix_time.saturating_sub(self.booted))
    }

    /// Returns the length of a fence for a read of that many bytes: 250 ms and the time of the
    /// bytes at 256 MiB/s, at most 60 s.
    pub fn fence(&self, bytes: u64) -> Duration {
        let seconds = bytes as f64 / FENCE_BYTES_PER_SECOND as f64;
        FENCE_MAX.min(FENCE_BASE + Duration::from_secs_f64(seconds.min(FENCE_MAX.as_secs_f64())))
    }

    /// Returns the shortest gap between two calls of `advance` that counts as a stall.
    pub(in crate::state) fn stall(&self) -> Duration {
        STALL_MIN.max(self.client_ttl / 5)
    }

    /// Returns the length of the longest fence.
    pub(in crate::state) fn fence_max(&self) -> Duration {
        FENCE_MAX
    }

    /// Returns the time from the start of a put after which a writer that respects its write
    /// window can no longer write.
    pub fn write_end(&self) -> Duration {
        self.write_window + WRITE_MARGIN
    }

    /// Returns the time from the start of a write after which no byte of it can arrive, although a
    /// process was stopped in between: the writer within a copy, or the holder, whose system has taken
    /// bytes that the process has not read.
    pub fn late_end(&self) -> Duration {
        self.write_end() + self.stop_max
    }
}

/// Eviction ahead of need, in shares of the capacity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Watermark {
    /// Share of used memory above which eviction starts.
    pub high: f64,
    /// Share below `high` at which eviction stops.
    pub ratio: f64,
}

/// Segment of a replica, apart from preferred segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AllocationStrategy {
    /// Any, with equal chances.
    #[default]
    Random,
    /// The emptiest segment of a sample.
    FreeRatioFirst,
    /// The writer's host first, then the hosts after it by name. Only for single replicas.
    LocalFirst,
    /// Segments of CXL memory, then any.
    CxlFirst,
    /// The segment whose owner has the most free space on disk; by memory where no disk is
    /// reported.
    SsdFreeRatioFirst,
}

/// Object that is evicted first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EvictionKind {
    /// The least recently used object; objects seen more often stay longer where that raises the
    /// hit rate.
    #[default]
    Adaptive,
    /// The least recently used object.
    Lru,
    /// New objects that were not used again; resists scans.
    S3Fifo,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fence_grows_with_bytes_up_to_its_limit() {
        let rules = Rules::default();
        assert_eq!(rules.fence(0), Duration::from_millis(250));
        assert_eq!(rules.fence(512 << 20), Duration::from_millis(2250));
        assert_eq!(rules.fence(u64::MAX), Duration::from_secs(60));
    }

    #[test]
    fn write_window_ends_before_displacement() {
        let rules = Rules::default();
        assert!(rules.write_end() < rules.put_discard && rules.put_discard < rules.put_release);
        assert!(rules.late_end() < rules.put_release);
    }
}
