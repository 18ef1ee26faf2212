//! Notes of leases, for masters that may lead next: they are not in the log, since reads grant them.
//!
//! The leader notes an object when its lease begins, and again when the lease is extended by more than
//! [`LEASE_QUANTUM`]. A standby keeps the notes beside its image; an object that has none is evictable
//! when the standby takes over. Notes name objects by version, so that they need no order among
//! changes of the log.

use std::time::Duration;

use mooncake_base::Moment;
use rustc_hash::FxHashMap;

use crate::state::{
    lease::{LEASE_QUANTUM, Timestamp},
    ledger::Log,
};

/// Maximum number of notes that are taken at a time. With more, any object may have a lease.
const NOTES_MAX: usize = 1 << 19;

/// Maximum number of leases that a standby knows. With more, any object may have one.
const KNOWN_MAX: usize = 1 << 22;

/// Leases that a standby knows before it looks for ended ones.
const SWEEP_MIN: usize = 1 << 12;

/// The objects that got a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseNotes {
    /// The versions of the objects; `None`: any object may have got one.
    pub versions: Option<Vec<u64>>,
    /// Duration of a lease.
    pub lease: Duration,
}

impl LeaseNotes {
    /// Returns whether no object got a lease.
    pub fn is_empty(&self) -> bool {
        self.versions.as_ref().is_some_and(Vec::is_empty)
    }

    /// Adds later notes.
    pub fn join(&mut self, later: &Self) {
        self.lease = self.lease.max(later.lease);
        match (&mut self.versions, &later.versions) {
            (Some(versions), Some(more)) if versions.len() + more.len() <= NOTES_MAX => {
                versions.extend_from_slice(more);
            }
            (versions, _) => *versions = None,
        }
    }
}

impl Log {
    /// Returns which objects got a lease since the last call, for masters that may lead next. Leases are
    /// noted from the first call on. `lease` is the duration of a lease.
    pub fn take_lease_notes(&mut self, lease: Duration) -> LeaseNotes {
        self.leases.take(lease)
    }

    /// Notes no more leases.
    pub fn stop_lease_notes(&mut self) {
        self.leases.stop();
    }
}

/// The leader's side: notes since they were taken last.
#[derive(Debug, Default)]
pub(in crate::state) struct NotedLeases {
    pub(in crate::state) is_on: bool,
    versions: Vec<u64>,
    is_over: bool,
}

impl NotedLeases {
    /// Notes an object whose lease is extended, unless its last note is recent enough.
    pub(in crate::state) fn extend(&mut self, version: u64, before: Timestamp, after: Timestamp) {
        // Leases of one length end in the order in which they start.
        if before.lease_quantum() != after.lease_quantum() {
            self.note(version);
        }
    }

    /// Notes an object that has a lease.
    pub(in crate::state) fn note(&mut self, version: u64) {
        if !self.is_on || self.is_over {
            return;
        }
        if self.versions.len() < NOTES_MAX {
            self.versions.push(version);
        } else {
            self.is_over = true;
            self.versions.clear();
        }
    }

    /// Returns the notes since the last call, and begins to take notes if none were taken before.
    pub(in crate::state) fn take(&mut self, lease: Duration) -> LeaseNotes {
        let is_complete = std::mem::replace(&mut self.is_on, true);
        let is_over = std::mem::take(&mut self.is_over);
        let next = Vec::with_capacity(self.versions.len());
        let versions = std::mem::replace(&mut self.versions, next);
        LeaseNotes { versions: (is_complete && !is_over).then_some(versions), lease }
    }

    /// Takes no more notes.
    pub(in crate::state) fn stop(&mut self) {
        *self = Self::default();
    }
}

/// The standby's side: the leases that it was told of.
#[derive(Debug, Clone, Default)]
pub(in crate::state) struct KnownLeases {
    /// Leases that were granted later have notes; `None`: leases have no notes.
    since: Option<Moment>,
    /// The ends of leases, by version.
    ends: FxHashMap<u64, Timestamp>,
    sweep_at: usize,
}

impl KnownLeases {
    /// Takes notes that were received at this moment.
    pub(in crate::state) fn receive(&mut self, now: Moment, notes: &LeaseNotes) {
        if self.since.is_none() {
            return self.begin(now);
        }
        let Some(versions) = &notes.versions else { return self.begin(now) };
        // The last extension of the lease may have no note.
        let end = Timestamp::from(now + notes.lease + LEASE_QUANTUM);
        for &version in versions {
            let known = self.ends.entry(version).or_default();
            *known = end.max(*known);
        }
        if self.ends.len() >= self.sweep_at {
            self.ends.retain(|_, end| *end > now.into());
            self.sweep_at = SWEEP_MIN.max(2 * self.ends.len());
        }
        if self.ends.len() > KNOWN_MAX {
            self.begin(now);
        }
    }

