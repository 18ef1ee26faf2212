//! Snapshots of the counters, and the summary line.

use std::{fmt::Write as _, time::Duration};

use axum::{extract::State, response::Response};
use mooncake_base::{ByteSize, Moment};
use mooncake_proto::calls::Method;

use super::{AdminContext, text_reply};
use crate::{
    service::{
        Service,
        op_metrics::{Op, OpCount},
    },
    state::Totals,
};

/// The minimum interval over which rates are computed.
const STEP_MIN: Duration = Duration::from_secs(1);

/// The HA part of the summary line for a master without followers.
const NO_FOLLOWERS: &str = "HA Metrics Summary: last_seq=0, applied_seq=0, lag=0, pending=0, \
    mutation_queue=0, batch_commits=0, sync_commits=0, skipped=0, checksum_fail=0, etcd_fail=0, \
    watch_disconn=0, state=0";

/// Upstream's calls that this master does not have; the line shows zeros for them.
const UNSUPPORTED_CALLS: [&str; 7] = [
    "CopyStart",
    "CopyEnd",
    "CopyRevoke",
    "MoveStart",
    "MoveEnd",
    "MoveRevoke",
    "EvictDiskReplica",
];

const UNSUPPORTED_BATCHES: [&str; 1] = ["QueryIp"];

/// The single calls in the line.
const SINGLE: [(&str, Op); 8] = [
    ("PutStart", Op::Call(Method::PutStart)),
    ("PutEnd", Op::Call(Method::PutEnd)),
    ("PutRevoke", Op::Call(Method::PutRevoke)),
    ("Get", Op::Call(Method::Locate)),
    ("Exist", Op::Call(Method::Probe)),
    ("Del", Op::Call(Method::Remove)),
    ("DelAll", Op::RemoveAll),
    ("Ping", Op::Call(Method::Heartbeat)),
];

/// The batch calls in the line.
const BATCH: [(&str, Op); 6] = [
    ("PutStart", Op::Call(Method::PutStart)),
    ("PutEnd", Op::Call(Method::PutEnd)),
    ("PutRevoke", Op::Call(Method::PutRevoke)),
    ("Get", Op::Call(Method::Locate)),
    ("ExistKey", Op::Call(Method::Probe)),
    ("Clear", Op::Call(Method::ClearReplicas)),
];

/// The task calls in the line.
const TASKS: [(&str, Op); 5] = [
    ("CreateMoveTask", Op::CreateMoveTask),
    ("CreateCopyTask", Op::CreateCopyTask),
    ("QueryTask", Op::Call(Method::QueryTasks)),
    ("FetchTasks", Op::Call(Method::FetchTasks)),
    ("MarkTaskToComplete", Op::Call(Method::EndTasks)),
];

/// A snapshot of the counters.
#[derive(Debug, Clone)]
pub struct CounterSnapshot {
    /// The time of the snapshot.
    pub at: Moment,
    /// The totals of the pool.
    pub totals: Totals,
    /// The call counters, by [`Op::index`].
    pub counts: Vec<OpCount>,
    /// The number of snapshots taken of the log.
    pub snapshots: u64,
    /// The number of failures of the log or of its snapshots.
    pub log_failures: u64,
}

impl CounterSnapshot {
    /// Takes a snapshot.
    pub fn take(service: &Service) -> Self {
        let mut counts = vec![OpCount::default(); Op::COUNT];
        for (op, ..) in Op::all() {
            counts[op.index()] = service.op_metrics().count(op);
        }
        let log = service.journal_status().unwrap_or_default();
        Self {
            at: service.now(),
            totals: service.totals(),
            counts,
            snapshots: log.snapshots,
            log_failures: log.failures,
        }
    }

    fn count(&self, op: Op) -> OpCount {
        self.counts[op.index()]
    }
}

/// Two earlier snapshots, at least one second apart once there are two.
#[derive(Debug)]
pub(super) struct History {
    before: CounterSnapshot,
    last: CounterSnapshot,
}

impl History {
    pub(super) fn new(first: CounterSnapshot) -> Self {
        Self { before: first.clone(), last: first }
    }

    /// Adds the present snapshot. Returns the earlier snapshot to compare it with.
    pub(super) fn step(&mut self, present: CounterSnapshot) -> (CounterSnapshot, CounterSnapshot) {
        if present.at.since(self.last.at) >= STEP_MIN {
            self.before = std::mem::replace(&mut self.last, present.clone());
        }
        (self.before.clone(), present)
    }
}

