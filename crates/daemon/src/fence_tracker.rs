//! What the master granted to a guest for its reads: to be handed back if the guest dies.

use std::{collections::VecDeque, time::Duration};

use mooncake_base::Moment;
use mooncake_proto::v1;

/// The most objects that are remembered of one guest. Fences of more end by their time.
const OBJECTS_MAX: usize = 1 << 16;

/// The fences of one guest that may still stand. Those that it handed back itself are among them:
/// to hand one back twice changes nothing.
#[derive(Debug, Default)]
pub(crate) struct FenceTracker {
    fences: VecDeque<(Moment, v1::FenceRelease)>,
    objects: usize,
}

/// The fences of an answer, as they are handed back.
pub(crate) fn fences_of(response: &v1::LocateResponse) -> Vec<v1::FenceRelease> {
    let mut fences: Vec<v1::FenceRelease> = Vec::new();
    for (fence, version, object) in response.fences() {
        // Objects of one answer have one fence, as a rule.
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
    /// Takes note of fences that stand for so long.
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

    /// What may still stand.
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
    fn fences_are_handed_back_until_they_have_ended() {
        let mut fences = FenceTracker::default();
        let start = Moment::default();
        fences.add(start, SECOND, fences_of(&answer(2)));
        fences.add(start, SECOND * 3, fences_of(&answer(1)));
        let releases = fences.into_releases(start + SECOND * 2);
        let expected = v1::FenceRelease { fence: 7, versions: vec![9], objects: vec![0] };
        assert_eq!(releases, [expected]);
    }

    #[test]
    fn what_is_not_fenced_is_not_remembered() {
        let unfenced = v1::LocateResult { version: 1, ..Default::default() };
        let response = v1::LocateResponse { results: vec![unfenced], ..Default::default() };
        assert!(fences_of(&response).is_empty());
    }

    #[test]
    fn there_is_a_limit_and_the_oldest_go_first() {
        let mut fences = FenceTracker::default();
        for _ in 0..3 {
            fences.add(Moment::default(), SECOND, fences_of(&answer(1 << 15)));
        }
        assert_eq!(fences.into_releases(Moment::default()).len(), 2);
    }
}
