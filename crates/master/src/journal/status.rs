//! The status of the log, for metrics and the page.

use std::{path::PathBuf, time::Duration};

use mooncake_base::Moment;

/// The status of the log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JournalStatus {
    /// The state directory.
    pub path: PathBuf,
    /// Whether changes are being logged. If not, a restart forgets everything.
    pub is_healthy: bool,
    /// The last failure; empty if healthy.
    pub failure: String,
    /// Number of failures.
    pub failures: u64,
    /// Bytes written since the start.
    pub bytes_written: u64,
    /// Effects written since the start.
    pub records: u64,
    /// Writes since the start, each of a group of effects.
    pub writes: u64,
    /// Syncs since the start.
    pub syncs: u64,
    /// Total duration of the syncs.
    pub sync_time: Duration,
    /// Duration of the longest sync.
    pub sync_time_max: Duration,
    /// Bytes of the log since the last snapshot.
    pub log_bytes: u64,
    /// Bytes of the last snapshot.
    pub snapshot_bytes: u64,
    /// Completion time of the last snapshot; `None` if there was none since the start.
    pub snapshot_at: Option<Moment>,
    /// Snapshots since the start.
    pub snapshots: u64,
    /// Duration of the last snapshot.
    pub snapshot_time: Duration,
    /// Duration of the recovery: reading the log and rebuilding the state.
    pub recovery_time: Duration,
}
