//! Notes of leases, for masters that may lead next: they are not in the log, since reads grant them.
//!
//! The leader notes an object when its lease begins, and again when the lease is extended by more than
//! [`LEASE_QUANTUM`]. For a standby that attaches it also notes all objects that have a lease. A standby
//! keeps the notes beside its image; an object that has none is evictable when the standby takes over.
//! Notes name objects by version, so that they need no order among changes of the log.

use std::time::Duration;

use mooncake_base::Moment;
use rustc_hash::FxHashMap;

use crate::state::{
    lease::{LEASE_QUANTUM, Timestamp},
    ledger::Log,
};

/// Maximum number of notes that are taken at a time, and that a message has.
const NOTES_MAX: usize = 1 << 19;

/// Maximum number of leases that a standby knows, and of notes that wait for one. With more, any object
/// may have a lease.
const KNOWN_MAX: usize = 1 << 22;

/// Leases that a standby knows before it looks for ended ones.
const SWEEP_MIN: usize = 1 << 12;

/// Objects that have a lease.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LeaseNotes {
    /// Any object may have got a lease before; earlier notes are void.
    pub is_any: bool,
    /// The versions of objects, and for how many more milliseconds the lease lasts.
    pub leases: Vec<(u64, u64)>,
    /// Since the last notes with [`is_any`](Self::is_any), all objects that have a lease were noted.
    pub is_whole: bool,
}

impl LeaseNotes {
    /// Returns notes that say nothing but that any object may have a lease.
    pub fn any() -> Self {
        Self { is_any: true, ..Self::default() }
    }

    /// Returns whether the notes say nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Adds later notes. Returns whether there is space for them; without it, any object may have a
    /// lease.
    pub fn join(&mut self, later: &Self) -> bool {
        if later.is_any {
            *self = later.clone();
            return true;
        }
        if self.leases.len() + later.leases.len() > KNOWN_MAX {
            *self = Self::any();
            return false;
        }
        self.leases.extend_from_slice(&later.leases);
        self.is_whole |= later.is_whole;
        true
    }

    /// Takes out what fits a message.
    pub fn take_part(&mut self) -> Self {
        if self.leases.len() <= NOTES_MAX {
            return std::mem::take(self);
        }
        let leases = self.leases.drain(..NOTES_MAX).collect();
        Self { is_any: std::mem::take(&mut self.is_any), leases, is_whole: false }
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
        let was_on = std::mem::replace(&mut self.is_on, true);
        let is_over = std::mem::take(&mut self.is_over);
        let next = Vec::with_capacity(self.versions.len());
        let versions = std::mem::replace(&mut self.versions, next);
        let left_ms = milliseconds(lease);
        let leases = versions.into_iter().map(|version| (version, left_ms)).collect();
        LeaseNotes { is_any: !was_on || is_over, leases, is_whole: false }
    }

    /// Takes no more notes.
    pub(in crate::state) fn stop(&mut self) {
        *self = Self::default();
    }
}

/// Returns the time of a note, rounded up.
pub(in crate::state) fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_micros().div_ceil(1000)).unwrap_or(u64::MAX)
}

/// The standby's side: the leases that it was told of.
#[derive(Debug, Clone, Default)]
pub(in crate::state) struct KnownLeases {
    /// Leases that were granted later have notes; `None`: leases have no notes.
    since: Option<Moment>,
    /// Earlier ones have notes as well.
    is_whole: bool,
    /// Notes were dropped, since there were too many.
    is_over: bool,
    /// The ends of leases, by version.
    ends: FxHashMap<u64, Timestamp>,
    sweep_at: usize,
}

impl KnownLeases {
    /// Takes notes that were received at this moment.
    pub(in crate::state) fn receive(&mut self, now: Moment, notes: &LeaseNotes) {
        if notes.is_any || self.since.is_none() {
            *self = Self { since: Some(now), is_over: !notes.is_any, ..Self::default() };
        }
        if self.is_over {
            return;
        }
        for &(version, left_ms) in &notes.leases {
            // The last extension of the lease may have no note.
            let left = Duration::from_millis(left_ms).saturating_add(LEASE_QUANTUM);
            let known = self.ends.entry(version).or_default();
            *known = Timestamp::from(now + left).max(*known);
        }
        if self.ends.len() >= self.sweep_at {
            self.ends.retain(|_, end| *end > now.into());
            self.sweep_at = SWEEP_MIN.max(2 * self.ends.len());
        }
        if self.ends.len() > KNOWN_MAX {
            *self = Self { since: Some(now), is_over: true, ..Self::default() };
            return;
        }
        self.is_whole |= notes.is_whole;
    }

