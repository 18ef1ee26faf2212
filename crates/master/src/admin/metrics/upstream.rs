//! Upstream's metric names, for dashboards that know them. An option switches them off.

use mooncake_base::exposition::{Exposition, Metric};
use mooncake_proto::v1;

use super::{promotion, quotas, unsupported};
use crate::{
    JournalStatus,
    service::{
        DiskSummary, SIZE_BOUNDS, Service, TrafficCount,
        op_metrics::{Op, OpCount, OpMetrics},
    },
    state::{Counters, Totals},
};

/// Adds the metrics.
pub(super) fn add(out: &mut Exposition, service: &Service) {
    let (totals, traffic) = (service.totals(), service.traffic());
    out.row("", &POOL, &totals);
    segments(out, service.segments());
    calls(out, service.op_metrics());
    out.row("", &EVENTS, &totals.counters);
    promotion::add_upstream(out, &totals);
    out.row("", &LOOKUPS, &traffic);
    sizes_of_values(out, &traffic);
    out.row("", &DISKS, &service.disks());
    out.row("", &DISK_HITS, &traffic);
    out.row("", &SNAPSHOTS, &service.journal_status().unwrap_or_default());
    quotas::add_upstream(out, service);
    unsupported::add(out);
}

static POOL: [Metric<Totals>; 7] = [
    Metric::gauge("master_allocated_bytes", "Allocated bytes of the pool.", |it| it.used),
    Metric::gauge("master_total_capacity_bytes", "Bytes of the pool.", |it| it.capacity),
    Metric::gauge("master_key_count", "Objects that can be read.", |it| it.keys),
    Metric::gauge("master_soft_pin_key_count", "Soft-pinned objects.", |it| it.soft_pinned_keys),
    Metric::gauge("master_active_clients", "Registered clients.", |it| it.clients),
    Metric::gauge("mem_cache_nums_", "Objects that can be read from memory.", |it| it.keys),
    Metric::gauge(
        "master_put_start_discarded_staging_size",
        "Bytes of puts that have not ended.",
        |it| it.writing,
    ),
];

static EVENTS: [Metric<Counters>; 12] = [
    Metric::counter("master_attempted_evictions_total", "Evictions attempted.", |it| {
        it.evictions_attempted
    }),
    Metric::counter("master_attempted_evictions_mem", "Evictions attempted in memory.", |it| {
        it.evictions_attempted
    }),
    Metric::counter(
        "master_successful_evictions_total",
        "Evictions that freed enough space.",
        |it| it.evictions_succeeded,
    ),
    Metric::counter(
        "master_successful_evictions_mem",
        "Evictions in memory that freed enough space.",
        |it| it.evictions_succeeded,
    ),
    Metric::counter("master_evicted_key_count", "Objects evicted.", |it| it.evicted_keys),
    Metric::counter("master_evicted_key_count_mem", "Objects evicted from memory.", |it| {
        it.evicted_keys
    }),
    Metric::counter("master_evicted_size_bytes", "Bytes evicted.", |it| it.evicted_bytes),
    Metric::counter("master_evicted_size_bytes_mem", "Bytes evicted from memory.", |it| {
        it.evicted_bytes
    }),
    Metric::counter(
        "master_put_start_alloc_failures_total",
        "Puts refused for lack of space.",
        |it| it.puts_without_room,
    ),
    Metric::counter(
        "master_put_start_partial_allocations_total",
        "Puts that got fewer replicas than requested.",
        |it| it.puts_with_fewer_copies,
    ),
    Metric::counter("master_put_start_discard_cnt", "Unfinished puts displaced.", |it| {
        it.puts_displaced
    }),
    Metric::counter(
        "master_put_start_release_cnt",
        "Unfinished puts whose memory was released.",
        |it| it.puts_released,
    ),
];

static LOOKUPS: [Metric<TrafficCount>; 4] = [
    Metric::counter("total_get_nums_", "Keys looked up in order to read them.", |it| it.gets),
    Metric::counter("valid_get_nums_", "Keys looked up for reading and found.", |it| it.hits),
    Metric::counter(
        "mem_cache_hit_nums_",
        "Keys looked up for reading and found in memory.",
        |it| it.hits,
    ),
    Metric::counter("mem_cache_hit_bytes_total", "Bytes of the objects found in memory.", |it| {
        it.hit_bytes
    }),
];

static DISKS: [Metric<Vec<DiskSummary>>; 3] = [
    Metric::gauge("master_allocated_file_size_bytes", "Bytes of records on disks.", |disks| {
        disks.iter().map(|it| it.used).sum()
    }),
    Metric::gauge(
        "master_total_file_capacity_bytes",
        "Bytes that records on disks may take.",
        |disks| disks.iter().map(|it| it.spec.capacity).sum(),
    ),
    Metric::gauge("file_cache_nums_", "Objects that have a copy on a disk.", |disks| {
        disks.iter().map(|it| it.objects).sum()
    }),
];

