//! Two kinds of protection: a retention lease keeps an object, a fence keeps its memory.

use std::time::Duration;

use mooncake_base::Moment;

/// Time within which the extensions of a lease count once for masters that may lead next.
pub(in crate::state) const LEASE_QUANTUM: Duration = Duration::from_nanos(1 << LEASE_QUANTUM_BITS);

/// Nanoseconds of it, as a power of two: about a second.
const LEASE_QUANTUM_BITS: u32 = 30;

/// A [`Moment`] in 8 bytes, for data that exists millions of times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(in crate::state) struct Timestamp(u64);

impl Timestamp {
    /// Returns the time from `now` on, or zero.
    pub(in crate::state) fn left(self, now: Moment) -> Duration {
        self.moment().left(now)
    }

    /// Returns the bits for the wire; a granted stamp is never 0.
    pub(in crate::state) fn to_bits(self) -> u64 {
        self.0
    }

    /// Returns the number of the [`LEASE_QUANTUM`] in which it lies.
    pub(in crate::state) fn lease_quantum(self) -> u64 {
        self.0 >> LEASE_QUANTUM_BITS
    }

    pub(in crate::state) fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    pub(in crate::state) fn moment(self) -> Moment {
        Moment::from_boot(Duration::from_nanos(self.0))
    }
}

impl From<Moment> for Timestamp {
    fn from(moment: Moment) -> Self {
        Self(u64::try_from(moment.since_boot().as_nanos()).unwrap_or(u64::MAX))
    }
}

/// Uses within this share of a lease, as a power of two, count once.
const SLOT_SHARE: u32 = 4;

/// Bit of the end of a lease, which is even otherwise: an address was given away under this lease that
/// is read without a fence, so that the lease keeps the memory, too.
const HAS_ADDRESS: u64 = 1;

/// End of the lease of an object and of the fence of its memory.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::state) struct LeaseAndFence {
    /// With the bit [`HAS_ADDRESS`].
    lease: Timestamp,
    fence: Timestamp,
}

impl LeaseAndFence {
    /// Extends the lease; never shortens it.
    pub(in crate::state) fn extend_lease(&mut self, until: Moment) {
        let end = Timestamp::from(until).0.saturating_add(1) & !HAS_ADDRESS;
        let before = self.lease();
        self.lease.0 = self.lease.0.max(end) | (self.lease.0 & HAS_ADDRESS);
        debug_assert!(self.lease() >= before, "a lease is never shortened");
    }

    /// Records that an address of the memory was given away that is valid until the lease ends,
    /// extended or not.
    pub(in crate::state) fn give_address(&mut self) {
        self.lease.0 |= HAS_ADDRESS;
    }

    /// Extends the lease from `now` by `ttl`. Returns `false` if the last use was in the same slot
    /// of time; a slot is at most a sixteenth of a lease.
    pub(in crate::state) fn renew_lease(&mut self, now: Moment, ttl: Duration) -> bool {
        let before = self.lease.0;
        if !self.is_leased(now) {
            self.lease.0 &= !HAS_ADDRESS;
        }
        self.extend_lease(now + ttl);
        let ttl = u64::try_from(ttl.as_nanos()).unwrap_or(u64::MAX);
        let slot_bits = ttl.checked_ilog2().and_then(|bits| bits.checked_sub(SLOT_SHARE));
        // Leases of one length end in the order in which they start, so the end determines the slot.
        slot_bits.is_none_or(|bits| before >> bits != self.lease.0 >> bits)
    }

    /// Extends the fence; never shortens it.
    pub(in crate::state) fn extend_fence(&mut self, until: Moment) {
        self.fence = self.fence.max(until.into());
    }

    /// Extends the fence for a reader. Returns its end if no other fence is active: the ticket of a
    /// single reader.
    pub(in crate::state) fn grant_fence(
        &mut self,
        now: Moment,
        until: Moment,
    ) -> Option<Timestamp> {
        let before = self.fence;
        let until = Timestamp::from(until);
        // Never the same end twice, so that an earlier reader cannot release the fence of a later
        // one.
        self.fence = if until > before { until } else { Timestamp(before.0 + 1) };
        debug_assert!(self.fence > before, "no two fences of an object have the same end");
        (before <= now.into()).then_some(self.fence)
    }

    /// Drops the fence, since the object has other memory now; the lease stays.
    pub(in crate::state) fn clear_fence(&mut self) {
        self.fence = Timestamp::default();
    }

