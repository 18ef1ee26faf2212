//! The metrics of one of several masters, on leaders and standbys.

use mooncake_base::exposition::{Exposition, Metric};

use crate::cluster::{counts::LogTotals, status::ClusterStatus};

pub(super) fn add(out: &mut Exposition, status: &ClusterStatus) {
    out.row("ha_", &STATUS, status);
    let totals = [(Vec::new(), &status.totals)];
    for metric in LogTotals::METRICS {
        out.metric(metric.name, metric, &totals);
        // Upstream has the counters of its log under both names.
        if metric.name.starts_with("ha_oplog_") {
            out.metric(&format!("{}_total", metric.name), metric, &totals);
        }
    }
    out.row("ha_", &CHANGES, status);
}

/// The state, and the progress of the log. Sequence numbers are those of its frames, each of which has the
/// changes that were written together.
static STATUS: [Metric<ClusterStatus>; 10] = [
    Metric::gauge("is_leader", "Whether this master leads.", |it| it.is_leader.into()),
    Metric::gauge(
        "standby_state",
        "0 starting, 1 recovering, 2 standby, 3 catching up, 4 elected, 5 serving.",
        |it| it.state_number as u64,
    ),
    Metric::gauge("promotable", "Whether this master could lead next, or leads.", |it| {
        it.is_promotable().into()
    }),
    Metric::gauge("view_version", "The number of the present leadership.", |it| {
        it.view.unwrap_or_default()
    }),
    Metric::gauge(
        "standbys_in_sync",
        "Standbys that have every change before it is acknowledged.",
        |it| it.standbys_in_sync() as u64,
    ),
    Metric::gauge("oplog_standby_lag", "Bytes of changes that the slowest standby lacks.", |it| {
        it.standbys.iter().map(|standby| standby.lag_bytes).max().unwrap_or_default()
    }),
    Metric::gauge("oplog_last_sequence_id", "The last frame in the log of this master.", |it| {
        it.next_frame.saturating_sub(1)
    }),
    // Frames are applied as they are received.
    Metric::gauge(
        "oplog_applied_sequence_id",
        "The last frame that this master has applied.",
        |it| it.next_frame.saturating_sub(1),
    ),
    Metric::gauge(
        "oplog_pending_entries",
        "Frames of the leader that a member of the in-sync set has not confirmed.",
        |it| it.next_frame - confirmed_frame(it),
    ),
    Metric::gauge(
        "batch_record_durable_sequence",
        "The last frame that all members of the in-sync set have, as the leader knows; at standbys the last own one.",
        |it| confirmed_frame(it).saturating_sub(1),
    ),
];

static CHANGES: [Metric<ClusterStatus>; 2] = [
    Metric::counter("state_transitions_total", "Changes of the state of this master.", |it| {
        it.transitions
    }),
    Metric::counter(
        "lease_service_errors_total",
        "Calls to the lease service that failed.",
        |it| it.service_errors,
    ),
];

/// A standby does not know what others have.
fn confirmed_frame(status: &ClusterStatus) -> u64 {
    if status.is_leader { status.confirmed_frame() } else { status.next_frame }
}
