//! Counts of events since the start.

use mooncake_base::counters;

counters! {
    /// Counts of events since the start.
    #[derive(Copy)]
    pub struct Counters {}
    EVICTIONS_AND_PUTS {
        /// Runs of eviction.
        ///
        /// Puts that found too little free memory at first.
        evictions_attempted = counter "eviction_runs_total",
        /// Runs that freed enough.
        evictions_succeeded = counter "successful_eviction_runs_total",
        /// Objects evicted.
        evicted_keys = counter "evicted_objects_total",
        /// Objects removed because their time to live was over.
        objects_expired = counter "expired_objects_total",
        /// Bytes evicted.
        /// All replicas count.
        evicted_bytes = counter "evicted_bytes_total",
        /// Puts refused for lack of memory.
        puts_without_room = counter "puts_without_memory_total",
        /// Puts refused because of --max_objects_per_tenant or --max_unfinished_puts_per_client.
        puts_over_count = counter "puts_over_count_total",
        /// Puts that got fewer copies than requested.
        puts_with_fewer_copies = counter "puts_with_fewer_copies_total",
        /// Unfinished puts displaced by others.
        ///
        /// Another writer came, or their client was lost.
        puts_displaced = counter "displaced_puts_total",
        /// Unfinished puts whose memory was released after their time-out.
        puts_released = counter "released_puts_total",
        /// Clients that expired.
        clients_expired = counter "expired_clients_total",
        /// Objects of clients that asked for SSD offload (enable_ssd_offload) that were evicted and are on no disk.
        offloads_missed = counter "missed_offloads_total",
    }
    DISKS {
        /// Objects written to disks.
        ///
        /// After a restart of an owner they count again.
        offloads_done = counter "offloaded_objects_total",
        /// Bytes of objects written to disks.
        offloaded_bytes = counter "offloaded_bytes_total",
        /// Objects that no disk took, since more than --offloading_queue_limit were waiting.
        offloads_refused = counter "refused_offloads_total",
        /// Objects that could not be written to a disk.
        offloads_failed = counter "failed_offloads_total",
        /// Objects that were evicted from a pool with disks and are on none.
        evicted_without_disk = counter "evicted_without_disk_total",
        /// How often puts waited until disks had taken evicted objects over.
        waits_for_disks = counter "waits_for_disks_total",
        /// Copies on disk that were dropped for others, or were damaged.
        disk_copies_lost = counter "lost_disk_copies_total",
        /// Records of an earlier master that became objects (--adopt_disk_records).
        records_adopted = counter "adopted_records_total",
    }
    PROMOTIONS {
        /// Objects on disk that were asked for or read often, and are to come back to memory.
        promotions_admitted = counter "admitted_total",
        /// Objects that came back from disk to memory.
        promotions_done = counter "completed_total",
        /// Bytes of these objects.
        promoted_bytes = counter "completed_bytes_total",
        /// Objects that could not be read from disk, or not be written to memory.
        promotions_failed = counter "failed_total",
        /// Objects that did not come back because the disk was too slow.
        ///
        /// It did not begin in time, or did not end.
        promotions_expired = counter "expired_total",
        /// Objects that were removed or replaced, or whose disk left, meanwhile.
        promotions_cancelled = counter "cancelled_total",
        /// Objects that did not come back because more than --promotion_queue_limit waited.
        promotions_refused = counter "refused_total",
        /// Objects that did not come back because no memory could be freed for them.
        promotions_without_room = counter "without_room_total",
        /// Reads from disk that were too few to bring the object back (--promotion_on_hit).
        promotions_too_few_hits = counter "too_few_hits_total",
        /// Objects whose reads from disk were counted.
        promotion_candidates = counter "candidates_total",
        /// Objects that were read from disk often enough to come back.
        promotion_candidates_admitted = counter "candidates_admitted_total",
        /// Objects whose reads were not counted because those of too many were.
        promotion_candidates_dropped = counter "candidates_dropped_total",
        /// Objects that were not read from disk often enough within a minute.
        promotion_candidates_expired = counter "candidates_expired_total",
    }
    TASKS {
        /// Finished copies and moves.
        tasks_done = counter "tasks_ended_total" { outcome = "success" },
        /// Copies and moves that failed permanently.
        tasks_failed = counter "tasks_ended_total" { outcome = "failed" },
    }
    DRAINS {
        /// Finished drain jobs.
        ///
        /// Drains that emptied their segments.
        drains_done = counter "drain_jobs_ended_total" { outcome = "succeeded" },
        /// Drains that failed.
        drains_failed = counter "drain_jobs_ended_total" { outcome = "failed" },
        /// Drains that were cancelled.
        drains_cancelled = counter "drain_jobs_ended_total" { outcome = "canceled" },
    }
}

impl Counters {
    /// Returns how many objects were evicted, and their bytes.
    pub(in crate::state) fn evicted(&self) -> (u64, u64) {
        (self.evicted_keys, self.evicted_bytes)
    }
}
