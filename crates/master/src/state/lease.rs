//! Two kinds of holding on: a retention lease keeps an object, a fence keeps its memory.

use std::time::Duration;

use mooncake_base::Moment;

/// A [`Moment`] in 8 bytes, for what there are millions of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct Stamp(u64);

impl Stamp {
    /// How long after `now` it comes; nothing if it has passed.
    pub(super) fn left(self, now: Moment) -> Duration {
        self.moment().left(now)
    }

    pub(super) fn moment(self) -> Moment {
        Moment::from_boot(Duration::from_nanos(self.0))
    }
}

impl From<Moment> for Stamp {
    fn from(moment: Moment) -> Self {
        Self(u64::try_from(moment.since_boot().as_nanos()).unwrap_or(u64::MAX))
    }
}

/// Until when an object and its memory are held.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Holds {
    lease: Stamp,
    fence: Stamp,
}

impl Holds {
    /// Keeps the object until then, or longer if it was to be kept longer.
    pub(super) fn extend_lease(&mut self, until: Moment) {
        self.lease = self.lease.max(until.into());
    }

    /// Keeps the memory until then, or longer.
    pub(super) fn extend_fence(&mut self, until: Moment) {
        self.fence = self.fence.max(until.into());
    }

    /// The memory is another one now; the object is still kept.
    pub(super) fn forget_fence(&mut self) {
        self.fence = Stamp::default();
    }

    pub(super) fn is_leased(&self, now: Moment) -> bool {
        self.lease > now.into()
    }

    /// When the last fence of the memory ends.
    pub(super) fn fence(&self) -> Stamp {
        self.fence
    }

    /// When the object may be evicted and its memory be used at once.
    pub(super) fn end(&self) -> Stamp {
        self.lease.max(self.fence)
    }

    pub(super) fn lease_left(&self, now: Moment) -> Duration {
        self.lease.left(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hold_is_never_shortened() {
        let at = |seconds| Moment::from_boot(Duration::from_secs(seconds));
        let mut holds = Holds::default();
        holds.extend_lease(at(10));
        holds.extend_lease(at(5));
        assert!(holds.is_leased(at(9)) && !holds.is_leased(at(10)));
        holds.extend_fence(at(20));
        assert_eq!(holds.end(), at(20).into());
        holds.forget_fence();
        assert_eq!((holds.fence(), holds.end()), (Stamp::default(), at(10).into()));
    }
}