/// GET /metrics/summary
pub(super) async fn show(State(admin): AdminContext) -> Response {
    let (before, present) = admin.snapshots();
    let master = line(&before, &present);
    text_reply(format!(
        "role=leader, state=serving, service_ready=true, master={{{master}}}, ha={{{NO_FOLLOWERS}}}"
    ))
}

/// Formats the totals, and the calls per second since the earlier snapshot.
pub fn line(before: &CounterSnapshot, present: &CounterSnapshot) -> String {
    let t = &present.totals;
    let mut text = format!(
        "Mem Storage: {} / {} ({:.1}%) | NVMe-oF SSD: 0 B / 0 B | SSD Storage: 0 B / 0 B | Keys: {} (soft-pinned: {}) | Clients: {}",
        ByteSize(t.used),
        ByteSize(t.capacity),
        share(t.used, t.capacity),
        t.keys,
        t.soft_pinned_keys,
        t.clients,
    );
    text.push_str(" | Requests (Success/Total per sec): ");
    for (i, (name, op)) in SINGLE.into_iter().enumerate() {
        let (old, new) = (before.count(op), present.count(op));
        let total = new.single - old.single;
        let good = total.saturating_sub(new.single_failed - old.single_failed);
        let separator = if i == 0 { "" } else { ", " };
        let (good, total) = (per_second(before, present, good), per_second(before, present, total));
        let _ = write!(text, "{separator}{name}={good:.1}/{total:.1}");
    }
    for name in UNSUPPORTED_CALLS {
        let _ = write!(text, ", {name}=0.0/0.0");
    }
    text.push_str(
        " | Batch Requests (per sec, Req=Success/PartialSuccess/Total, Item=Success/Total): ",
    );
    for (i, (name, op)) in BATCH.into_iter().enumerate() {
        let (old, new) = (before.count(op), present.count(op));
        let each = |pick: fn(&OpCount) -> u64| {
            per_second(before, present, pick(&new).saturating_sub(pick(&old)))
        };
        let separator = if i == 0 { "" } else { ", " };
        let _ = write!(
            text,
            "{separator}{name}:(Req={:.1}/{:.1}/{:.1}, Item={:.1}/{:.1})",
            each(|c| c.batches - c.batches_failed - c.batches_partial),
            each(|c| c.batches_partial),
            each(|c| c.batches),
            each(|c| c.items - c.items_failed),
            each(|c| c.items),
        );
    }
    for name in UNSUPPORTED_BATCHES {
        let _ = write!(text, ", {name}:(Req=0.0/0.0/0.0, Item=0.0/0.0)");
    }
    for (name, op) in TASKS {
        let (old, new) = (before.count(op), present.count(op));
        let total = new.all_items().saturating_sub(old.all_items());
        let good = total.saturating_sub(new.all_failed().saturating_sub(old.all_failed()));
        let (good, total) = (per_second(before, present, good), per_second(before, present, total));
        let _ = write!(text, ", {name}:(Req={good:.1}/{total:.1})");
    }
    evictions(&mut text, t);
    let _ = write!(
        text,
        " | Promotion: in_flight=0, admitted=0, completed=0, failed=0, cancelled=0, expired=0, \
         bytes=0 B, rejected(freq/wm/cap)=0/0/0 | Snapshots: Success={}, Fail={}",
        present.snapshots, present.log_failures,
    );
    text
}

/// Formats the totals for the log, with the calls per second and the events since the earlier
/// snapshot. Leaves out what did not happen.
pub fn log_line(before: &CounterSnapshot, present: &CounterSnapshot) -> String {
    let t = &present.totals;
    let (used, capacity) = (ByteSize(t.used), ByteSize(t.capacity));
    let percent = share(t.used, t.capacity);
    let (keys, clients) = (t.keys, t.clients);
    let mut text =
        format!("memory={used} of {capacity} ({percent:.1} %) objects={keys} clients={clients}");
    for (op, name, _) in Op::all() {
        let (old, new) = (before.count(op), present.count(op));
        let total = new.all_items().saturating_sub(old.all_items());
        if total > 0 {
            let _ = write!(text, " {name}={:.1}/s", per_second(before, present, total));
        }
        let failures = new.all_failed().saturating_sub(old.all_failed());
        if failures > 0 {
            let _ = write!(text, " {name}_failed={failures}");
        }
    }
    let (old, new) = (&before.totals.counters, &t.counters);
    let events = [
        ("evicted", old.evicted_keys, new.evicted_keys),
        ("puts_without_memory", old.puts_without_room, new.puts_without_room),
        ("puts_with_fewer_copies", old.puts_with_fewer_copies, new.puts_with_fewer_copies),
        ("clients_expired", old.clients_expired, new.clients_expired),
        ("snapshots", before.snapshots, present.snapshots),
        ("log_failures", before.log_failures, present.log_failures),
    ];
    for (name, old, new) in events.into_iter().filter(|(_, old, new)| new > old) {
        let _ = write!(text, " {name}={}", new - old);
    }
    let evicted = new.evicted_bytes.saturating_sub(old.evicted_bytes);
    if evicted > 0 {
        let _ = write!(text, " evicted_size={}", ByteSize(evicted));
    }
    text
}