    /// Leases up to this moment are not known, later ones are.
    fn begin(&mut self, now: Moment) {
        *self = Self { since: Some(now), ..Self::default() };
    }

    /// Returns until when an object without a note may have a lease, if leases are not longer than
    /// `longest`.
    pub(in crate::state) fn unknown_until(&self, now: Moment, longest: Duration) -> Moment {
        let until = now + longest;
        self.since.map_or(until, |since| until.min(since + longest + LEASE_QUANTUM))
    }

    /// Returns the end of the lease of an object that has a note and may have a lease still.
    pub(in crate::state) fn end(&self, now: Moment, version: u64) -> Option<Moment> {
        let end = self.ends.get(&version)?;
        (*end > now.into()).then(|| end.moment())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(10);

    fn at(seconds: u64) -> Moment {
        Moment::from_boot(Duration::from_secs(seconds))
    }

    fn notes(versions: &[u64]) -> LeaseNotes {
        LeaseNotes { versions: Some(versions.to_vec()), lease: LEASE }
    }

    #[test]
    fn object_is_noted_once_in_a_quantum() {
        let mut noted = NotedLeases::default();
        let quantum = LEASE_QUANTUM.as_nanos() as u64;
        let extend = |noted: &mut NotedLeases, before: u64, after: u64| {
            noted.extend(7, Timestamp::from_bits(before), Timestamp::from_bits(after));
        };
        extend(&mut noted, 0, 9 * quantum);
        assert_eq!(noted.take(LEASE).versions, None, "earlier leases have no notes");
        extend(&mut noted, 9 * quantum, 10 * quantum - 1);
        assert_eq!(noted.take(LEASE), notes(&[]));
        extend(&mut noted, 10 * quantum - 1, 10 * quantum);
        noted.note(8);
        assert_eq!(noted.take(LEASE), notes(&[7, 8]));
        noted.stop();
        noted.note(9);
        assert_eq!(noted.take(LEASE).versions, None);
    }

    #[test]
    fn too_many_notes_stand_for_any_object() {
        let mut noted = NotedLeases::default();
        noted.take(LEASE);
        (0..NOTES_MAX as u64).for_each(|version| noted.note(version));
        let most = noted.take(LEASE);
        assert_eq!(most.versions.as_ref().map(Vec::len), Some(NOTES_MAX));
        (0..=NOTES_MAX as u64).for_each(|version| noted.note(version));
        assert_eq!(noted.take(LEASE).versions, None);
        assert_eq!(noted.take(LEASE), notes(&[]), "the next ones are complete again");
        let mut joined = notes(&[1]);
        joined.join(&notes(&[2]));
        assert_eq!(joined, notes(&[1, 2]));
        joined.join(&most);
        assert_eq!(joined.versions, None);
    }

    #[test]
    fn objects_without_a_note_are_free_once_earlier_leases_end() {
        let mut known = KnownLeases::default();
        assert_eq!(known.unknown_until(at(100), LEASE), at(110), "nothing is known");
        known.receive(at(100), &notes(&[1]));
        assert_eq!(known.end(at(100), 1), None, "notes were lost before these");
        assert_eq!(known.unknown_until(at(100), LEASE), at(110));
        assert_eq!(known.unknown_until(at(105), LEASE), at(110) + LEASE_QUANTUM);
        known.receive(at(120), &notes(&[1]));
        known.receive(at(125), &notes(&[1, 2]));
        assert_eq!(known.end(at(126), 1), Some(at(135) + LEASE_QUANTUM));
        assert_eq!(known.end(at(126), 3), None);
        assert_eq!(known.end(at(137), 1), None, "it has ended");
        known.receive(at(140), &LeaseNotes { versions: None, lease: LEASE });
        assert_eq!(known.unknown_until(at(145), LEASE), at(150) + LEASE_QUANTUM);
    }

    #[test]
    fn ended_leases_take_no_memory() {
        let mut known = KnownLeases::default();
        known.receive(at(1), &notes(&[]));
        for second in 1..100 {
            let first = second * 10_000;
            known.receive(at(second), &notes(&Vec::from_iter(first..first + 10_000)));
        }
        assert!(known.ends.len() < 300_000, "{}", known.ends.len());
        let many = Vec::from_iter(0..KNOWN_MAX as u64 + 1);
        known.receive(at(100), &notes(&many));
        assert_eq!((known.ends.len(), known.since), (0, Some(at(100))));
    }
}