    /// Returns until when an object without a note may have a lease, if leases are not longer than
    /// `longest`.
    pub(in crate::state) fn unknown_until(&self, now: Moment, longest: Duration) -> Moment {
        if self.is_whole {
            return now;
        }
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
        let leases = versions.iter().map(|&version| (version, 10_000)).collect();
        LeaseNotes { leases, ..LeaseNotes::default() }
    }

    #[test]
    fn object_is_noted_once_in_a_quantum() {
        let mut noted = NotedLeases::default();
        let quantum = LEASE_QUANTUM.as_nanos() as u64;
        let extend = |noted: &mut NotedLeases, before: u64, after: u64| {
            noted.extend(7, Timestamp::from_bits(before), Timestamp::from_bits(after));
        };
        extend(&mut noted, 0, 9 * quantum);
        assert_eq!(noted.take(LEASE), LeaseNotes::any(), "earlier leases have no notes");
        extend(&mut noted, 9 * quantum, 10 * quantum - 1);
        assert!(noted.take(LEASE).is_empty());
        extend(&mut noted, 10 * quantum - 1, 10 * quantum);
        noted.note(8);
        assert_eq!(noted.take(LEASE), notes(&[7, 8]));
        noted.stop();
        noted.note(9);
        assert_eq!(noted.take(LEASE), LeaseNotes::any());
    }

    #[test]
    fn too_many_notes_stand_for_any_object() {
        let mut noted = NotedLeases::default();
        noted.take(LEASE);
        (0..NOTES_MAX as u64).for_each(|version| noted.note(version));
        assert_eq!(noted.take(LEASE).leases.len(), NOTES_MAX);
        (0..=NOTES_MAX as u64).for_each(|version| noted.note(version));
        assert_eq!(noted.take(LEASE), LeaseNotes::any());
        assert!(noted.take(LEASE).is_empty(), "the next ones are complete again");
        let mut joined = notes(&[1]);
        assert!(joined.join(&notes(&[2])));
        assert_eq!(joined, notes(&[1, 2]));
        assert!(!joined.join(&notes(&vec![3; KNOWN_MAX])));
        assert_eq!(joined, LeaseNotes::any());
        assert!(joined.join(&LeaseNotes { is_whole: true, ..notes(&vec![3; NOTES_MAX + 1]) }));
        let first = joined.take_part();
        assert_eq!((first.is_any, first.leases.len(), first.is_whole), (true, NOTES_MAX, false));
        assert_eq!(joined.take_part(), LeaseNotes { is_whole: true, ..notes(&[3]) });
        assert!(joined.is_empty());
    }

    #[test]
    fn objects_without_a_note_are_free_once_earlier_leases_end() {
        let mut known = KnownLeases::default();
        assert_eq!(known.unknown_until(at(100), LEASE), at(110), "nothing is known");
        known.receive(at(100), &LeaseNotes::any());
        assert_eq!(known.unknown_until(at(100), LEASE), at(110));
        assert_eq!(known.unknown_until(at(105), LEASE), at(110) + LEASE_QUANTUM);
        known.receive(at(120), &notes(&[1]));
        known.receive(at(125), &notes(&[1, 2]));
        assert_eq!(known.end(at(126), 1), Some(at(135) + LEASE_QUANTUM));
        assert_eq!(known.end(at(126), 3), None);
        assert_eq!(known.end(at(137), 1), None, "it has ended");
        known.receive(at(140), &LeaseNotes::any());
        assert_eq!(known.unknown_until(at(145), LEASE), at(150) + LEASE_QUANTUM);
        let last = LeaseNotes { is_whole: true, leases: vec![(4, 1500)], ..LeaseNotes::default() };
        known.receive(at(141), &last);
        assert_eq!(known.unknown_until(at(145), LEASE), at(145), "all have notes");
        let end = Duration::from_millis(142_500) + LEASE_QUANTUM;
        assert_eq!(known.end(at(142), 4), Some(Moment::from_boot(end)));
        known.receive(at(150), &LeaseNotes::any());
        assert_eq!(known.unknown_until(at(150), LEASE), at(160), "some were lost");
    }

    #[test]
    fn ended_leases_take_no_memory() {
        let mut known = KnownLeases::default();
        known.receive(at(1), &LeaseNotes::any());
        for second in 1..100 {
            let first = second * 10_000;
            known.receive(at(second), &notes(&Vec::from_iter(first..first + 10_000)));
        }
        assert!(known.ends.len() < 300_000, "{}", known.ends.len());
        let many = Vec::from_iter(0..KNOWN_MAX as u64 + 1);
        known.receive(at(100), &notes(&many));
        assert_eq!((known.ends.len(), known.since), (0, Some(at(100))));
        let last = LeaseNotes { is_whole: true, ..LeaseNotes::default() };
        known.receive(at(101), &last);
        assert!(!known.is_whole, "notes were dropped");
        known.receive(at(102), &LeaseNotes { is_any: true, ..last });
        assert!(known.is_whole);
    }
}
