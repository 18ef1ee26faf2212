//! The metrics of one of several masters, on leaders and standbys.

use mooncake_base::exposition::Exposition;

use crate::cluster::status::ClusterStatus;

pub(super) fn add(out: &mut Exposition, status: &ClusterStatus) {
    let in_sync = status.standbys.iter().filter(|s| s.is_required && s.is_attached).count() as u64;
    let lag = status.standbys.iter().map(|standby| standby.lag_bytes).max().unwrap_or_default();
    out.gauge("ha_is_leader", "Whether this master leads.", u64::from(status.is_leader));
    out.gauge(
        "ha_standby_state",
        "0 starting, 1 recovering, 2 standby, 3 catching up, 4 elected, 5 serving.",
        status.state_number as u64,
    );
    out.gauge(
        "ha_promotable",
        "Whether this master could lead next, or leads.",
        u64::from(status.is_promotable()),
    );
    out.gauge(
        "ha_view_version",
        "The number of the present leadership.",
        status.view.unwrap_or_default(),
    );
    out.gauge(
        "ha_standbys_in_sync",
        "Standbys that have every change before it is acknowledged.",
        in_sync,
    );
    out.gauge("ha_oplog_standby_lag", "Bytes of changes that the slowest standby lacks.", lag);
    add_log(out, status);
    out.counter(
        "ha_state_transitions_total",
        "Changes of the state of this master.",
        status.transitions,
    );
    out.counter(
        "ha_lease_service_errors_total",
        "Calls to the lease service that failed.",
        status.service_errors,
    );
}

/// The progress of the log. Sequence numbers are those of its frames, each of which has the changes that
/// were written together.
fn add_log(out: &mut Exposition, status: &ClusterStatus) {
    let last = status.next_frame.saturating_sub(1);
    out.gauge("ha_oplog_last_sequence_id", "The last frame in the log of this master.", last);
    // Frames are applied as they are received.
    out.gauge("ha_oplog_applied_sequence_id", "The last frame that this master has applied.", last);
    // A standby does not know what others have.
    let confirmed = if status.is_leader { status.confirmed_frame() } else { status.next_frame };
    out.gauge(
        "ha_oplog_pending_entries",
        "Frames of the leader that a member of the in-sync set has not confirmed.",
        status.next_frame - confirmed,
    );
    out.gauge(
        "ha_batch_record_durable_sequence",
        "The last frame that all members of the in-sync set have, as the leader knows; at standbys the last own one.",
        confirmed.saturating_sub(1),
    );
    let totals = &status.totals;
    for (name, help, count) in [
        (
            "ha_shipped_bytes_total",
            "Bytes of the log that were sent to standbys.",
            totals.sent_bytes,
        ),
        (
            "ha_oplog_applied_entries",
            "Frames of a leader that were applied.",
            totals.applied_frames,
        ),
        (
            "ha_oplog_checksum_failures",
            "Frames and snapshots of a leader that were refused: damaged, or out of turn.",
            totals.refused,
        ),
        (
            "ha_oplog_gap_resolve_attempts",
            "Times that the log of a leader began to replace that of this master.",
            totals.replacements_begun,
        ),
        (
            "ha_oplog_gap_resolve_success",
            "Times that the log of a leader has replaced that of this master.",
            totals.replacements,
        ),
        (
            "ha_oplog_watch_disconnections",
            "Connections to a leader that broke.",
            totals.disconnections,
        ),
    ] {
        out.counter(name, help, count);
        // Upstream has the counters of its log under both names.
        if name.starts_with("ha_oplog_") {
            out.counter(&format!("{name}_total"), help, count);
        }
    }
}
