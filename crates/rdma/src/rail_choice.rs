//! The rule by which a transfer chooses the pair of devices that carries its next slices: the one that is
//! estimated to be done first. A device that is not near the memory, at either end, is taken to be slower.

use std::time::Duration;

use mooncake_base::Moment;
use smallvec::SmallVec;

/// Pairs of devices that are looked at without an allocation.
pub(crate) const RAILS_INLINE: usize = 16;

/// A pair of devices, as a transfer sees it at one moment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RailView {
    pub(crate) state: RailState,
    /// At how many of the two ends the device is not near the memory.
    pub(crate) far_ends: u32,
    /// Whether the pair is to be connected always.
    pub(crate) is_primary: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum RailState {
    /// The own device has failed.
    Inactive,
    /// Connected. The slice would be moved after this time if both devices were near the memory.
    Open(Duration),
    /// Not connected.
    Closed,
    /// Not to be used before this moment.
    Paused(Moment),
}

/// What a transfer does next; pairs of devices are named by their index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RailChoice {
    /// Post on the first of these pairs that has a place, and connect another one meanwhile.
    Post { open: SmallVec<[usize; RAILS_INLINE]>, reconnect: Option<usize> },
    /// Connect this pair: none is open.
    Connect(usize),
    /// Wait until this moment: no pair can be used before.
    Wait(Moment),
    /// No device is active.
    Fail,
}

impl RailChoice {
    pub(crate) fn of(rails: &[RailView]) -> Self {
        let mut open: SmallVec<[(Duration, usize); RAILS_INLINE]> = SmallVec::new();
        let mut nearest_open = u32::MAX;
        let mut nearest_closed: Option<(u32, usize)> = None;
        let mut primary_closed = None;
        let mut retry_at: Option<Moment> = None;
        for (index, RailView { state, far_ends, is_primary }) in rails.iter().copied().enumerate() {
            match state {
                RailState::Inactive => {}
                RailState::Open(estimate) => {
                    open.push((estimate * (1 + far_ends), index));
                    nearest_open = nearest_open.min(far_ends);
                }
                RailState::Closed => {
                    if nearest_closed.is_none_or(|(least, _)| far_ends < least) {
                        nearest_closed = Some((far_ends, index));
                    }
                    if is_primary {
                        primary_closed = primary_closed.or(Some(index));
                    }
                }
                RailState::Paused(until) => {
                    retry_at = Some(retry_at.map_or(until, |first| first.min(until)));
                }
            }
        }
        if !open.is_empty() {
            // Few, and each was estimated once, so that they do not change while they are sorted.
            open.sort_unstable_by_key(|(estimate, _)| *estimate);
            let nearer = nearest_closed.filter(|(far_ends, _)| *far_ends < nearest_open);
            let reconnect = nearer.map(|(_, index)| index).or(primary_closed);
            return Self::Post {
                open: open.into_iter().map(|(_, index)| index).collect(),
                reconnect,
            };
        }
        match (nearest_closed, retry_at) {
            (Some((_, index)), _) => Self::Connect(index),
            (None, Some(until)) => Self::Wait(until),
            (None, None) => Self::Fail,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn view(state: RailState, far_ends: u32, is_primary: bool) -> RailView {
        RailView { state, far_ends, is_primary }
    }

    const fn open(estimate_ms: u64, far_ends: u32) -> RailView {
        view(RailState::Open(Duration::from_millis(estimate_ms)), far_ends, true)
    }

    const fn closed(far_ends: u32, is_primary: bool) -> RailView {
        view(RailState::Closed, far_ends, is_primary)
    }

    fn at(seconds: u64) -> Moment {
        Moment::from_boot(Duration::from_secs(seconds))
    }

    fn paused(seconds: u64) -> RailView {
        view(RailState::Paused(at(seconds)), 0, true)
    }

    const INACTIVE: RailView = view(RailState::Inactive, 0, true);

    fn check(rails: &[RailView], expected: &RailChoice) {
        assert_eq!(RailChoice::of(rails), *expected, "{rails:?}");
    }

    fn post(open: &[usize], reconnect: Option<usize>) -> RailChoice {
        RailChoice::Post { open: open.into(), reconnect }
    }

    #[test]
    fn open_pair_that_is_done_first_comes_first() {
        check(&[open(3, 0), open(1, 0), open(2, 0)], &post(&[1, 2, 0], None));
        // Each end that is far counts once more.
        check(&[open(2, 1), open(3, 0)], &post(&[1, 0], None));
        check(&[open(2, 2), open(7, 0), open(4, 1)], &post(&[0, 1, 2], None));
        check(&[INACTIVE, paused(1), open(9, 2)], &post(&[2], None));
    }

    #[test]
    fn nearer_or_primary_pair_is_connected_beside_open_ones() {
        check(&[open(1, 1), closed(0, false)], &post(&[0], Some(1)));
        check(&[open(1, 1), closed(1, false)], &post(&[0], None));
        check(&[open(1, 0), closed(0, false), closed(1, true)], &post(&[0], Some(2)));
        check(&[open(1, 1), closed(2, true), closed(0, false)], &post(&[0], Some(2)));
        check(&[closed(1, true), open(1, 1), closed(1, true)], &post(&[1], Some(0)));
    }

    #[test]
    fn nearest_closed_pair_is_connected_where_none_is_open() {
        check(&[closed(1, true), closed(0, false), closed(0, true)], &RailChoice::Connect(1));
        check(&[paused(1), closed(2, false)], &RailChoice::Connect(1));
    }

    #[test]
    fn transfer_waits_for_the_first_pause_or_fails() {
        check(&[paused(3), INACTIVE, paused(2)], &RailChoice::Wait(at(2)));
        check(&[INACTIVE], &RailChoice::Fail);
        check(&[], &RailChoice::Fail);
    }
}