static DISK_HITS: [Metric<TrafficCount>; 2] = [
    Metric::counter("file_cache_hit_nums_", "Reads of objects that are on a disk only.", |it| {
        it.disk_hits
    }),
    Metric::counter("file_cache_hit_bytes_total", "Bytes of these objects.", |it| {
        it.disk_hit_bytes
    }),
];

static SNAPSHOTS: [Metric<JournalStatus>; 3] = [
    Metric::counter("master_snapshot_success", "Snapshots taken.", |it| it.snapshots),
    Metric::counter("master_snapshot_fail", "Failures of the log or of its snapshots.", |it| {
        it.failures
    }),
    Metric::gauge("master_snapshot_duration_ms", "Duration of the last snapshot.", |it| {
        it.snapshot_time.as_millis() as u64
    }),
];

static CALLS: [Metric<OpCount>; 2] = [
    Metric::counter("requests_total", "Calls with one item.", |it| it.single),
    Metric::counter(
        "failures_total",
        "Failed calls with one item; a missing key counts as failed.",
        |it| it.single_failed,
    ),
];

static BATCHES: [Metric<OpCount>; 5] = [
    Metric::counter("requests_total", "Calls with several items.", |it| it.batches),
    Metric::counter("failures_total", "Calls of which every item failed.", |it| it.batches_failed),
    Metric::counter("partial_successes_total", "Calls of which some items failed.", |it| {
        it.batches_partial
    }),
    Metric::counter("items_total", "Items of calls with several.", |it| it.items),
    Metric::counter("failed_items_total", "Failed items of calls with several.", |it| {
        it.items_failed
    }),
];

fn calls(out: &mut Exposition, calls: &OpMetrics) {
    for (op, name, batch) in Op::all() {
        let count = calls.count(op);
        out.row(&format!("master_{name}_"), &CALLS, &count);
        if let Some(batch) = batch {
            out.row(&format!("master_batch_{batch}_"), &BATCHES, &count);
        }
    }
}

fn segments(out: &mut Exposition, summaries: Vec<v1::SegmentSummary>) {
    let mut used: Vec<(String, u64)> = Vec::new();
    let mut capacity: Vec<(String, u64)> = Vec::new();
    // The segments are sorted by name.
    for summary in summaries {
        let segment = summary.segment.unwrap_or_default();
        for (values, value) in [(&mut used, summary.used), (&mut capacity, segment.length)] {
            match values.last_mut() {
                Some((name, sum)) if *name == segment.name => *sum += value,
                _ => values.push((segment.name.clone(), value)),
            }
        }
    }
    for (name, help, values) in [
        ("segment_allocated_bytes", "Allocated bytes of the segment.", used),
        ("segment_total_capacity_bytes", "Bytes of the segment.", capacity),
    ] {
        out.head(name, "gauge", help);
        for (segment, value) in values {
            out.sample(name, &[("segment", &segment)], value);
        }
    }
}

fn sizes_of_values(out: &mut Exposition, traffic: &TrafficCount) {
    let name = "master_value_size_bytes";
    out.head(name, "histogram", "Sizes of the values put.");
    out.histogram(name, &[], traffic.sizes.with_bounds(&SIZE_BOUNDS), traffic.sizes.sum);
}

#[cfg(test)]
mod tests {
    use mooncake_base::{SystemClock, histogram::BucketCounts};

    use super::*;
    use crate::state::Rules;

    fn text(service: &Service) -> String {
        let mut out = Exposition::default();
        add(&mut out, service);
        out.finish()
    }

    const GAUGES: &str = "\
        master_allocated_bytes master_total_capacity_bytes segment_allocated_bytes \
        segment_total_capacity_bytes master_nof_allocated_bytes master_total_nof_capacity_bytes \
        nof_segment_allocated_bytes nof_segment_total_capacity_bytes \
        master_allocated_file_size_bytes master_total_file_capacity_bytes master_key_count \
        master_soft_pin_key_count master_active_clients mem_cache_nums_ file_cache_nums_ \
        master_put_start_discarded_staging_size master_promotion_in_flight \
        ha_oplog_last_sequence_id ha_oplog_applied_sequence_id ha_oplog_standby_lag \
        ha_oplog_pending_entries ha_pending_mutation_queue_size ha_standby_state \
        master_snapshot_duration_ms";
    const COUNTERS: &str = "\
        master_put_start_alloc_failures_total master_put_start_partial_allocations_total \
        mem_cache_hit_nums_ file_cache_hit_nums_ mem_cache_hit_bytes_total \
        file_cache_hit_bytes_total valid_get_nums_ total_get_nums_ \
        master_successful_evictions_total master_successful_evictions_mem \
        master_successful_evictions_nof master_attempted_evictions_total \
        master_attempted_evictions_mem master_attempted_evictions_nof master_evicted_key_count \
        master_evicted_key_count_mem master_evicted_key_count_nof master_evicted_size_bytes \
        master_evicted_size_bytes_mem master_evicted_size_bytes_nof master_put_start_discard_cnt \
        master_put_start_release_cnt master_promotion_admitted_total \
        master_promotion_completed_total master_promotion_completed_bytes_total \
        master_promotion_expired_total master_promotion_failed_total \
        master_promotion_cancelled_total master_promotion_rejected_frequency_total \
        master_promotion_rejected_watermark_total master_promotion_rejected_cap_total \
        master_promotion_candidate_recorded_total master_promotion_candidate_admitted_total \
        master_promotion_candidate_admission_rejected_total \
        master_promotion_candidate_expired_evaluated_total \
        master_promotion_candidate_expired_unevaluated_total \
        master_promotion_candidate_dropped_limit_total master_snapshot_success \
        master_snapshot_fail ha_oplog_applied_entries ha_oplog_batch_commits \
        ha_oplog_checksum_failures ha_oplog_dropped_put_end ha_oplog_etcd_write_failures \
        ha_oplog_etcd_write_retries ha_oplog_gap_resolve_attempts ha_oplog_gap_resolve_success \
        ha_oplog_skipped_entries ha_oplog_sync_batch_commits ha_oplog_watch_disconnections \
        ha_state_transitions_total master_nof_heartbeat_success_total \
        master_nof_heartbeat_failure_total master_nof_heartbeat_timeout_total \
        master_nof_segments_unmounted_by_heartbeat_total";
    const HISTOGRAMS: &str = "\
        master_value_size_bytes master_nof_heartbeat_probe_latency_ms ha_oplog_apply_latency_us \
        ha_oplog_etcd_write_latency_us";

