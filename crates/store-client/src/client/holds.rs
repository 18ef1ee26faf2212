//! Fences that are handed back: what a read leaves for the next call to tell the master, so that
//! memory which was freed meanwhile need not rest until the fence ends by itself.
//!
//! Telling is a courtesy: what is lost on the way, or does not fit, ends by its time.

use std::{sync::Arc, time::Duration};

use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, Moment, SystemClock};
use mooncake_proto::v1;

/// The most objects that wait to be told of. More of them end by their time.
const WAITING_MAX: usize = 1 << 16;

/// How long a fence is told of after it has ended for its reader, who counts from before the question
/// and with a margin: for the master it may stand for a while longer. To tell of one that has ended
/// there too does no harm.
const AFTERWARDS: Duration = Duration::from_secs(2);

/// What one locate was granted, for itself alone. Dropped when the last of its objects is, and
/// thereby handed back: nobody can read any more by what it said.
#[derive(Debug)]
pub(crate) struct Holds {
    granted: Vec<Granted>,
    until: Moment,
    outbox: Arc<Outbox>,
}

/// A fence, and the object it covers.
#[derive(Debug, Clone, Copy)]
struct Granted {
    fence: u64,
    version: u64,
    object: u32,
}

/// What the next call will tell.
#[derive(Debug, Default)]
pub(super) struct Outbox(Mutex<Vec<(Moment, Granted)>>);

impl Holds {
    /// What the answers grant, if they grant anything.
    pub(super) fn of(
        answer: &v1::LocateResponse,
        until: Moment,
        outbox: &Arc<Outbox>,
    ) -> Option<Self> {
        let granted: Vec<_> = answer
            .fences()
            .map(|(fence, version, object)| Granted { fence, version, object })
            .collect();
        (!granted.is_empty()).then(|| Self { granted, until, outbox: Arc::clone(outbox) })
    }
}

impl Drop for Holds {
    fn drop(&mut self) {
        // Not waited for: in a forked child nobody may be there to let go of the lock.
        let Some(mut waiting) = self.outbox.0.try_lock() else { return };
        let room = WAITING_MAX.saturating_sub(waiting.len());
        waiting.extend(self.granted.iter().take(room).map(|granted| (self.until, *granted)));
    }
}

impl Outbox {
    /// What is to be told now, but for what has ended by itself for sure.
    pub(super) fn take(&self) -> Vec<v1::FenceRelease> {
        let waiting = {
            let mut waiting = self.0.lock();
            if waiting.is_empty() {
                return Vec::new();
            }
            std::mem::take(&mut *waiting)
        };
        let now = SystemClock.now();
        let mut returns: Vec<v1::FenceRelease> = Vec::new();
        for (_, granted) in waiting.into_iter().filter(|(until, _)| is_worth_telling(*until, now)) {
            // Objects of one locate have one fence, as a rule.
            if returns.last().is_none_or(|last| last.fence != granted.fence) {
                returns.push(v1::FenceRelease { fence: granted.fence, ..Default::default() });
            }
            if let Some(last) = returns.last_mut() {
                last.versions.push(granted.version);
                last.objects.push(granted.object);
            }
        }
        returns
    }
}

fn is_worth_telling(until: Moment, now: Moment) -> bool {
    !(until + AFTERWARDS).has_passed(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(outbox: &Arc<Outbox>, until: Moment) -> Vec<v1::FenceRelease> {
        let granted = vec![Granted { fence: 7, version: 3, object: 1 }];
        drop(Holds { granted, until, outbox: Arc::clone(outbox) });
        outbox.take()
    }

    #[test]
    fn a_fence_that_ended_just_now_for_its_reader_is_handed_back_and_one_long_ago_is_not() {
        let outbox = Arc::<Outbox>::default();
        let now = SystemClock.now();
        // Under the reader's margin the master's end of the fence is still to come.
        let told_now = told(&outbox, now);
        assert_eq!((told_now.len(), told_now[0].fence), (1, 7));
        assert!(outbox.take().is_empty(), "it is told once");
        assert!(is_worth_telling(now, now + AFTERWARDS / 2));
        assert!(!is_worth_telling(now, now + AFTERWARDS));
    }
}
