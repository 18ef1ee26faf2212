//! Metrics of promotions, the objects that come back from disk to memory.

use mooncake_base::exposition::{Exposition, Metric};

use crate::state::{Counters, Totals};

/// Upstream's names of metrics, where they differ from ours.
const UPSTREAM: [(&str, &str); 7] = [
    ("refused_total", "rejected_cap_total"),
    ("without_room_total", "rejected_watermark_total"),
    ("too_few_hits_total", "rejected_frequency_total"),
    ("candidates_total", "candidate_recorded_total"),
    ("candidates_admitted_total", "candidate_admitted_total"),
    ("candidates_dropped_total", "candidate_dropped_limit_total"),
    ("candidates_expired_total", "candidate_expired_evaluated_total"),
];

static UNDERWAY: Metric<Totals> = Metric::gauge(
    "promotions",
    "Objects that wait to come back from disk to memory, or are being written there.",
    |it| it.promotions_underway,
);

/// Adds the metrics.
pub(super) fn add(out: &mut Exposition, totals: &Totals) {
    out.row("mooncake_master_promotion_", Counters::PROMOTIONS, &totals.counters);
    out.metric("mooncake_master_promotions", &UNDERWAY, &[(Vec::new(), totals)]);
}

/// Adds the metrics under upstream's names.
pub(super) fn add_upstream(out: &mut Exposition, totals: &Totals) {
    for metric in Counters::PROMOTIONS {
        let name = UPSTREAM.iter().find(|(own, _)| *own == metric.name);
        let name = name.map_or(metric.name, |(_, name)| name);
        let rows = [(Vec::new(), &totals.counters)];
        out.metric(&format!("master_promotion_{name}"), metric, &rows);
    }
    out.metric("master_promotion_in_flight", &UNDERWAY, &[(Vec::new(), totals)]);
}