    #[test]
    fn counters_of_the_log_have_both_names() {
        let text = text(&Service::new(Rules::default(), SystemClock::shared()));
        let counters = COUNTERS.split_whitespace().filter(|name| name.starts_with("ha_oplog_"));
        assert_eq!(counters.clone().count(), 11);
        for name in counters {
            assert!(text.contains(&format!("\n# TYPE {name}_total counter\n")), "{name}");
        }
    }

    #[test]
    fn exports_every_upstream_metric() {
        let service = Service::new(Rules::default(), SystemClock::shared());
        let text = text(&service);
        for (names, kind) in [(GAUGES, "gauge"), (COUNTERS, "counter"), (HISTOGRAMS, "histogram")] {
            for name in names.split_whitespace() {
                let head = format!("\n# TYPE {name} {kind}\n");
                assert!(text.contains(&head), "{kind} {name}");
            }
        }
    }

    #[test]
    fn exports_every_upstream_operation() {
        let service = Service::new(Rules::default(), SystemClock::shared());
        let text = text(&service);
        let is_there = |name: &str| text.contains(&format!("\n# TYPE {name} "));
        let singles = "exist_key put_start put_end put_revoke get_replica_list \
            get_replica_list_by_regex remove remove_by_regex remove_all mount_segment \
            unmount_segment remount_segment mount_nof_segment unmount_nof_segment \
            remount_nof_segment ping copy_start copy_end copy_revoke move_start move_end \
            move_revoke evict_disk_replica create_copy_task create_move_task update_task \
            query_task fetch_tasks";
        for op in singles.split_whitespace() {
            for ending in ["requests", "failures"] {
                let name = format!("master_{op}_{ending}_total");
                assert!(is_there(&name), "{name}");
            }
        }
        let batches =
            "exist_key query_ip replica_clear get_replica_list put_start put_end put_revoke";
        for op in batches.split_whitespace() {
            for ending in ["requests", "failures", "partial_successes", "items", "failed_items"] {
                let name = format!("master_batch_{op}_{ending}_total");
                assert!(is_there(&name), "{name}");
            }
        }
    }

    #[test]
    fn size_histogram_is_cumulative() {
        let sizes = BucketCounts { counts: [1, 0, 2, 0, 0, 0, 0, 1], sum: 9 };
        let mut out = Exposition::default();
        sizes_of_values(&mut out, &TrafficCount { sizes, ..TrafficCount::default() });
        for line in [
            "master_value_size_bytes_bucket{le=\"4096\"} 1",
            "master_value_size_bytes_bucket{le=\"262144\"} 3",
            "master_value_size_bytes_bucket{le=\"67108864\"} 3",
            "master_value_size_bytes_bucket{le=\"+Inf\"} 4",
            "master_value_size_bytes_sum 9",
            "master_value_size_bytes_count 4",
        ] {
            assert!(out.text().lines().any(|found| found == line), "{line}");
        }
    }

    #[test]
    fn sums_segments_of_one_name() {
        let summary = |name: &str, used| v1::SegmentSummary {
            segment: Some(v1::Segment {
                name: name.to_owned(),
                length: 10,
                ..v1::Segment::default()
            }),
            used,
            ..v1::SegmentSummary::default()
        };
        let mut out = Exposition::default();
        segments(&mut out, vec![summary("a", 1), summary("a", 2), summary("b\"", 4)]);
        assert!(
            out.text().contains("segment_allocated_bytes{segment=\"a\"} 3\n"),
            "{}",
            out.text()
        );
        assert!(out.text().contains("segment_total_capacity_bytes{segment=\"b\\\"\"} 10\n"));
    }
}
