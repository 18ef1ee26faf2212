//! Metrics of the log: writes, durations of syncs, and the age of the last snapshot.

use mooncake_base::exposition::Exposition;

use crate::service::Service;

/// Adds the metrics. Without a log, adds only its health.
pub(super) fn add(out: &mut Exposition, service: &Service) {
    let status = service.journal_status();
    let help = "1: changes are being logged. 0: a restart would forget everything.";
    let is_healthy = status.as_ref().is_some_and(|status| status.is_healthy);
    out.gauge("mooncake_master_log_healthy", help, u8::from(is_healthy));
    let Some(s) = status else { return };
    for (name, help, value) in [
        ("failures", "Failures to write the log.", s.failures),
        ("written_bytes", "Bytes written to the log.", s.bytes_written),
        ("records", "Effects written to the log.", s.records),
        ("writes", "Writes to the log, each of one or more effects.", s.writes),
        ("snapshots", "Snapshots taken.", s.snapshots),
        ("syncs", "Syncs of the log to disk.", s.syncs),
    ] {
        out.counter(&format!("mooncake_master_log_{name}_total"), help, value);
    }
    out.counter(
        "mooncake_master_log_sync_seconds_total",
        "Total duration of the syncs of the log.",
        s.sync_time.as_secs_f64(),
    );
    let age = s.snapshot_at.map(|at| service.now().since(at).as_secs_f64());
    for (name, help, value) in [
        (
            "sync_seconds_max",
            "Duration of the longest sync of the log.",
            s.sync_time_max.as_secs_f64(),
        ),
        (
            "snapshot_duration_seconds",
            "Duration of the last snapshot.",
            s.snapshot_time.as_secs_f64(),
        ),
        ("bytes", "Bytes of the log since the last snapshot.", s.log_bytes as f64),
        ("snapshot_bytes", "Bytes of the last snapshot.", s.snapshot_bytes as f64),
        (
            "snapshot_age_seconds",
            "Age of the last snapshot; -1: none since the start.",
            age.unwrap_or(-1.0),
        ),
        (
            "recovery_seconds",
            "Duration of the recovery from the log at the start.",
            s.recovery_time.as_secs_f64(),
        ),
    ] {
        out.gauge(&format!("mooncake_master_log_{name}"), help, value);
    }
}
