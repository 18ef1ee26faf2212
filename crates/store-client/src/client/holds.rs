//! Fences that are handed back: what a read leaves for the next call to tell the master, so that
//! memory which was freed meanwhile need not rest until the fence ends by itself.
//!
//! Telling is a courtesy: what is lost on the way, or does not fit, ends by its time.

use std::sync::Arc;

use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, Moment, SystemClock};
use mooncake_proto::v1;

/// The most objects that wait to be told of. More of them end by their time.
const WAITING_MAX: usize = 1 << 16;

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
        results: &[v1::LocateResult],
        until: Moment,
        outbox: &Arc<Outbox>,
    ) -> Option<Self> {
        let granted: Vec<_> = results
            .iter()
            .filter(|result| result.fence != 0)
            .map(|result| Granted {
                fence: result.fence,
                version: result.version,
                object: result.object,
            })
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
    /// What is to be told now, but for what has ended by itself.
    pub(super) fn take(&self) -> Vec<v1::FenceReturn> {
        let waiting = {
            let mut waiting = self.0.lock();
            if waiting.is_empty() {
                return Vec::new();
            }
            std::mem::take(&mut *waiting)
        };
        let now = SystemClock.now();
        let mut returns: Vec<v1::FenceReturn> = Vec::new();
        for (_, granted) in waiting.into_iter().filter(|(until, _)| !until.has_passed(now)) {
            // Objects of one locate have one fence, as a rule.
            if returns.last().is_none_or(|last| last.fence != granted.fence) {
                returns.push(v1::FenceReturn { fence: granted.fence, ..Default::default() });
            }
            if let Some(last) = returns.last_mut() {
                last.versions.push(granted.version);
                last.objects.push(granted.object);
            }
        }
        returns
    }
}
