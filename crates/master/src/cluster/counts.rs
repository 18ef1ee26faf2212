//! Counts of what a member has sent and received of the log since its process began.

use mooncake_base::counters;

counters! {
    /// The counters, which the threads of a member share.
    pub(super) struct LogCounts;
    /// The values of the counters at one moment.
    #[derive(Copy)]
    pub(crate) struct LogTotals {}
    METRICS {
        /// Bytes of the log that were sent to standbys.
        sent_bytes = counter "ha_shipped_bytes_total",
        /// Frames of a leader that were applied.
        applied_frames = counter "ha_oplog_applied_entries",
        /// Frames and snapshots of a leader that were refused: damaged, or out of turn.
        refused = counter "ha_oplog_checksum_failures",
        /// Times that the log of a leader began to replace that of this master.
        replacements_begun = counter "ha_oplog_gap_resolve_attempts",
        /// Times that the log of a leader has replaced that of this master.
        replacements = counter "ha_oplog_gap_resolve_success",
        /// Connections to a leader that broke.
        disconnections = counter "ha_oplog_watch_disconnections",
        /// Standbys, and at a standby all peers, that did not prove the token of this master.
        refused_tokens = counter "ha_refused_tokens_total",
    }
}