fn evictions(text: &mut String, t: &Totals) {
    let c = &t.counters;
    let _ = write!(
        text,
        " | Eviction: Success/Attempts={0}/{1}, AllocFail={2}, PartialAlloc={3}, keys={4}, \
         size={5} | Mem Eviction: Success/Attempts={0}/{1}, keys={4}, size={5} | NoF Eviction: \
         Success/Attempts=0/0, keys=0, size=0 B | Discard: Released/Total={6}/{7}, \
         StagingSize={8}",
        c.evictions_succeeded,
        c.evictions_attempted,
        c.puts_without_room,
        c.puts_with_fewer_copies,
        c.evicted_keys,
        ByteSize(c.evicted_bytes),
        c.puts_released,
        c.puts_displaced,
        ByteSize(t.writing),
    );
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 * 100.0 }
}

fn per_second(before: &CounterSnapshot, present: &CounterSnapshot, count: u64) -> f64 {
    let seconds = present.at.since(before.at).as_secs_f64();
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PUT_START: Op = Op::Call(Method::PutStart);

    fn at(seconds: u64, puts: u64) -> CounterSnapshot {
        let mut counts = vec![OpCount::default(); Op::COUNT];
        counts[PUT_START.index()].single = puts;
        let at = Moment::from_boot(Duration::from_secs(seconds));
        CounterSnapshot { at, totals: Totals::default(), counts, snapshots: 0, log_failures: 0 }
    }

    #[test]
    fn rates_are_per_second_since_earlier_snapshot() {
        let text = line(&at(10, 100), &at(20, 200));
        assert!(text.contains("PutStart=10.0/10.0"), "{text}");
        assert!(text.contains("0 B / 0 B (0.0%)"), "{text}");
    }

    #[test]
    fn log_line_leaves_out_what_did_not_happen() {
        let quiet = log_line(&at(10, 100), &at(20, 100));
        assert_eq!(quiet, "memory=0 B of 0 B (0.0 %) objects=0 clients=0");
        let mut present = at(20, 200);
        present.counts[PUT_START.index()].single_failed = 3;
        present.totals.counters.evicted_keys = 7;
        let busy = log_line(&at(10, 100), &present);
        let name = "put_start";
        assert_eq!(busy, format!("{quiet} {name}=10.0/s {name}_failed=3 evicted=7"));
    }

    #[test]
    fn summary_counts_tasks_and_snapshots() {
        let mut present = at(20, 0);
        present.snapshots = 3;
        let fetched = &mut present.counts[Op::Call(Method::FetchTasks).index()];
        (fetched.single, fetched.single_failed) = (100, 10);
        let text = line(&at(10, 0), &present);
        assert!(text.contains(", FetchTasks:(Req=9.0/10.0), MarkTaskToComplete:"), "{text}");
        assert!(text.contains("CreateMoveTask:(Req=0.0/0.0), CreateCopyTask:"), "{text}");
        assert!(text.ends_with("Snapshots: Success=3, Fail=0"), "{text}");
    }

    #[test]
    fn baseline_is_at_least_one_second_old() {
        let mut history = History::new(at(0, 0));
        let (before, _) = history.step(at(5, 1));
        assert_eq!(before.at, at(0, 0).at);
        let (before, _) = history.step(at(5, 2));
        assert_eq!(before.at, at(0, 0).at, "two calls within a second see the same past");
        let (before, _) = history.step(at(7, 3));
        assert_eq!(before.at, at(5, 0).at);
    }
}
