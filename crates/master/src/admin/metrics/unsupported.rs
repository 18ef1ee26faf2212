//! Upstream's metrics of features that this master does not have. Their value is always zero.
//!
//! A name that another module exports is skipped, so that a row need not be removed when its
//! feature comes.

use mooncake_base::exposition::Exposition;

/// Operations of unsupported features.
const OPERATIONS: &[&str] = &[
    "get_replica_list_by_regex",
    "remount_segment",
    "mount_nof_segment",
    "unmount_nof_segment",
    "remount_nof_segment",
    "copy_start",
    "copy_end",
    "copy_revoke",
    "move_start",
    "move_end",
    "move_revoke",
    "evict_disk_replica",
    "create_copy_task",
    "create_move_task",
    "update_task",
    "query_task",
    "fetch_tasks",
];

const BATCHES: &[&str] = &["query_ip", "replica_clear"];

/// Gauges of disks, NVMe-oF, followers and their logs.
const GAUGES: &[&str] = &[
    "master_nof_allocated_bytes",
    "master_total_nof_capacity_bytes",
    "ha_oplog_last_sequence_id",
    "ha_oplog_applied_sequence_id",
    "ha_oplog_standby_lag",
    "ha_oplog_pending_entries",
    "ha_pending_mutation_queue_size",
    "ha_standby_state",
];

const COUNTERS: &[&str] = &[
    "master_successful_evictions_nof",
    "master_attempted_evictions_nof",
    "master_evicted_key_count_nof",
    "master_evicted_size_bytes_nof",
    "master_promotion_candidate_admission_rejected_total",
    "master_promotion_candidate_expired_unevaluated_total",
    "master_nof_heartbeat_success_total",
    "master_nof_heartbeat_failure_total",
    "master_nof_heartbeat_timeout_total",
    "master_nof_segments_unmounted_by_heartbeat_total",
    "ha_oplog_applied_entries",
    "ha_oplog_applied_entries_total",
    "ha_oplog_batch_commits",
    "ha_oplog_batch_commits_total",
    "ha_oplog_checksum_failures",
    "ha_oplog_checksum_failures_total",
    "ha_oplog_dropped_put_end",
    "ha_oplog_dropped_put_end_total",
    "ha_oplog_etcd_write_failures",
    "ha_oplog_etcd_write_failures_total",
    "ha_oplog_etcd_write_retries",
    "ha_oplog_etcd_write_retries_total",
    "ha_oplog_gap_resolve_attempts",
    "ha_oplog_gap_resolve_attempts_total",
    "ha_oplog_gap_resolve_success",
    "ha_oplog_gap_resolve_success_total",
    "ha_oplog_skipped_entries",
    "ha_oplog_skipped_entries_total",
    "ha_oplog_sync_batch_commits",
    "ha_oplog_sync_batch_commits_total",
    "ha_oplog_watch_disconnections",
    "ha_oplog_watch_disconnections_total",
    "ha_state_transitions_total",
];

/// Gauges per NVMe-oF segment, without any samples.
const GAUGES_OF_NONE: &[&str] =
    &["nof_segment_allocated_bytes", "nof_segment_total_capacity_bytes"];

const HISTOGRAMS: &[&str] = &[
    "master_nof_heartbeat_probe_latency_ms",
    "ha_oplog_apply_latency_us",
    "ha_oplog_etcd_write_latency_us",
];

const HELP: &str = "Always zero: this master does not have the feature.";

/// Adds the metrics that no other module exports.
pub(super) fn add(out: &mut Exposition) {
    for name in GAUGES_OF_NONE {
        out.head(name, "gauge", HELP);
    }
    for name in HISTOGRAMS {
        out.head(name, "histogram", HELP);
        out.histogram(name, &[], [(None::<u64>, 0)], 0);
    }
    for name in GAUGES {
        add_one(out, name, "gauge");
    }
    for name in COUNTERS {
        add_one(out, name, "counter");
    }
    for operation in OPERATIONS {
        for ending in ["requests", "failures"] {
            add_one(out, &format!("master_{operation}_{ending}_total"), "counter");
        }
    }
    for operation in BATCHES {
        for ending in ["requests", "failures", "partial_successes", "items", "failed_items"] {
            add_one(out, &format!("master_batch_{operation}_{ending}_total"), "counter");
        }
    }
}

fn add_one(out: &mut Exposition, name: &str, kind: &str) {
    if out.has(name) {
        return;
    }
    match kind {
        "gauge" => out.gauge(name, HELP, 0),
        _ => out.counter(name, HELP, 0),
    }
}
