//! Metrics of promotions, the objects that come back from disk to memory.

use mooncake_base::exposition::Exposition;

use crate::state::Totals;

/// A metric: the end of our name, that of upstream's, help and value.
type Row = (&'static str, &'static str, &'static str, fn(&Totals) -> u64);

/// Adds the metrics.
pub(super) fn add(out: &mut Exposition, totals: &Totals) {
    for (name, _, help, value) in ROWS {
        let name = format!("mooncake_master_promotion_{name}_total");
        out.counter(&name, help, value(totals));
    }
    out.gauge("mooncake_master_promotions", UNDERWAY, totals.promotions_underway);
}

/// Adds the metrics under upstream's names.
pub(super) fn add_upstream(out: &mut Exposition, totals: &Totals) {
    for (_, name, help, value) in ROWS {
        let name = format!("master_promotion_{name}_total");
        out.counter(&name, help, value(totals));
    }
    out.gauge("master_promotion_in_flight", UNDERWAY, totals.promotions_underway);
}

const UNDERWAY: &str =
    "Objects that wait to come back from disk to memory, or are being written there.";

const ROWS: &[Row] = &[
    (
        "admitted",
        "admitted",
        "Objects on disk that were asked for or read often, and are to come back to memory.",
        |t| t.counters.promotions_admitted,
    ),
    ("completed", "completed", "Objects that came back from disk to memory.", |t| {
        t.counters.promotions_done
    }),
    ("completed_bytes", "completed_bytes", "Bytes of these objects.", |t| {
        t.counters.promoted_bytes
    }),
    (
        "failed",
        "failed",
        "Objects that could not be read from disk, or not be written to memory.",
        |t| t.counters.promotions_failed,
    ),
    ("expired", "expired", "Objects that did not come back because the disk was too slow.", |t| {
        t.counters.promotions_expired
    }),
    (
        "cancelled",
        "cancelled",
        "Objects that were removed or replaced, or whose disk left, meanwhile.",
        |t| t.counters.promotions_cancelled,
    ),
    (
        "refused",
        "rejected_cap",
        "Objects that did not come back because more than --promotion_queue_limit waited.",
        |t| t.counters.promotions_refused,
    ),
    (
        "without_room",
        "rejected_watermark",
        "Objects that did not come back because no memory could be freed for them.",
        |t| t.counters.promotions_without_room,
    ),
    (
        "too_few_hits",
        "rejected_frequency",
        "Reads from disk that were too few to bring the object back (--promotion_on_hit).",
        |t| t.counters.promotions_too_few_hits,
    ),
    ("candidates", "candidate_recorded", "Objects whose reads from disk were counted.", |t| {
        t.counters.promotion_candidates
    }),
    (
        "candidates_admitted",
        "candidate_admitted",
        "Objects that were read from disk often enough to come back.",
        |t| t.counters.promotion_candidates_admitted,
    ),
    (
        "candidates_dropped",
        "candidate_dropped_limit",
        "Objects whose reads were not counted because those of too many were.",
        |t| t.counters.promotion_candidates_dropped,
    ),
    (
        "candidates_expired",
        "candidate_expired_evaluated",
        "Objects that were not read from disk often enough within a minute.",
        |t| t.counters.promotion_candidates_expired,
    ),
];
