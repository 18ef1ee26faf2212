//! What the owner of a directory of records does next, and until when it may read objects that it
//! takes over.

use std::{collections::HashSet, hash::Hash, time::Duration};

use mooncake_base::{ErrorCode, Moment};

/// Margin subtracted from the window of a hand-over, since the local clock and the master's may run at
/// different speeds.
const WINDOW_MARGIN: Duration = Duration::from_millis(50);

/// The next step of the owner of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DirectoryStep {
    /// Mount the directory. Report with [`DirectorySession::mounted`].
    Mount,
    /// Report all records. Report the end with [`DirectorySession::reported`].
    ReportAll,
    /// Report lost records, then take over objects and report what became of them.
    TakeOver,
}

/// What the master knows of a directory, as far as its owner can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DirectorySession {
    /// The registration of the client after which the directory was mounted; `None`: it must be
    /// mounted again.
    registrations: Option<u64>,
    /// Whether all records were reported since.
    is_reported: bool,
}

impl DirectorySession {
    /// Returns the next step of a client that has registered so often. Until the master has all
    /// records, its list is not that of the directory.
    pub fn next_step(&self, registrations: u64) -> DirectoryStep {
        match self.registrations {
            Some(known) if known == registrations && self.is_reported => DirectoryStep::TakeOver,
            Some(known) if known == registrations => DirectoryStep::ReportAll,
            _ => DirectoryStep::Mount,
        }
    }

    /// Records that the directory was mounted after the client had registered so often.
    pub fn mounted(&mut self, registrations: u64) {
        *self = Self { registrations: Some(registrations), is_reported: false };
    }

    /// Records that the master has all records.
    pub fn reported(&mut self) {
        self.is_reported = true;
    }

    /// Records that a call about the directory failed.
    pub fn failed(&mut self, code: ErrorCode) {
        if code == ErrorCode::SEGMENT_NOT_FOUND {
            // The master has lost the directory.
            *self = Self::default();
        }
    }

    /// Records that the master may not know what became of objects that were taken over: it must learn
    /// of these records some other way.
    pub fn report_failed(&mut self) {
        *self = Self::default();
    }
}

/// Returns until when objects may be read that a call sent at `asked` took over, under a fence of this
/// length.
pub fn hand_over_end(asked: Moment, window: Duration) -> Moment {
    asked + window.saturating_sub(WINDOW_MARGIN)
}

/// Removes records from `added` that went for later ones of the same batch: the directory has them no
/// more.
pub fn leave_out_dropped<N: Eq + Hash>(added: &mut Vec<(N, u64)>, dropped: &[N]) {
    let dropped: HashSet<&N> = dropped.iter().collect();
    added.retain(|(name, _)| !dropped.contains(name));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_is_mounted_after_each_registration() {
        let mut session = DirectorySession::default();
        assert_eq!(session.next_step(1), DirectoryStep::Mount);
        session.mounted(1);
        assert_eq!(session.next_step(1), DirectoryStep::ReportAll);
        session.reported();
        assert_eq!(session.next_step(1), DirectoryStep::TakeOver);
        assert_eq!(session.next_step(2), DirectoryStep::Mount);
        session.mounted(2);
        assert_eq!(session.next_step(2), DirectoryStep::ReportAll);
    }

    #[test]
    fn directory_is_mounted_again_where_the_master_may_know_less() {
        let mut known = DirectorySession::default();
        known.mounted(1);
        known.reported();
        let mut session = known;
        session.failed(ErrorCode::RPC_TIMEOUT);
        assert_eq!(session.next_step(1), DirectoryStep::TakeOver);
        session.failed(ErrorCode::SEGMENT_NOT_FOUND);
        assert_eq!(session.next_step(1), DirectoryStep::Mount);
        known.report_failed();
        assert_eq!(known.next_step(1), DirectoryStep::Mount);
    }

    #[test]
    fn record_dropped_by_its_own_batch_is_not_added() {
        let mut added = vec![("a", 1), ("b", 2), ("c", 3)];
        leave_out_dropped(&mut added, &["b", "e"]);
        assert_eq!(added, [("a", 1), ("c", 3)]);
    }

    #[test]
    fn hand_over_ends_before_its_window() {
        let asked = Moment::from_boot(Duration::from_secs(1));
        assert_eq!(hand_over_end(asked, Duration::from_millis(40)), asked);
        let end = asked + Duration::from_millis(1950);
        assert_eq!(hand_over_end(asked, Duration::from_secs(2)), end);
    }
}
