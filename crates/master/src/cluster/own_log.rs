//! The log of a member when it starts to follow, and when it begins to lead.

use std::{collections::BTreeSet, sync::Arc};

use mooncake_base::{Clock, Result, SegmentId};
use mooncake_election::{Overruled, View};
use mooncake_proto::standby::ViewStart;

use super::member::Membership;
use crate::journal::{Directory, LogSync, RecoveredJournal, StandbyLog};

/// The beginning of a leadership.
#[derive(Debug)]
pub(super) struct NewTerm {
    pub(super) view: View,
    /// The members, the leader excluded, that must have a change before it is acknowledged.
    pub(super) required: BTreeSet<String>,
    /// Whether others may have changes that this member lacks.
    pub(super) overruled: Overruled,
    /// The clock by which standbys are silent.
    pub(super) clock: Arc<dyn Clock>,
}

/// Opens the log to follow. Records it if the log may lack changes that this member has confirmed.
///
/// # Errors
/// The log is damaged, or cannot be read or written.
pub(super) fn open(
    directory: Arc<Directory>,
    sync: LogSync,
    membership: &mut Membership,
) -> Result<StandbyLog> {
    let log = StandbyLog::open(directory, sync)?;
    let is_lost = log.is_empty() && !membership.views().is_empty();
    // What an earlier boot lost, the member has received again since.
    let lacks_end = log.may_lack_end() && !membership.was_completed_in_this_boot();
    if membership.is_complete() && (lacks_end || log.has_lost_frame() || is_lost) {
        tracing::warn!(
            "the log may lack changes that this member has confirmed, because its machine went \
             down; it does not lead while the in-sync set names others, until it has followed one"
        );
        membership.set_complete(false)?;
    }
    Ok(log)
}

/// Ends following, and begins the log of a leader. Changes wait for the required members from the first
/// one on.
///
/// # Errors
/// A file cannot be written.
pub(super) fn lead(
    mut log: StandbyLog,
    membership: &mut Membership,
    term: NewTerm,
) -> Result<RecoveredJournal> {
    if term.overruled == Overruled::Others {
        tracing::error!(
            "this master leads by --force_leader although others had changes that it lacks: memory \
             may have been used for other objects since, so that it forgets all objects"
        );
        log.begin_anew(SegmentId::random().to_bytes())?;
    }
    membership.lead(ViewStart { view: term.view.0, first_frame: log.place().1 })?;
    let mut recovered = log.lead(membership.is_complete())?;
    membership.set_complete(true)?;
    if term.overruled == Overruled::LostSet {
        recovered.image.set_may_lack_versions();
    }
    recovered.set_clock(term.clock);
    recovered.journal.require_standbys(&term.required);
    Ok(recovered)
}

#[cfg(test)]
mod tests {
    use mooncake_base::SystemClock;

    use super::*;
    use crate::{
        journal::{Journal, SimulatedDisk},
        state::Effect,
    };

    /// Opens the log of a member on a disk.
    fn open_on(disk: &SimulatedDisk, sync: LogSync) -> (StandbyLog, Membership) {
        let directory = Arc::new(Directory::on(Arc::new(disk.clone())));
        let mut membership = Membership::open(Arc::clone(&directory)).unwrap();
        let log = open(directory, sync, &mut membership).unwrap();
        (log, membership)
    }

    /// Begins to lead in the first view.
    fn lead_with(
        log: StandbyLog,
        membership: &mut Membership,
        required: BTreeSet<String>,
    ) -> Journal {
        let clock = SystemClock::shared();
        let term = NewTerm { view: View(1), required, overruled: Overruled::Nothing, clock };
        lead(log, membership, term).unwrap().journal
    }

    fn append_quota(journal: &Journal) -> u64 {
        journal.append(|into| {
            Effect::Quota { tenant: "tenant", bytes: None }.encode(into);
            1
        })
    }

    #[test]
    fn first_change_of_a_leader_waits_for_the_set() {
        for required in [BTreeSet::new(), BTreeSet::from(["b".to_owned()])] {
            let (log, mut membership) = open_on(&SimulatedDisk::default(), LogSync::Never);
            let is_alone = required.is_empty();
            let journal = lead_with(log, &mut membership, required);
            let position = journal.append(|into| {
                into.push(0);
                1
            });
            journal.write_only();
            assert_eq!(journal.is_durable(position), is_alone);
            assert_eq!(membership.views(), [ViewStart { view: 1, first_frame: 1 }]);
        }
    }

    #[test]
    fn torn_write_of_a_synced_log_was_never_confirmed() {
        for (sync, is_complete) in [(LogSync::Always, true), (LogSync::Never, false)] {
            let disk = SimulatedDisk::default();
            let (log, mut membership) = open_on(&disk, sync);
            let journal = lead_with(log, &mut membership, BTreeSet::new());
            journal.wait_durable(append_quota(&journal)).unwrap();
            let confirmed_end = journal.end_frame();
            append_quota(&journal);
            journal.write_only();
            drop(journal);
            // A part of the last frame reached the disk.
            disk.lose_power(&mut |below| below / 2);
            let (log, membership) = open_on(&disk, sync);
            assert_eq!(membership.is_complete(), is_complete, "{sync:?}");
            assert!(!is_complete || log.place().1 == confirmed_end);
        }
    }

    #[test]
    fn log_that_was_completed_since_the_crash_stays_complete() {
        const SYNC: LogSync = LogSync::Interval(std::time::Duration::from_secs(3600));
        let disk = SimulatedDisk::default();
        let open = || open_on(&disk, SYNC);
        let (log, mut membership) = open();
        let journal = lead_with(log, &mut membership, BTreeSet::new());
        append_quota(&journal);
        journal.write_only();
        drop(journal);
        assert!(open().1.is_complete(), "it was only killed");
        disk.lose_power(&mut |below| below - 1);
        let (log, mut membership) = open();
        assert!(!membership.is_complete(), "the end of the log may be lost");
        assert!(membership.complete().unwrap());
        drop(log);
        assert!(open().1.is_complete(), "it has followed to the end since, and was only killed");
        disk.lose_power(&mut |below| below - 1);
        assert!(!open().1.is_complete());
    }
}
