//! Metrics of the log: writes, durations of syncs, and the age of the last snapshot.

use mooncake_base::{
    Moment,
    exposition::{Exposition, Metric},
};

use crate::{JournalStatus, service::Service};

/// Adds the metrics. Without a log, adds only its health.
pub(super) fn add(out: &mut Exposition, service: &Service) {
    let status = service.journal_status();
    let help = "1: changes are being logged. 0: a restart would forget everything.";
    let is_healthy = status.as_ref().is_some_and(|status| status.is_healthy);
    out.gauge("mooncake_master_log_healthy", help, u8::from(is_healthy));
    if let Some(status) = status {
        out.row("mooncake_master_log_", &LOG, &(status, service.now()));
    }
}

/// The metrics of a log at the present moment.
static LOG: [Metric<(JournalStatus, Moment)>; 13] = [
    Metric::counter("failures_total", "Failures to write the log.", |(it, _)| it.failures),
    Metric::counter("written_bytes_total", "Bytes written to the log.", |(it, _)| it.bytes_written),
    Metric::counter("records_total", "Effects written to the log.", |(it, _)| it.records),
    Metric::counter(
        "writes_total",
        "Writes to the log, each of one or more effects.",
        |(it, _)| it.writes,
    ),
    Metric::counter("snapshots_total", "Snapshots taken.", |(it, _)| it.snapshots),
    Metric::counter("syncs_total", "Syncs of the log to disk.", |(it, _)| it.syncs),
    Metric::total_seconds(
        "sync_seconds_total",
        "Total duration of the syncs of the log.",
        |(it, _)| it.sync_time.as_secs_f64(),
    ),
    Metric::seconds("sync_seconds_max", "Duration of the longest sync of the log.", |(it, _)| {
        it.sync_time_max.as_secs_f64()
    }),
    Metric::seconds("snapshot_duration_seconds", "Duration of the last snapshot.", |(it, _)| {
        it.snapshot_time.as_secs_f64()
    }),
    Metric::gauge("bytes", "Bytes of the log since the last snapshot.", |(it, _)| it.log_bytes),
    Metric::gauge("snapshot_bytes", "Bytes of the last snapshot.", |(it, _)| it.snapshot_bytes),
    Metric::seconds(
        "snapshot_age_seconds",
        "Age of the last snapshot; -1: none since the start.",
        |(it, now)| it.snapshot_at.map_or(-1.0, |at| now.since(at).as_secs_f64()),
    ),
    Metric::seconds(
        "recovery_seconds",
        "Duration of the recovery from the log at the start.",
        |(it, _)| it.recovery_time.as_secs_f64(),
    ),
];
