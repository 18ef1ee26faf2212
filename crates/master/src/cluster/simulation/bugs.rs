//! Planted bugs: rules that a run leaves out, to see that their absence is found.

use std::time::Duration;

use super::plan::{Faults, LARGE_PAGE, LONG_WINDOW, MEDIUM_PAGE, Plan, SHORT_WINDOW, SMALL_PAGE};
use crate::journal::LogSync;

/// A rule that a run leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bug {
    /// A change is acknowledged once any member has confirmed it.
    AnyConfirmation,
    /// Changes stop to wait for a silent member before the lease service has taken it out.
    ShrinksFirst,
    /// A standby goes on from its place without a comparison of views.
    AttachesBlindly,
    /// Freed memory is granted again before the standbys have the record of its release.
    ReusesUnconfirmed,
    /// A member that may lack changes takes part in the election.
    IncompleteBids,
    /// The lease is checked when a call is executed, and not when it is answered.
    ChecksLeaseEarly,
    /// Clients hear of the frames that the leader has, and not of those that all members have.
    MarksOwnLog,
    /// The first changes of a leader do not wait for standbys.
    RequiresLate,
    /// A member joins the set before it has the changes that were acknowledged without it.
    JoinsEarly,
    /// A fence is granted before the standbys have the record that fences are that long.
    FencesUnconfirmed,
    /// A client takes answers of views below those that it has seen. The check of the lease at each answer
    /// guards the same while clocks run: this one is found where the clock of a leader stands still.
    TakesEarlierViews,
    /// A leader grants free memory at once that readers and writers of the leader before may still use.
    UsesRestingMemory,
    /// A put starts before the standbys have its record, in memory that was not prepared.
    StartsUnlogged,
    /// A message between members is taken although its checksum is that of other bytes.
    TrustsDamage,
    /// A standby follows the leader of an earlier view, which sends its log although its lease is over. Each
    /// side guards the same.
    FollowsEarlierView,
    /// A leader hands over to a standby that is not in the set, and may lack changes.
    HandsOverEarly,
}

impl Bug {
    /// All bugs, each of which is found.
    pub(super) const ALL: [Self; 16] = [
        Self::AnyConfirmation,
        Self::ShrinksFirst,
        Self::AttachesBlindly,
        Self::ReusesUnconfirmed,
        Self::IncompleteBids,
        Self::ChecksLeaseEarly,
        Self::MarksOwnLog,
        Self::RequiresLate,
        Self::JoinsEarly,
        Self::FencesUnconfirmed,
        Self::TakesEarlierViews,
        Self::UsesRestingMemory,
        Self::StartsUnlogged,
        Self::TrustsDamage,
        Self::HandsOverEarly,
        Self::FollowsEarlierView,
    ];
}

impl Plan {
    /// The plan with the faults that a planted bug needs, so that few runs find it.
    pub(super) fn focused(mut self, bug: Bug) -> Self {
        let none = Faults { late: 10, ..Faults::default() };
        self.timeout = Duration::from_millis(800);
        (self.members, self.copies) = (3, 3);
        (self.page_bytes, self.write_window) = (SMALL_PAGE, SHORT_WINDOW);
        self.faults = match bug {
            Bug::AnyConfirmation | Bug::MarksOwnLog => {
                Faults { kill: 400, isolation: 200, partition: 200, ..none }
            }
            Bug::ReusesUnconfirmed => Faults { kill: 150, partition: 60, ..none },
            Bug::ShrinksFirst => {
                self.timeout = Duration::from_millis(200);
                Faults { kill: 200, partition: 60, service_cut: 60, ..none }
            }
            Bug::AttachesBlindly => Faults { kill: 80, late: 4, ..none },
            Bug::IncompleteBids => {
                self.sync = LogSync::Interval(Duration::from_secs(1));
                Faults { power_loss: 150, ..none }
            }
            Bug::ChecksLeaseEarly => Faults { stop: 100, ..none },
            Bug::RequiresLate => Faults { kill: 100, partition: 100, ..none },
            Bug::JoinsEarly => Faults { kill: 60, partition: 40, late: 8, ..none },
            Bug::FencesUnconfirmed => {
                self.page_bytes = LARGE_PAGE;
                Faults { fence_isolation: 1, ..none }
            }
            Bug::TakesEarlierViews => Faults { clock_stop: 120, lost: 20, ..none },
            Bug::UsesRestingMemory => {
                self.page_bytes = MEDIUM_PAGE;
                self.timeout = Duration::from_millis(200);
                Faults { reader_shutdown: 1, ..Faults::default() }
            }
            Bug::StartsUnlogged => {
                self.write_window = LONG_WINDOW;
                self.timeout = Duration::from_millis(200);
                Faults { isolation: 300, ..none }
            }
            Bug::TrustsDamage => {
                (self.members, self.copies) = (2, 2);
                Faults { damaged: 10, kill: 300, isolation: 200, partition: 200, ..none }
            }
            Bug::FollowsEarlierView => Faults { leader_return: 100, late: 20, ..none },
            Bug::HandsOverEarly => {
                self.copies = 2;
                Faults { handover: 60, partition: 60, late: 4, ..none }
            }
        };
        self
    }
}
