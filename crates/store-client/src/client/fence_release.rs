//! Fences that are handed back: what a read leaves for the next call to tell the master, so that
//! memory which was freed meanwhile need not rest until the fence ends by itself.
//!
//! Telling is a courtesy: what is lost on the way, or does not fit, ends by its time.

use std::{sync::Arc, time::Duration};

use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, Moment, SystemClock};
use mooncake_proto::v1;

/// The most objects that wait to be told of. More of them end by their time.
const PENDING_MAX: usize = 1 << 16;

/// How long a fence is told of after it has ended for its reader, who counts from before the question
/// and with a margin: for the master it may stand for a while longer. To tell of one that has ended
/// there too does no harm.
const RELEASE_GRACE: Duration = Duration::from_secs(2);

/// What one locate was granted, for itself alone. Dropped when the last of its objects is, and
/// thereby handed back: nobody can read any more by what it said.
#[derive(Debug)]
pub(crate) struct ReadFences {
    granted: Vec<GrantedFence>,
    until: Moment,
    pending_releases: Arc<PendingReleases>,
}

/// A fence, and the object it covers.
#[derive(Debug, Clone, Copy)]
struct GrantedFence {
    fence: u64,
    version: u64,
    object: u32,
}

/// What the next call will tell.
#[derive(Debug, Default)]
pub(super) struct PendingReleases(Mutex<Vec<(Moment, GrantedFence)>>);

impl ReadFences {
    /// What the answers grant, if they grant anything.
    pub(super) fn from_response(
        answer: &v1::LocateResponse,
        until: Moment,
        pending_releases: &Arc<PendingReleases>,
    ) -> Option<Self> {
        let granted: Vec<_> = answer
            .fences()
            .map(|(fence, version, object)| GrantedFence { fence, version, object })
            .collect();
        (!granted.is_empty()).then(|| Self {
            granted,
            until,
            pending_releases: Arc::clone(pending_releases),
        })
    }
}

impl Drop for ReadFences {
    fn drop(&mut self) {
        // Not waited for: in a forked child nobody may be there to let go of the lock.
        let Some(mut pending) = self.pending_releases.0.try_lock() else { return };
        let room = PENDING_MAX.saturating_sub(pending.len());
        pending.extend(self.granted.iter().take(room).map(|granted| (self.until, *granted)));
    }
}

impl PendingReleases {
    /// What is to be told now, but for what has ended by itself for sure.
    pub(super) fn take(&self) -> Vec<v1::FenceRelease> {
        let pending = {
            let mut pending = self.0.lock();
            if pending.is_empty() {
                return Vec::new();
            }
            std::mem::take(&mut *pending)
        };
        let now = SystemClock.now();
        let mut releases: Vec<v1::FenceRelease> = Vec::new();
        for (_, granted) in pending.into_iter().filter(|(until, _)| is_worth_sending(*until, now)) {
            // Objects of one locate have one fence, as a rule.
            if releases.last().is_none_or(|last| last.fence != granted.fence) {
                releases.push(v1::FenceRelease { fence: granted.fence, ..Default::default() });
            }
            if let Some(last) = releases.last_mut() {
                last.versions.push(granted.version);
                last.objects.push(granted.object);
            }
        }
        releases
    }
}

fn is_worth_sending(until: Moment, now: Moment) -> bool {
    !(until + RELEASE_GRACE).has_passed(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn released(pending_releases: &Arc<PendingReleases>, until: Moment) -> Vec<v1::FenceRelease> {
        let granted = vec![GrantedFence { fence: 7, version: 3, object: 1 }];
        drop(ReadFences { granted, until, pending_releases: Arc::clone(pending_releases) });
        pending_releases.take()
    }

    #[test]
    fn a_fence_that_ended_just_now_for_its_reader_is_handed_back_and_one_long_ago_is_not() {
        let pending_releases = Arc::<PendingReleases>::default();
        let now = SystemClock.now();
        // Under the reader's margin the master's end of the fence is still to come.
        let released_now = released(&pending_releases, now);
        assert_eq!((released_now.len(), released_now[0].fence), (1, 7));
        assert!(pending_releases.take().is_empty(), "it is told once");
        assert!(is_worth_sending(now, now + RELEASE_GRACE / 2));
        assert!(!is_worth_sending(now, now + RELEASE_GRACE));
    }
}
