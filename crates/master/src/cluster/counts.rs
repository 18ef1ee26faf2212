//! Counts of what a member has sent and received of the log since its process began.

use std::sync::atomic::{AtomicU64, Ordering};

/// The counters, which the threads of a member share.
#[derive(Debug, Default)]
pub(super) struct LogCounts {
    sent_bytes: AtomicU64,
    applied_frames: AtomicU64,
    refused: AtomicU64,
    replacements_begun: AtomicU64,
    replacements: AtomicU64,
    disconnections: AtomicU64,
}

/// The values of the counters at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct LogTotals {
    /// Bytes of frames and snapshots that were sent to standbys.
    pub(crate) sent_bytes: u64,
    /// Frames of a leader that were applied.
    pub(crate) applied_frames: u64,
    /// Frames and snapshots of a leader that were damaged or out of turn.
    pub(crate) refused: u64,
    /// How often the log of a leader began to replace the own one.
    pub(crate) replacements_begun: u64,
    /// How often the log of a leader has replaced the own one.
    pub(crate) replacements: u64,
    /// Connections to a leader that broke.
    pub(crate) disconnections: u64,
}

impl LogCounts {
    pub(super) fn add_sent(&self, bytes: usize) {
        self.sent_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn add_applied(&self, frames: u64) {
        self.applied_frames.fetch_add(frames, Ordering::Relaxed);
    }

    pub(super) fn add_refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn begin_replacement(&self) {
        self.replacements_begun.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn end_replacement(&self) {
        self.replacements.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn add_disconnection(&self) {
        self.disconnections.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn totals(&self) -> LogTotals {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        LogTotals {
            sent_bytes: read(&self.sent_bytes),
            applied_frames: read(&self.applied_frames),
            refused: read(&self.refused),
            replacements_begun: read(&self.replacements_begun),
            replacements: read(&self.replacements),
            disconnections: read(&self.disconnections),
        }
    }
}
