//! The numbers of a moment, and the one line that sums them up.

use std::{fmt::Write as _, time::Duration};

use axum::{extract::State, response::Response};
use mooncake_base::{ByteSize, Moment};

use super::{Shared, text_reply};
use crate::{
    service::{
        Service,
        calls::{Count, Op},
    },
    state::Totals,
};

/// Rates are taken over at least this long.
const STEP_MIN: Duration = Duration::from_secs(1);

/// The single calls that the line shows.
const SINGLE: [(&str, Op); 8] = [
    ("PutStart", Op::PutStart),
    ("PutEnd", Op::PutEnd),
    ("PutRevoke", Op::PutRevoke),
    ("Get", Op::Locate),
    ("Exist", Op::Probe),
    ("Del", Op::Remove),
    ("DelAll", Op::RemoveAll),
    ("Ping", Op::Heartbeat),
];

/// The batches that the line shows.
const BATCH: [(&str, Op); 5] = [
    ("PutStart", Op::PutStart),
    ("PutEnd", Op::PutEnd),
    ("PutRevoke", Op::PutRevoke),
    ("Get", Op::Locate),
    ("ExistKey", Op::Probe),
];

/// The numbers of a moment.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// When it was taken.
    pub at: Moment,
    /// The sums over the pool.
    pub totals: Totals,
    /// What was asked, in the order of [`Op::ALL`].
    pub counts: Vec<Count>,
}

impl Snapshot {
    /// The numbers of now.
    pub fn take(service: &Service) -> Self {
        let counts = Op::ALL.iter().map(|(op, _, _)| service.calls().count(*op)).collect();
        Self { at: service.now(), totals: service.totals(), counts }
    }

    fn count(&self, op: Op) -> Count {
        self.counts.get(op as usize).copied().unwrap_or_default()
    }
}

/// Numbers of a moment ago, at least a second old once there were some.
#[derive(Debug)]
pub(super) struct History {
    before: Snapshot,
    last: Snapshot,
}

impl History {
    pub(super) fn new(first: Snapshot) -> Self {
        Self { before: first.clone(), last: first }
    }

    /// Takes the present in, and gives what to compare it with.
    pub(super) fn step(&mut self, present: Snapshot) -> (Snapshot, Snapshot) {
        if present.at.since(self.last.at) >= STEP_MIN {
            self.before = std::mem::replace(&mut self.last, present.clone());
        }
        (self.before.clone(), present)
    }
}

/// Calls a second, single and batched ones, between two moments.
pub(super) fn rate(before: &Snapshot, present: &Snapshot, op: Op) -> f64 {
    let (old, new) = (before.count(op), present.count(op));
    per_second(before, present, new.single + new.batches - old.single - old.batches)
}

/// GET /metrics/summary
pub(super) async fn show(State(admin): Shared) -> Response {
    let (before, present) = admin.snapshots();
    let master = line(&before, &present);
    text_reply(format!("role=leader, state=serving, service_ready=true, master={{{master}}}"))
}

/// The sums, and the calls a second since the earlier moment.
pub fn line(before: &Snapshot, present: &Snapshot) -> String {
    let t = &present.totals;
    let mut text = format!(
        "Mem Storage: {} / {} ({:.1}%) | Keys: {} (soft-pinned: {}) | Clients: {}",
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
    text.push_str(
        " | Batch Requests (per sec, Req=Success/PartialSuccess/Total, Item=Success/Total): ",
    );
    for (i, (name, op)) in BATCH.into_iter().enumerate() {
        let (old, new) = (before.count(op), present.count(op));
        let each = |pick: fn(&Count) -> u64| {
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
    let c = &t.counters;
    let _ = write!(
        text,
        " | Eviction: Success/Attempts={}/{}, AllocFail={}, PartialAlloc={}, keys={}, size={} \
         | Discard: Released/Total={}/{}, StagingSize={}",
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
    text
}

pub(super) fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 * 100.0 }
}

fn per_second(before: &Snapshot, present: &Snapshot, count: u64) -> f64 {
    let seconds = present.at.since(before.at).as_secs_f64();
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64, puts: u64) -> Snapshot {
        let mut counts = vec![Count::default(); Op::ALL.len()];
        counts[Op::PutStart as usize].single = puts;
        let at = Moment::from_boot(Duration::from_secs(seconds));
        Snapshot { at, totals: Totals::default(), counts }
    }

    #[test]
    fn rates_are_per_second_since_the_earlier_moment() {
        let text = line(&at(10, 100), &at(20, 200));
        assert!(text.contains("PutStart=10.0/10.0"), "{text}");
        assert!(text.contains("0 B / 0 B (0.0%)"), "{text}");
    }

    #[test]
    fn the_moment_to_compare_with_is_at_least_a_second_old() {
        let mut history = History::new(at(0, 0));
        let (before, _) = history.step(at(5, 1));
        assert_eq!(before.at, at(0, 0).at);
        let (before, _) = history.step(at(5, 2));
        assert_eq!(before.at, at(0, 0).at, "two calls within a second see the same past");
        let (before, _) = history.step(at(7, 3));
        assert_eq!(before.at, at(5, 0).at);
    }
}
