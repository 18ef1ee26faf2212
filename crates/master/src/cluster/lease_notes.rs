//! Notes of leases on their way from a leader to its standbys, so that a standby which takes over knows
//! what it may evict.

use std::time::Duration;

use mooncake_base::Moment;
use mooncake_proto::standby::Leases;

use crate::{service::Service, state::LeaseNotes};

/// Time between two looks of a leader at the leases that it has granted. Those of the last interval
/// before it dies are not known to its standbys.
const INTERVAL: Duration = Duration::from_millis(50);

/// Tells the standbys of a leader of leases.
#[derive(Debug, Default)]
pub(super) struct LeaseTeller {
    next: Moment,
}

impl LeaseTeller {
    /// Tells the standbys if it is time.
    pub(super) fn step(&mut self, service: &Service, now: Moment) {
        if self.next.has_passed(now) {
            self.next = now + INTERVAL;
            service.shared().tell_leases();
        }
    }
}

/// Returns notes as a message has them.
pub(super) fn to_message(notes: LeaseNotes) -> Leases {
    let LeaseNotes { versions, lease } = notes;
    let lease_ms = u64::try_from(lease.as_millis()).unwrap_or(u64::MAX);
    Leases { is_any: versions.is_none(), versions: versions.unwrap_or_default(), lease_ms }
}

/// Returns the notes of a message.
pub(super) fn from_message(leases: Leases) -> LeaseNotes {
    let Leases { versions, is_any, lease_ms } = leases;
    let versions = (!is_any).then_some(versions);
    LeaseNotes { versions, lease: Duration::from_millis(lease_ms) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_come_out_of_a_message_as_they_went_in() {
        for versions in [None, Some(vec![]), Some(vec![7, u64::MAX])] {
            let notes = LeaseNotes { versions, lease: Duration::from_millis(1500) };
            assert_eq!(from_message(to_message(notes.clone())), notes);
        }
    }
}
