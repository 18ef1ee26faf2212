//! Counts of events since the start.

/// Counts of events since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Puts that found too little free memory at first.
    pub evictions_attempted: u64,
    /// Puts among them that succeeded by evicting.
    pub evictions_succeeded: u64,
    /// Objects evicted.
    pub evicted_keys: u64,
    /// Evicted bytes, all replicas counted.
    pub evicted_bytes: u64,
    /// Objects removed because their time to live was over.
    pub objects_expired: u64,
    /// Evicted objects of which a client that asked for the SSD tier had a replica.
    pub offloads_missed: u64,
    /// Objects written to disks, again after a restart of an owner included.
    pub offloads_done: u64,
    /// Their bytes.
    pub offloaded_bytes: u64,
    /// Objects that no disk took because too many were waiting.
    pub offloads_refused: u64,
    /// Objects that no disk could write.
    pub offloads_failed: u64,
    /// Objects that were evicted without a copy on disk, although the pool had disks.
    pub evicted_without_disk: u64,
    /// How often puts waited until disks had taken evicted objects over.
    pub waits_for_disks: u64,
    /// Copies on disk that were dropped for others, or were damaged.
    pub disk_copies_lost: u64,
    /// Records of an earlier master that became objects.
    pub records_adopted: u64,
    /// Objects that were to be brought into memory because they were asked for or read often.
    pub promotions_admitted: u64,
    /// Objects among them that came into memory.
    pub promotions_done: u64,
    /// Their bytes.
    pub promoted_bytes: u64,
    /// Objects that could not be read from disk, or not be written to memory.
    pub promotions_failed: u64,
    /// Objects whose disk was too slow to begin, or to write them.
    pub promotions_expired: u64,
    /// Objects that were removed or replaced, or lost their disk meanwhile.
    pub promotions_cancelled: u64,
    /// Objects that were not brought into memory because too many waited.
    pub promotions_refused: u64,
    /// Objects for which there was no memory.
    pub promotions_without_room: u64,
    /// Reads from disk that were too few to bring the object into memory.
    pub promotions_too_few_hits: u64,
    /// Objects whose reads from disk were counted.
    pub promotion_candidates: u64,
    /// Objects among them that were read often enough.
    pub promotion_candidates_admitted: u64,
    /// Objects whose reads were not counted because those of too many are.
    pub promotion_candidates_dropped: u64,
    /// Objects that were not read often enough in time.
    pub promotion_candidates_expired: u64,
    /// Puts refused because no memory could be freed.
    pub puts_without_room: u64,
    /// Puts refused because their tenant has too many objects, or their client too many unfinished
    /// puts.
    pub puts_over_count: u64,
    /// Puts that got fewer replicas than requested.
    pub puts_with_fewer_copies: u64,
    /// Unfinished puts displaced by another writer or by the loss of their client.
    pub puts_displaced: u64,
    /// Unfinished puts whose memory was taken back after the release timeout.
    pub puts_released: u64,
    /// Clients whose heartbeats stopped.
    pub clients_expired: u64,
    /// Copy and move tasks that succeeded.
    pub tasks_done: u64,
    /// Copy and move tasks that failed permanently.
    pub tasks_failed: u64,
    /// Drains that emptied their segments.
    pub drains_done: u64,
    /// Drains that failed.
    pub drains_failed: u64,
    /// Drains that were cancelled.
    pub drains_cancelled: u64,
}

impl Counters {
    /// Returns how many objects were evicted, and their bytes.
    pub(in crate::state) fn evicted(&self) -> (u64, u64) {
        (self.evicted_keys, self.evicted_bytes)
    }
}
