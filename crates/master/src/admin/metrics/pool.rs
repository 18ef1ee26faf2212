//! The metrics of the pool: memory by segment and client, calls, reads, puts and evictions.

use std::collections::{BTreeMap, HashMap};

use mooncake_base::exposition::Exposition;

use crate::{
    admin::segments::SegmentRow,
    service::{
        DiskSummary, SIZE_BOUNDS, Service,
        call_times::BOUNDS_US,
        op_metrics::{Op, OpCount},
    },
    state::Totals,
};

/// Adds the metrics.
pub(super) fn add(out: &mut Exposition, service: &Service) {
    let totals = service.totals();
    memory(out, &totals);
    segments(out, service);
    disks(out, service, &totals);
    calls(out, service);
    durations(out, service);
    objects(out, service, &totals);
}

fn memory(out: &mut Exposition, t: &Totals) {
    for (name, help, value) in [
        ("capacity_bytes", "Memory that clients lend.", t.capacity),
        ("used_bytes", "Memory in use.", t.used),
        ("writing_bytes", "Memory of puts that have not ended.", t.writing),
        ("fenced_bytes", "Freed bytes in quarantine until a fence ends.", t.fenced),
        (
            "awaiting_sync_bytes",
            "Freed bytes that are reused once the log is on disk.",
            t.awaiting_sync,
        ),
        ("objects", "Objects that can be read.", t.keys),
        ("soft_pinned_objects", "Soft-pinned objects.", t.soft_pinned_keys),
        ("clients", "Registered clients.", t.clients),
        ("segments", "Mounted segments.", t.segments),
    ] {
        out.gauge(&format!("mooncake_master_{name}"), help, value);
    }
}

/// Adds the use of memory by segment and client. Segments of one name and client are added up.
fn segments(out: &mut Exposition, service: &Service) {
    let clients = service.clients();
    let names: HashMap<String, &str> =
        clients.iter().map(|client| (client.id.to_string(), &*client.name)).collect();
    let mut rows: BTreeMap<(String, &str), (u64, u64)> = BTreeMap::new();
    for summary in service.segments() {
        let row = SegmentRow::new(summary);
        let client = names.get(&row.client).copied().unwrap_or_default();
        let sums = rows.entry((row.segment.name, client)).or_default();
        *sums = (sums.0 + row.used, sums.1 + row.segment.length);
    }
    for (name, help, part) in [
        ("mooncake_master_segment_used_bytes", "Memory of the segment in use.", 0),
        ("mooncake_master_segment_capacity_bytes", "Memory of the segment.", 1),
    ] {
        out.head(name, "gauge", help);
        for ((segment, client), sums) in &rows {
            let value = if part == 0 { sums.0 } else { sums.1 };
            out.sample(name, &[("segment", segment), ("client", client)], value);
        }
    }
    let name = "mooncake_master_client_silence_seconds";
    out.head(name, "gauge", "Time since the last heartbeat of the client.");
    let mut silence: BTreeMap<&str, f64> = BTreeMap::new();
    for client in &clients {
        let longest = silence.entry(&client.name).or_default();
        *longest = longest.max(client.since_heartbeat.as_secs_f64());
    }
    for (client, seconds) in silence {
        out.sample(name, &[("client", client)], seconds);
    }
}

/// Adds the use of the disks that clients keep.
fn disks(out: &mut Exposition, service: &Service, totals: &Totals) {
    type Part = fn(&DiskSummary) -> u64;
    let parts: [(&str, &str, Part); 5] = [
        ("disk_capacity_bytes", "Bytes that the records of the disk may take.", |it| {
            it.spec.capacity
        }),
        ("disk_used_bytes", "Bytes that the records of the disk take.", |it| it.used),
        ("disk_objects", "Objects that have a copy on the disk.", |it| it.objects),
        ("disk_waiting_objects", "Objects that wait to be written to the disk.", |it| {
            it.waiting as u64
        }),
        ("disk_readable", "1 if a client has the disk open, 0 if its objects are hidden.", |it| {
            u64::from(it.is_readable)
        }),
    ];
    let disks = service.disks();
    for (ending, help, part) in parts {
        let name = format!("mooncake_master_{ending}");
        out.head(&name, "gauge", help);
        for disk in &disks {
            let id = disk.spec.id.to_string();
            out.sample(&name, &[("disk", &*id), ("client", &*disk.spec.name)], part(disk));
        }
    }
    let c = &totals.counters;
    for (name, help, value) in [
        ("offloaded_objects_total", "Objects written to disks.", c.offloads_done),
        ("offloaded_bytes_total", "Bytes of objects written to disks.", c.offloaded_bytes),
        (
            "refused_offloads_total",
            "Objects that no disk took, since more than --offloading_queue_limit were waiting.",
            c.offloads_refused,
        ),
        (
            "failed_offloads_total",
            "Objects that could not be written to a disk.",
            c.offloads_failed,
        ),
        (
            "evicted_without_disk_total",
            "Objects that were evicted from a pool with disks and are on none.",
            c.evicted_without_disk,
        ),
        (
            "waits_for_disks_total",
            "How often puts waited until disks had taken evicted objects over.",
            c.waits_for_disks,
        ),
        (
            "lost_disk_copies_total",
            "Copies on disk that were dropped for others, or were damaged.",
            c.disk_copies_lost,
        ),
        (
            "adopted_records_total",
            "Records of an earlier master that became objects (--adopt_disk_records).",
            c.records_adopted,
        ),
    ] {
        out.counter(&format!("mooncake_master_{name}"), help, value);
    }
}

