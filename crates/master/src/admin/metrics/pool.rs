//! The metrics of the pool: memory by segment and client, calls, reads, puts and evictions.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use mooncake_base::exposition::{Exposition, Metric};

use crate::{
    admin::segments::SegmentRow,
    service::{
        DiskSummary, SIZE_BOUNDS, Service, TrafficCount,
        call_times::BOUNDS_US,
        op_metrics::{Op, OpCount},
    },
    state::{Counters, Totals},
};

const PREFIX: &str = "mooncake_master_";

/// Adds the metrics.
pub(super) fn add(out: &mut Exposition, service: &Service) {
    let totals = service.totals();
    out.row(PREFIX, &MEMORY, &totals);
    segments(out, service);
    disks(out, service);
    out.row(PREFIX, Counters::DISKS, &totals.counters);
    calls(out, service);
    durations(out, service);
    let traffic = service.traffic();
    out.row(PREFIX, TrafficCount::LOOKUPS, &traffic);
    out.row(PREFIX, Counters::EVICTIONS_AND_PUTS, &totals.counters);
    let name = "mooncake_master_put_size_bytes";
    out.head(name, "histogram", "Sizes of the values put.");
    out.histogram(name, &[], traffic.sizes.with_bounds(&SIZE_BOUNDS), traffic.sizes.sum);
}

static MEMORY: [Metric<Totals>; 9] = [
    Metric::gauge("capacity_bytes", "Memory that clients lend.", |it| it.capacity),
    Metric::gauge("used_bytes", "Memory in use.", |it| it.used),
    Metric::gauge("writing_bytes", "Memory of puts that have not ended.", |it| it.writing),
    Metric::gauge("fenced_bytes", "Freed bytes in quarantine until a fence ends.", |it| it.fenced),
    Metric::gauge(
        "awaiting_sync_bytes",
        "Freed bytes that are reused once the log is on disk.",
        |it| it.awaiting_sync,
    ),
    Metric::gauge("objects", "Objects that can be read.", |it| it.keys),
    Metric::gauge("soft_pinned_objects", "Soft-pinned objects.", |it| it.soft_pinned_keys),
    Metric::gauge("clients", "Registered clients.", |it| it.clients),
    Metric::gauge("segments", "Mounted segments.", |it| it.segments),
];

/// The used and all bytes of a segment.
static SEGMENT: [Metric<(u64, u64)>; 2] = [
    Metric::gauge("segment_used_bytes", "Memory of the segment in use.", |(used, _)| *used),
    Metric::gauge("segment_capacity_bytes", "Memory of the segment.", |(_, capacity)| *capacity),
];

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
    let rows = rows.iter().map(|((segment, client), sums)| {
        (vec![("segment", segment.as_str()), ("client", *client)], sums)
    });
    out.rows(PREFIX, &SEGMENT, &rows.collect::<Vec<_>>());
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

static DISK: [Metric<DiskSummary>; 5] = [
    Metric::gauge("disk_capacity_bytes", "Bytes that the records of the disk may take.", |it| {
        it.spec.capacity
    }),
    Metric::gauge("disk_used_bytes", "Bytes that the records of the disk take.", |it| it.used),
    Metric::gauge("disk_objects", "Objects that have a copy on the disk.", |it| it.objects),
    Metric::gauge("disk_waiting_objects", "Objects that wait to be written to the disk.", |it| {
        it.waiting as u64
    }),
    Metric::gauge(
        "disk_readable",
        "1 if a client has the disk open, 0 if its objects are hidden.",
        |it| it.is_readable.into(),
    ),
];

/// Adds the use of the disks that clients keep.
fn disks(out: &mut Exposition, service: &Service) {
    let disks = service.disks();
    let ids: Vec<_> = disks.iter().map(|disk| disk.spec.id.to_string()).collect();
    let rows = ids.iter().zip(&disks);
    let rows = rows.map(|(id, it)| (vec![("disk", &**id), ("client", &*it.spec.name)], it));
    out.rows(PREFIX, &DISK, &rows.collect::<Vec<_>>());
}

static CALLS: [Metric<OpCount>; 5] = [
    Metric::counter("calls_total", "Calls.", OpCount::calls),
    Metric::counter("call_items_total", "Items of calls, above all keys.", OpCount::all_items),
    Metric::counter("call_misses_total", "Items that named a missing object.", |it| it.missed),
    Metric::counter(
        "call_kept_total",
        "Items that left an object as it was, above all puts of keys that had one.",
        |it| it.kept,
    ),
    Metric::counter(
        "call_failures_total",
        "Items that failed, without misses and kept.",
        OpCount::failures,
    ),
];

fn calls(out: &mut Exposition, service: &Service) {
    let counts = Op::all().map(|(op, call, _)| (call, service.op_metrics().count(op)));
    let counts: Vec<_> = counts.collect();
    let rows = counts.iter().map(|(call, count)| (vec![("call", *call)], count));
    out.rows(PREFIX, &CALLS, &rows.collect::<Vec<_>>());
}

fn durations(out: &mut Exposition, service: &Service) {
    let name = "mooncake_master_call_duration_seconds";
    out.head(name, "histogram", "Duration of calls, without waits for the log and the network.");
    for (call, time) in service.call_times().snapshot() {
        let seconds = |micros| micros as f64 / 1e6;
        let classes = time.with_bounds(&BOUNDS_US);
        let classes = classes.map(|(bound, calls)| (bound.map(seconds), calls));
        let sum = Duration::from_nanos(time.sum).as_secs_f64();
        out.histogram(name, &[("call", call)], classes, sum);
    }
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
