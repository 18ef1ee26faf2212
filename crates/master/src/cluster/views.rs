//! Which log continues which: two members compare where their views began.
//!
//! Frames of one view are written by one leader, with consecutive numbers from the first frame of the
//! view on. So two logs that know the same view, begun at the same frame, are equal up to the end of the
//! shorter one within that view. What a leader wrote and nobody confirmed lies behind the place where the
//! next view began.

use mooncake_proto::standby::ViewStart;

/// Number of views that a member remembers.
pub(super) const VIEWS_MAX: usize = 64;

/// A log, as far as it is compared.
#[derive(Debug, Clone, Copy)]
pub(super) struct LogHistory<'a> {
    /// Where its views began, in rising order.
    pub(super) views: &'a [ViewStart],
    /// The number of the frame behind the last one.
    pub(super) end: u64,
}

impl LogHistory<'_> {
    /// Returns whether all frames of this log are in another one, so that it can go on from its end.
    pub(super) fn is_prefix_of(&self, other: &LogHistory<'_>) -> bool {
        // A view without a frame in this log says nothing.
        let last = self.views.iter().rev().find(|view| view.first_frame < self.end);
        let Some(last) = last else {
            // All frames are older than the first view.
            return self.end <= other.views.first().map_or(other.end, |view| view.first_frame);
        };
        let at = other.views.iter().position(|view| view == last);
        at.is_some_and(|at| {
            self.end <= other.views.get(at + 1).map_or(other.end, |next| next.first_frame)
        })
    }
}

/// Adds a view at the end, and forgets the earliest ones if there are too many.
pub(super) fn add(views: &mut Vec<ViewStart>, view: ViewStart) {
    // A view that wrote nothing before the next one began has no frames.
    views.retain(|earlier| earlier.first_frame < view.first_frame);
    views.push(view);
    views.drain(..views.len().saturating_sub(VIEWS_MAX));
}

#[cfg(test)]
mod tests {
    use mooncake_base::random::SplitMix64;

    use super::*;

    fn views(starts: &[(u64, u64)]) -> Vec<ViewStart> {
        starts.iter().map(|&(view, first_frame)| ViewStart { view, first_frame }).collect()
    }

    #[track_caller]
    fn check(own: (&[(u64, u64)], u64), other: (&[(u64, u64)], u64), is_prefix: bool) {
        let (own_views, other_views) = (views(own.0), views(other.0));
        let own = LogHistory { views: &own_views, end: own.1 };
        let other = LogHistory { views: &other_views, end: other.1 };
        assert_eq!(own.is_prefix_of(&other), is_prefix);
    }

    #[test]
    fn log_goes_on_where_its_frames_are_those_of_the_leader() {
        check((&[], 1), (&[(1, 1)], 9), true);
        check((&[(1, 1)], 5), (&[(1, 1)], 9), true);
        check((&[(1, 1)], 9), (&[(1, 1)], 9), true);
        check((&[(1, 1)], 5), (&[(1, 1), (2, 5)], 9), true);
        check((&[(1, 1), (2, 5)], 5), (&[(1, 1), (3, 5)], 9), true);
        // The log of a master from before there were several.
        check((&[], 5), (&[(1, 5)], 9), true);
    }

    #[test]
    fn frames_that_the_leader_does_not_have_are_noticed() {
        check((&[(1, 1)], 10), (&[(1, 1)], 9), false);
        // The tail of a leader that nobody confirmed, with the numbers of the next leader's frames.
        check((&[(1, 1)], 7), (&[(1, 1), (2, 5)], 9), false);
        check((&[(1, 1), (2, 5)], 7), (&[(1, 1), (3, 5)], 9), false);
        check((&[(1, 1), (2, 5)], 7), (&[(1, 1)], 9), false);
        check((&[], 7), (&[(1, 5)], 9), false);
        check((&[(2, 4)], 7), (&[(2, 5)], 9), false);
    }

    #[test]
    fn view_without_frames_is_forgotten() {
        let mut known = views(&[(1, 1), (2, 5)]);
        add(&mut known, ViewStart { view: 4, first_frame: 5 });
        assert_eq!(known, views(&[(1, 1), (4, 5)]));
        for view in 5..200 {
            add(&mut known, ViewStart { view, first_frame: view + 1 });
        }
        assert_eq!((known.len(), known[0].view), (VIEWS_MAX, 200 - VIEWS_MAX as u64));
    }

    /// Logs of members that lead and follow at random, compared frame by frame.
    #[test]
    fn comparison_of_views_is_that_of_frames() {
        for seed in 0..2000 {
            let mut random = SplitMix64::new(seed);
            // A frame is the view that wrote it.
            let mut logs: Vec<(Vec<ViewStart>, Vec<u64>)> = vec![(Vec::new(), Vec::new()); 3];
            for view in 1..8 {
                let leader = random.number() as usize % 3;
                let first_frame = logs[leader].1.len() as u64 + 1;
                add(&mut logs[leader].0, ViewStart { view, first_frame });
                for _ in 0..random.number() % 4 {
                    logs[leader].1.push(view);
                }
                let (known, frames) = logs[leader].clone();
                for member in (0..3).filter(|member| *member != leader) {
                    let own = &mut logs[member];
                    let of = |views, frames: &Vec<u64>| LogHistory {
                        views,
                        end: frames.len() as u64 + 1,
                    };
                    let is_prefix = of(&own.0, &own.1).is_prefix_of(&of(&known, &frames));
                    assert_eq!(is_prefix, frames.starts_with(&own.1), "seed={seed}");
                    if is_prefix && random.number().is_multiple_of(2) {
                        own.0.clone_from(&known);
                        let missed = frames.len() - own.1.len();
                        let received = own.1.len() + random.number() as usize % (missed + 1);
                        own.1 = frames[..received].to_vec();
                    } else if random.number().is_multiple_of(4) {
                        *own = (known.clone(), frames.clone());
                    }
                }
            }
        }
    }
}