fn calls(out: &mut Exposition, service: &Service) {
    type Part = fn(&OpCount) -> u64;
    let parts: [(&str, &str, Part); 5] = [
        ("calls_total", "Calls.", OpCount::calls),
        ("call_items_total", "Items of calls, above all keys.", OpCount::all_items),
        ("call_misses_total", "Items that named a missing object.", |count| count.missed),
        (
            "call_kept_total",
            "Items that left an object as it was, above all puts of keys that had one.",
            |count| count.kept,
        ),
        ("call_failures_total", "Items that failed, without misses and kept.", OpCount::failures),
    ];
    for (ending, help, part) in parts {
        let name = format!("mooncake_master_{ending}");
        out.head(&name, "counter", help);
        for (op, call, _) in Op::all() {
            out.sample(&name, &[("call", call)], part(&service.op_metrics().count(op)));
        }
    }
}

fn durations(out: &mut Exposition, service: &Service) {
    let name = "mooncake_master_call_duration_seconds";
    out.head(name, "histogram", "Duration of calls, without waits for the log and the network.");
    for time in service.call_times().snapshot() {
        let classes = time.classes.iter().enumerate();
        let seconds = |class| BOUNDS_US.get(class).map(|micros| *micros as f64 / 1e6);
        let classes = classes.map(|(class, calls)| (seconds(class), *calls));
        out.histogram(name, &[("call", time.call)], classes, time.sum.as_secs_f64());
    }
}

fn objects(out: &mut Exposition, service: &Service, totals: &Totals) {
    let (t, c) = (service.traffic(), &totals.counters);
    for (name, help, value) in [
        ("lookups_total", "Keys looked up in order to read them.", t.gets),
        ("lookup_hits_total", "Keys looked up for reading and found.", t.hits),
        ("lookup_disk_hits_total", "Keys found for reading that are on a disk only.", t.disk_hits),
        ("lookup_disk_hit_bytes_total", "Bytes of these objects.", t.disk_hit_bytes),
        ("lookup_hit_bytes_total", "Bytes of the objects found for reading.", t.hit_bytes),
        ("eviction_runs_total", "Runs of eviction.", c.evictions_attempted),
        ("successful_eviction_runs_total", "Runs that freed enough.", c.evictions_succeeded),
        ("evicted_objects_total", "Objects evicted.", c.evicted_keys),
        (
            "expired_objects_total",
            "Objects removed because their time to live was over.",
            c.objects_expired,
        ),
        ("evicted_bytes_total", "Bytes evicted.", c.evicted_bytes),
        ("puts_without_memory_total", "Puts refused for lack of memory.", c.puts_without_room),
        (
            "puts_over_count_total",
            "Puts refused because of --max_objects_per_tenant or --max_unfinished_puts_per_client.",
            c.puts_over_count,
        ),
        (
            "puts_with_fewer_copies_total",
            "Puts that got fewer copies than requested.",
            c.puts_with_fewer_copies,
        ),
        ("displaced_puts_total", "Unfinished puts displaced by others.", c.puts_displaced),
        (
            "released_puts_total",
            "Unfinished puts whose memory was released after their time-out.",
            c.puts_released,
        ),
        ("expired_clients_total", "Clients that expired.", c.clients_expired),
        (
            "missed_offloads_total",
            "Objects of clients that asked for SSD offload (enable_ssd_offload) that were evicted and are on \
             no disk.",
            c.offloads_missed,
        ),
    ] {
        out.counter(&format!("mooncake_master_{name}"), help, value);
    }
    let name = "mooncake_master_put_size_bytes";
    out.head(name, "histogram", "Sizes of the values put.");
    let classes = t.sizes.iter().enumerate();
    let classes = classes.map(|(class, values)| (SIZE_BOUNDS.get(class), *values));
    out.histogram(name, &[], classes, t.size_sum);
}

#[cfg(test)]
mod tests {
    use mooncake_base::SystemClock;
    use mooncake_proto::v1::{self, request};

    use super::*;
    use crate::{service::Origin, state::Rules};

    fn exposed(service: &Service) -> String {
        let mut out = Exposition::default();
        add(&mut out, service);
        out.finish()
    }

    #[test]
    fn misses_are_counted_apart_from_failures() {
        let service = Service::new(Rules::default(), SystemClock::shared());
        let keys = Some(v1::KeyColumn::pack([&b"absent"[..]]));
        let call = request::Call::Locate(v1::LocateRequest { keys, ..Default::default() });
        let request = v1::Request { call: Some(call), ..Default::default() };
        service.dispatch(request, &Origin::in_process());
        let text = exposed(&service);
        for line in [
            "mooncake_master_calls_total{call=\"get_replica_list\"} 1",
            "mooncake_master_call_misses_total{call=\"get_replica_list\"} 1",
            "mooncake_master_call_failures_total{call=\"get_replica_list\"} 0",
            "mooncake_master_call_duration_seconds_count{call=\"locate\"} 1",
            "mooncake_master_call_duration_seconds_bucket{call=\"locate\",le=\"30\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}
