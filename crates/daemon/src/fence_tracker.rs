//! Tracks the read fences of a dummy client, to be released if its process dies.

use std::{collections::VecDeque, time::Duration};

use mooncake_base::Moment;
use mooncake_proto::v1;

/// Maximum tracked objects per client. Fences of further objects expire by their deadline.
const OBJECTS_MAX: usize = 1 << 16;

/// The unexpired fences of one client. Fences that the client released itself are included:
/// releasing a fence twice has no effect.
#[derive(Debug, Default)]
pub(crate) struct FenceTracker {
    fences: VecDeque<(Moment, v1::FenceRelease)>,
    objects: usize,
}

impl FenceTracker {
    /// Tracks fences that last for `time`.
    pub(crate) fn add(&mut self, now: Moment, time: Duration, fences: Vec<v1::FenceRelease>) {
        for fence in fences {
            self.objects += fence.objects.len();
            self.fences.push_back((now + time, fence));
        }
        while let Some((until, first)) = self.fences.front()
            && (until.has_passed(now) || self.objects > OBJECTS_MAX)
        {
            self.objects -= first.objects.len();
            self.fences.pop_front();
        }
    }

    /// Returns the releases of all unexpired fences.
    pub(crate) fn into_releases(self, now: Moment) -> Vec<v1::FenceRelease> {
        let open = self.fences.into_iter().filter(|(until, _)| !until.has_passed(now));
        open.map(|(_, fence)| fence).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn answer(count: u32) -> v1::LocateResponse {
        located(7, (0..count).collect())
    }

    fn fences_of(response: &v1::LocateResponse) -> Vec<v1::FenceRelease> {
        v1::FenceRelease::group(response.fences())
    }

    fn located(fence: u64, objects: Vec<u32>) -> v1::LocateResponse {
        let columns = Some(v1::LocatedColumns {
            versions: vec![9; objects.len()],
            fences: vec![fence],
            objects,
            ..Default::default()
        });
        v1::LocateResponse { columns, ..Default::default() }
    }

    #[test]
    fn releases_only_unexpired_fences() {
        let mut fences = FenceTracker::default();
        let start = Moment::default();
        fences.add(start, SECOND, fences_of(&answer(2)));
        fences.add(start, SECOND * 3, fences_of(&answer(1)));
        let releases = fences.into_releases(start + SECOND * 2);
        let expected = v1::FenceRelease { fence: 7, versions: vec![9], objects: vec![0] };
        assert_eq!(releases, [expected]);
    }

    #[test]
    fn ignores_results_without_fence() {
        assert!(fences_of(&located(0, vec![0])).is_empty());
    }

    #[test]
    fn drops_oldest_fences_above_limit() {
        let mut fences = FenceTracker::default();
        for _ in 0..3 {
            fences.add(Moment::default(), SECOND, fences_of(&answer(1 << 15)));
        }
        assert_eq!(fences.into_releases(Moment::default()).len(), 2);
    }
}
