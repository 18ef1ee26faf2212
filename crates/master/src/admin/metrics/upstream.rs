//! Upstream's metric names, for dashboards that know them. An option switches them off.

use mooncake_base::exposition::Exposition;
use mooncake_proto::v1;

use super::{promotion, quotas, unsupported};
use crate::{
    service::{
        DiskSummary, SIZE_BOUNDS, Service, TrafficCount,
        op_metrics::{Op, OpMetrics},
    },
    state::Totals,
};

/// Adds the metrics.
pub(super) fn add(out: &mut Exposition, service: &Service) {
    let totals = service.totals();
    pool(out, &totals);
    segments(out, service.segments());
    calls(out, service.op_metrics());
    history(out, &totals);
    promotion::add_upstream(out, &totals);
    traffic(out, &service.traffic());
    disks(out, service);
    snapshots(out, service);
    quotas::add_upstream(out, service);
    unsupported::add(out);
}

fn disks(out: &mut Exposition, service: &Service) {
    let (disks, t) = (service.disks(), service.traffic());
    let sum = |part: fn(&DiskSummary) -> u64| disks.iter().map(part).sum::<u64>();
    out.gauge("master_allocated_file_size_bytes", "Bytes of records on disks.", sum(|it| it.used));
    out.gauge(
        "master_total_file_capacity_bytes",
        "Bytes that records on disks may take.",
        sum(|it| it.spec.capacity),
    );
    out.gauge("file_cache_nums_", "Objects that have a copy on a disk.", sum(|it| it.objects));
    out.counter("file_cache_hit_nums_", "Reads of objects that are on a disk only.", t.disk_hits);
    out.counter("file_cache_hit_bytes_total", "Bytes of these objects.", t.disk_hit_bytes);
}

fn pool(out: &mut Exposition, t: &Totals) {
    out.gauge("master_allocated_bytes", "Allocated bytes of the pool.", t.used);
    out.gauge("master_total_capacity_bytes", "Bytes of the pool.", t.capacity);
    out.gauge("master_key_count", "Objects that can be read.", t.keys);
    out.gauge("master_soft_pin_key_count", "Soft-pinned objects.", t.soft_pinned_keys);
    out.gauge("master_active_clients", "Registered clients.", t.clients);
    out.gauge("mem_cache_nums_", "Objects that can be read from memory.", t.keys);
    out.gauge(
        "master_put_start_discarded_staging_size",
        "Bytes of puts that have not ended.",
        t.writing,
    );
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

fn calls(out: &mut Exposition, calls: &OpMetrics) {
    for (op, name, batch) in Op::all() {
        let count = calls.count(op);
        for (ending, value, help) in [
            ("requests", count.single, "Calls with one item"),
            (
                "failures",
                count.single_failed,
                "Failed calls with one item; a missing key counts as failed",
            ),
        ] {
            out.counter(&format!("master_{name}_{ending}_total"), &format!("{help}."), value);
        }
        let Some(batch) = batch else { continue };
        for (ending, value, help) in [
            ("requests", count.batches, "Calls with several items"),
            ("failures", count.batches_failed, "Calls of which every item failed"),
            ("partial_successes", count.batches_partial, "Calls of which some items failed"),
            ("items", count.items, "Items of calls with several"),
            ("failed_items", count.items_failed, "Failed items of calls with several"),
        ] {
            let name = format!("master_batch_{batch}_{ending}_total");
            out.counter(&name, &format!("{help}."), value);
        }
    }
}

fn history(out: &mut Exposition, totals: &Totals) {
    let c = &totals.counters;
    let rows: [(&str, &str, u64); 12] = [
        ("master_attempted_evictions_total", "Evictions attempted.", c.evictions_attempted),
        ("master_attempted_evictions_mem", "Evictions attempted in memory.", c.evictions_attempted),
        (
            "master_successful_evictions_total",
            "Evictions that freed enough space.",
            c.evictions_succeeded,
        ),
        (
            "master_successful_evictions_mem",
            "Evictions in memory that freed enough space.",
            c.evictions_succeeded,
        ),
        ("master_evicted_key_count", "Objects evicted.", c.evicted_keys),
        ("master_evicted_key_count_mem", "Objects evicted from memory.", c.evicted_keys),
        ("master_evicted_size_bytes", "Bytes evicted.", c.evicted_bytes),
        ("master_evicted_size_bytes_mem", "Bytes evicted from memory.", c.evicted_bytes),
        (
            "master_put_start_alloc_failures_total",
            "Puts refused for lack of space.",
            c.puts_without_room,
        ),
        (
            "master_put_start_partial_allocations_total",
            "Puts that got fewer replicas than requested.",
            c.puts_with_fewer_copies,
        ),
        ("master_put_start_discard_cnt", "Unfinished puts displaced.", c.puts_displaced),
        (
            "master_put_start_release_cnt",
            "Unfinished puts whose memory was released.",
            c.puts_released,
        ),
    ];
    for (name, help, value) in rows {
        out.counter(name, help, value);
    }
}

fn traffic(out: &mut Exposition, t: &TrafficCount) {
    out.counter("total_get_nums_", "Keys looked up in order to read them.", t.gets);
    out.counter("valid_get_nums_", "Keys looked up for reading and found.", t.hits);
    out.counter("mem_cache_hit_nums_", "Keys looked up for reading and found in memory.", t.hits);
    out.counter("mem_cache_hit_bytes_total", "Bytes of the objects found in memory.", t.hit_bytes);
    let name = "master_value_size_bytes";
    out.head(name, "histogram", "Sizes of the values put.");
    let classes = t.sizes.iter().enumerate();
    let classes = classes.map(|(class, values)| (SIZE_BOUNDS.get(class), *values));
    out.histogram(name, &[], classes, t.size_sum);
}

fn snapshots(out: &mut Exposition, service: &Service) {
    let status = service.journal_status();
    let (taken, failed) = status.as_ref().map_or((0, 0), |s| (s.snapshots, s.failures));
    out.counter("master_snapshot_success", "Snapshots taken.", taken);
    out.counter("master_snapshot_fail", "Failures of the log or of its snapshots.", failed);
    let took = status.as_ref().map_or(0, |s| s.snapshot_time.as_millis());
    out.gauge("master_snapshot_duration_ms", "Duration of the last snapshot.", took);
}

#[cfg(test)]
mod tests {
    use mooncake_base::SystemClock;

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
        let sizes = [1, 0, 2, 0, 0, 0, 0, 1];
        let mut out = Exposition::default();
        traffic(&mut out, &TrafficCount { sizes, size_sum: 9, ..TrafficCount::default() });
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
