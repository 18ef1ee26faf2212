//! Fences of reads: when a fence ends for its reader, and when it is handed back to the master.
//!
//! A reader queues the fence of a read for release once no transfer reads the memory any more. The
//! queue is sent with the next call, so that memory freed in the meantime need not stay in quarantine
//! until the fence expires. Releases are best effort: a fence whose release is lost or does not fit
//! in the queue expires by itself.

use std::time::Duration;

use mooncake_base::{Moment, Version};

/// Maximum queued releases. Fences of further objects expire by themselves.
pub const RELEASES_MAX: usize = 1 << 16;

/// Margin subtracted from each fence, since the local clock and the master's run at different speeds.
const MARGIN: Duration = Duration::from_millis(5);

/// Further margin, as a fraction of the fence: 1/50, far more than any two clocks drift apart.
const MARGIN_SHARE: u32 = 50;

/// Time after a fence's end at its reader during which a release is still sent. The reader counts
/// from before the request and subtracts a margin, so that the fence may last somewhat longer at the
/// master. Releasing an expired fence is harmless.
const RELEASE_GRACE: Duration = Duration::from_secs(2);

/// Returns the end of a fence of this length for a reader who asked for it at `requested_at`. The
/// fence counts from before the request was sent: the master cannot have begun earlier.
pub fn fence_end(requested_at: Moment, fence: Duration) -> Moment {
    requested_at + fence.saturating_sub(MARGIN + fence / MARGIN_SHARE)
}

/// A fence that the master granted to this reader alone, and the object that it covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GrantedFence {
    /// The number of the fence.
    pub fence: u64,
    /// The version of the object.
    pub version: Version,
    /// The slot of the object in the master's table.
    pub object: u32,
}

/// The fences that are released with the next call.
#[derive(Debug, Default)]
pub struct FenceReleases(Vec<(Moment, GrantedFence)>);

impl FenceReleases {
    /// Queues fences that end at `until` for their reader. Their memory must not be read any more.
    pub fn extend(&mut self, until: Moment, granted: &[GrantedFence]) {
        let room = RELEASES_MAX.saturating_sub(self.0.len());
        self.0.extend(granted.iter().take(room).map(|granted| (until, *granted)));
    }

    /// Returns whether no fence is queued.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes the queued fences, without those that have certainly expired at the master.
    pub fn take(&mut self, now: Moment) -> impl Iterator<Item = GrantedFence> + use<> {
        let queued = std::mem::take(&mut self.0).into_iter();
        queued
            .filter(move |(until, _)| !(*until + RELEASE_GRACE).has_passed(now))
            .map(|(_, granted)| granted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Moment = Moment::from_boot(Duration::from_secs(100));

    fn granted(fence: u64) -> GrantedFence {
        GrantedFence { fence, version: Version(3), object: 1 }
    }

    #[test]
    fn fence_ends_earlier_for_its_reader_than_at_the_master() {
        let end = |millis| fence_end(NOW, Duration::from_millis(millis)).since(NOW).as_millis();
        assert_eq!([end(1000), end(100), end(5), end(0)], [975, 93, 0, 0]);
    }

    #[test]
    fn releases_fences_until_grace_time_has_passed() {
        let mut releases = FenceReleases::default();
        releases.extend(NOW, &[granted(7)]);
        // Because of the reader's margin, the fence still lasts at the master.
        let sent: Vec<_> = releases.take(NOW + RELEASE_GRACE / 2).collect();
        assert_eq!(sent, [granted(7)]);
        assert!(releases.is_empty(), "each release is sent once");
        releases.extend(NOW, &[granted(8)]);
        assert_eq!(releases.take(NOW + RELEASE_GRACE).count(), 0);
    }

    #[test]
    fn queue_of_releases_is_bounded() {
        let mut releases = FenceReleases::default();
        for fence in 0..=RELEASES_MAX as u64 {
            releases.extend(NOW, &[granted(fence)]);
        }
        assert_eq!(releases.take(NOW).count(), RELEASES_MAX);
    }
}
