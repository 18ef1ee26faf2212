//! What varies from run to run.

use std::time::Duration;

use mooncake_base::random::SplitMix64;

use crate::journal::LogSync;

/// A rule that a run leaves out, to see that its absence is found.
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
}

impl Bug {
    pub(super) const ALL: [Self; 9] = [
        Self::AnyConfirmation,
        Self::ShrinksFirst,
        Self::AttachesBlindly,
        Self::ReusesUnconfirmed,
        Self::IncompleteBids,
        Self::ChecksLeaseEarly,
        Self::MarksOwnLog,
        Self::RequiresLate,
        Self::JoinsEarly,
    ];
}

/// The plan of a run.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) seed: u64,
    pub(super) bug: Option<Bug>,
    pub(super) members: usize,
    pub(super) copies: usize,
    pub(super) sync: LogSync,
    /// Time after which a silent member is taken out of the set.
    pub(super) timeout: Duration,
    pub(super) faults: Faults,
}

/// How rare faults are: each happens at one step of so many, to one process or pair of them; 0: never.
#[derive(Debug, Clone)]
pub(super) struct Faults {
    pub(super) stop: usize,
    pub(super) kill: usize,
    /// A leader is killed while it writes: the standbys have what its file has not.
    pub(super) hanging_write: usize,
    pub(super) power_loss: usize,
    pub(super) wipe: usize,
    pub(super) partition: usize,
    pub(super) service_cut: usize,
    pub(super) service_away: usize,
    pub(super) service_emptied: usize,
    /// One message of so many.
    pub(super) late: usize,
    pub(super) lost: usize,
}

impl Plan {
    pub(super) fn new(seed: u64, bug: Option<Bug>) -> Self {
        let random = &mut SplitMix64::new(!seed);
        let members = 2 + random.below(2);
        let copies = if members > 2 && random.below(3) == 0 { 3 } else { 2 };
        let sync = match random.below(10) {
            0 => LogSync::Never,
            1..=3 => LogSync::Always,
            _ => LogSync::Interval(Duration::from_millis(100)),
        };
        let mut rarity = |usual: usize| match random.below(4) {
            0 => 0,
            1 => usual * 4,
            _ => usual,
        };
        let faults = Faults {
            stop: rarity(300),
            kill: rarity(300),
            power_loss: rarity(500),
            wipe: rarity(3000) * 2,
            partition: rarity(300),
            service_cut: rarity(300),
            service_away: rarity(500),
            service_emptied: rarity(1000) * 4,
            late: rarity(20),
            lost: rarity(40),
            hanging_write: rarity(300),
        };
        let timeout = Duration::from_millis(200);
        let plan = Self { seed, bug, members, copies, sync, timeout, faults };
        bug.map_or_else(|| plan.clone(), |bug| plan.clone().focused(bug))
    }

    /// The plan with the faults that a planted bug needs, so that few runs find it.
    fn focused(mut self, bug: Bug) -> Self {
        let none = Faults {
            stop: 0,
            kill: 0,
            hanging_write: 0,
            power_loss: 0,
            wipe: 0,
            partition: 0,
            service_cut: 0,
            service_away: 0,
            service_emptied: 0,
            late: 10,
            lost: 0,
        };
        self.timeout = Duration::from_millis(800);
        (self.members, self.copies) = (3, 3);
        self.faults = match bug {
            Bug::AnyConfirmation | Bug::ReusesUnconfirmed | Bug::MarksOwnLog => {
                Faults { kill: 150, partition: 60, ..none }
            }
            Bug::ShrinksFirst => {
                self.timeout = Duration::from_millis(200);
                Faults { kill: 200, partition: 60, service_cut: 60, ..none }
            }
            Bug::AttachesBlindly => Faults { kill: 80, late: 4, ..none },
            Bug::IncompleteBids => {
                self.sync = LogSync::Interval(Duration::from_millis(100));
                Faults { power_loss: 150, ..none }
            }
            Bug::ChecksLeaseEarly => Faults { stop: 100, ..none },
            Bug::RequiresLate => Faults { kill: 100, partition: 100, ..none },
            Bug::JoinsEarly => Faults { kill: 60, partition: 40, late: 8, ..none },
        };
        self
    }

    pub(super) fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }
}
