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

/// Collects the fences of a response as releases.
pub(crate) fn fences_of(response: &v1::LocateResponse) -> Vec<v1::FenceRelease> {
    let mut fences: Vec<v1::FenceRelease> = Vec::new();
    for (fence, version, object) in response.fences() {
        // The objects of one response usually share one fence.
        if fences.last().is_none_or(|last| last.fence != fence) {
            fences.push(v1::FenceRelease { fence, ..Default::default() });
        }
        if let Some(last) = fences.last_mut() {
            last.versions.push(version);
            last.objects.push(object);
        }
    }
    fences
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
        let result =
            |object| v1::LocateResult { fence: 7, version: 9, object, ..Default::default() };
        let results = (0..count).map(result).collect();
        v1::LocateResponse { results, ..Default::default() }
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
        let unfenced = v1::LocateResult { version: 1, ..Default::default() };
        let response = v1::LocateResponse { results: vec![unfenced], ..Default::default() };
        assert!(fences_of(&response).is_empty());
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