    pub(in crate::state) fn is_leased(&self, now: Moment) -> bool {
        self.lease() > now.into()
    }

    /// Returns the end of the last fence.
    pub(in crate::state) fn fence(&self) -> Timestamp {
        self.fence
    }

    /// Returns when the object may be evicted and its memory reused at once.
    pub(in crate::state) fn protected_until(&self) -> Timestamp {
        self.lease().max(self.fence)
    }

    /// Returns when the memory may be given away if the object is kept elsewhere.
    pub(in crate::state) fn memory_until(&self) -> Timestamp {
        match self.lease.0 & HAS_ADDRESS {
            0 => self.fence,
            _ => self.protected_until(),
        }
    }

    /// Returns the end of the lease.
    pub(in crate::state) fn lease(&self) -> Timestamp {
        Timestamp(self.lease.0 & !HAS_ADDRESS)
    }

    pub(in crate::state) fn lease_left(&self, now: Moment) -> Duration {
        self.lease().left(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protection_is_never_shortened() {
        let at = |seconds| Moment::from_boot(Duration::from_secs(seconds));
        let mut protection = LeaseAndFence::default();
        protection.extend_lease(at(10));
        protection.extend_lease(at(5));
        assert!(protection.is_leased(at(9)) && !protection.is_leased(at(10)));
        assert_eq!(protection.grant_fence(at(0), at(20)), Some(at(20).into()));
        assert_eq!(protection.protected_until(), at(20).into());
        protection.clear_fence();
        assert_eq!(
            (protection.fence(), protection.protected_until()),
            (Timestamp::default(), at(10).into())
        );
    }

    #[test]
    fn lease_keeps_memory_only_for_given_addresses() {
        let at = |seconds| Moment::from_boot(Duration::from_secs(seconds));
        let ttl = Duration::from_secs(10);
        let mut protection = LeaseAndFence::default();
        protection.renew_lease(at(0), ttl);
        protection.extend_fence(at(2));
        assert_eq!(protection.memory_until(), at(2).into());
        protection.give_address();
        assert!(protection.memory_until() >= at(10).into());
        protection.renew_lease(at(5), ttl);
        assert!(protection.memory_until() >= at(15).into(), "extended with the lease");
        protection.renew_lease(at(20), ttl);
        assert_eq!(protection.memory_until(), at(2).into(), "a new lease");
        assert!(protection.is_leased(at(29)));
    }

    #[test]
    fn uses_count_once_per_sixteenth_of_a_lease() {
        let ttl = Duration::from_secs(5);
        let at = |micros| Moment::from_boot(Duration::from_micros(micros));
        let mut protection = LeaseAndFence::default();
        let uses: Vec<u64> = (1_000_000..8_000_000)
            .step_by(50)
            .filter(|&m| protection.renew_lease(at(m), ttl))
            .collect();
        let gaps: Vec<u64> = uses.windows(2).map(|two| two[1] - two[0]).collect();
        assert_eq!(uses[0], 1_000_000, "the first use counts");
        assert!(gaps.iter().all(|&gap| gap <= 5_000_000 / 16), "{gaps:?}");
        assert!(gaps.iter().skip(1).all(|&gap| gap >= 5_000_000 / 32 - 50), "{gaps:?}");
        assert!(protection.is_leased(at(8_000_000 - 50 + 4_999_999)), "each extends the lease");
        assert!(
            !protection.is_leased(at(8_000_000 - 50 + 5_000_000)),
            "but not beyond the promised time"
        );
    }

    #[test]
    fn every_use_counts_without_leases() {
        let now = Moment::from_boot(Duration::from_secs(1));
        let mut protection = LeaseAndFence::default();
        assert!(
            protection.renew_lease(now, Duration::ZERO)
                && protection.renew_lease(now, Duration::ZERO)
        );
    }

    #[test]
    fn ticket_is_granted_only_to_a_single_reader() {
        let at = |seconds| Moment::from_boot(Duration::from_secs(seconds));
        let mut protection = LeaseAndFence::default();
        let first = protection.grant_fence(at(0), at(10)).expect("no other reader");
        assert_eq!(protection.grant_fence(at(0), at(10)), None, "the first reader is active");
        assert_ne!(protection.fence(), first, "the first ticket does not release the second fence");
        assert_eq!(protection.grant_fence(at(1), at(5)), None);
        assert!(protection.fence() > at(10).into(), "a shorter fence does not shorten");
        assert!(protection.grant_fence(at(30), at(31)).is_some(), "both fences have ended");
    }
}
