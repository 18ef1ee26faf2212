//! Read fences of located objects, and their early release; see [`FenceReleases`].

use std::sync::Arc;

use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, Moment, SystemClock, Version};
use mooncake_proto::v1;

use crate::protocol::{FenceReleases, GrantedFence};

/// The fences granted by one locate call. Dropped with the last of its objects, which queues the
/// fences for release; the addresses must not be read afterwards.
#[derive(Debug)]
pub(crate) struct ReadFences {
    granted: Vec<GrantedFence>,
    until: Moment,
    pending_releases: Arc<PendingReleases>,
}

/// Fence releases to send with the next call.
#[derive(Debug, Default)]
pub(crate) struct PendingReleases {
    queue: Mutex<FenceReleases>,
}

impl ReadFences {
    /// Collects the fences of a response; `None` if it grants none.
    pub(crate) fn from_response(
        answer: &v1::LocateResponse,
        until: Moment,
        pending_releases: &Arc<PendingReleases>,
    ) -> Option<Self> {
        let granted: Vec<_> = answer
            .fences()
            .map(|(fence, version, object)| GrantedFence {
                fence,
                version: Version(version),
                object,
            })
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
        let Some(mut queue) = self.pending_releases.queue.try_lock() else { return };
        queue.extend(self.until, &self.granted);
    }
}

impl PendingReleases {
    /// Takes the queued releases.
    pub(crate) fn take(&self) -> Vec<v1::FenceRelease> {
        let mut queue = self.queue.lock();
        if queue.is_empty() {
            return Vec::new();
        }
        let released = queue.take(SystemClock.now());
        drop(queue);
        v1::FenceRelease::group(
            released.map(|granted| (granted.fence, granted.version.0, granted.object)),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_fences_of_one_locate_form_one_release() {
        let pending_releases = Arc::<PendingReleases>::default();
        let fence = |fence, version| GrantedFence { fence, version: Version(version), object: 1 };
        let granted = vec![fence(7, 3), fence(7, 4), fence(8, 5)];
        let until = SystemClock.now();
        drop(ReadFences { granted, until, pending_releases: Arc::clone(&pending_releases) });
        let taken = pending_releases.take();
        let release = |fence, versions: &[u64]| v1::FenceRelease {
            fence,
            versions: versions.to_vec(),
            objects: vec![1; versions.len()],
        };
        assert_eq!(taken, [release(7, &[3, 4]), release(8, &[5])]);
        assert!(pending_releases.take().is_empty(), "each release is sent once");
    }
}
