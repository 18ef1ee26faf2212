//! Early release of read fences. A finished read queues its fences for release with the next call
//! to the master, so that memory freed in the meantime need not stay in quarantine until the fences
//! expire.
//!
//! Releases are best effort: a fence whose release is lost or does not fit in the queue expires by
//! its deadline.

use std::{sync::Arc, time::Duration};

use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, Moment, SystemClock};
use mooncake_proto::v1;

/// Maximum queued objects. Fences of further objects expire by their deadline.
const PENDING_MAX: usize = 1 << 16;

/// Time after a fence's local end during which a release is still sent. The reader counts from
/// before the request and subtracts a margin, so that the fence may last somewhat longer at the
/// master. Releasing an expired fence is harmless.
const RELEASE_GRACE: Duration = Duration::from_secs(2);

/// The fences granted by one locate call. Dropped with the last of its objects, which queues the
/// fences for release; the addresses must not be read afterwards.
#[derive(Debug)]
pub(crate) struct ReadFences {
    granted: Vec<GrantedFence>,
    until: Moment,
    pending_releases: Arc<PendingReleases>,
}

/// A fence and the object that it covers.
#[derive(Debug, Clone, Copy)]
struct GrantedFence {
    fence: u64,
    version: u64,
    object: u32,
}

/// Fence releases to send with the next call.
#[derive(Debug, Default)]
pub(super) struct PendingReleases(Mutex<Vec<(Moment, GrantedFence)>>);

impl ReadFences {
    /// Collects the fences of a response; `None` if it grants none.
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
        // `try_lock`, since in a forked child no thread may exist that would release the lock.
        let Some(mut pending) = self.pending_releases.0.try_lock() else { return };
        let room = PENDING_MAX.saturating_sub(pending.len());
        pending.extend(self.granted.iter().take(room).map(|granted| (self.until, *granted)));
    }
}

impl PendingReleases {
    /// Takes the queued releases, without those that have expired at the master for certain.
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
            // The objects of one locate usually share one fence.
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
    fn releases_fences_until_grace_time_has_passed() {
        let pending_releases = Arc::<PendingReleases>::default();
        let now = SystemClock.now();
        // Because of the reader's margin, the fence still lasts at the master.
        let released_now = released(&pending_releases, now);
        assert_eq!((released_now.len(), released_now[0].fence), (1, 7));
        assert!(pending_releases.take().is_empty(), "each release is sent once");
        assert!(is_worth_sending(now, now + RELEASE_GRACE / 2));
        assert!(!is_worth_sending(now, now + RELEASE_GRACE));
    }
}
