//! Notes of leases on their way from a leader to its standbys, so that a standby which takes over knows
//! what it may evict.

use std::time::Duration;

use mooncake_base::Moment;
use mooncake_proto::standby::Leases;

use crate::{
    service::Service,
    state::{LeaseNotes, LeaseSweep},
};

/// Time between two looks of a leader at the leases that it has granted. Those of the last interval
/// before it dies are not known to its standbys.
const INTERVAL: Duration = Duration::from_millis(50);

/// Tells the standbys of a leader of leases.
#[derive(Debug, Default)]
pub(super) struct LeaseTeller {
    next: Moment,
    sweep: LeaseSweep,
}

impl LeaseTeller {
    /// Tells the standbys if it is time.
    pub(super) fn step(&mut self, service: &Service, now: Moment) {
        if self.next.has_passed(now) {
            self.next = now + INTERVAL;
            self.tell(service);
        }
    }

    /// Tells the standbys now.
    pub(super) fn tell(&mut self, service: &Service) {
        service.shared().tell_leases(&mut self.sweep);
    }
}

/// Returns notes as a message has them.
pub(super) fn to_message(notes: LeaseNotes) -> Leases {
    let LeaseNotes { is_any, leases, is_whole } = notes;
    let (versions, left_ms) = leases.into_iter().unzip();
    Leases { versions, left_ms, is_any, is_whole }
}

/// Returns the notes of a message.
pub(super) fn from_message(message: Leases) -> LeaseNotes {
    let Leases { versions, left_ms, is_any, is_whole } = message;
    LeaseNotes { is_any, leases: versions.into_iter().zip(left_ms).collect(), is_whole }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_come_out_of_a_message_as_they_went_in() {
        let leases = vec![(7, 1500), (u64::MAX, u64::MAX)];
        let whole = LeaseNotes { is_any: false, leases, is_whole: true };
        for notes in [LeaseNotes::default(), LeaseNotes::any(), whole] {
            assert_eq!(from_message(to_message(notes.clone())), notes);
        }
    }
}
