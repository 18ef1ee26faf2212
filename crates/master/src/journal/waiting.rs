//! The age of the oldest effect that is not in the log, by which a stall of the disk is noticed.

use mooncake_base::Moment;

use super::{Journal, LogSync};

/// The last effect at the time of a look at the log.
#[derive(Debug, Clone, Copy)]
pub(super) struct WaitingEffect {
    position: u64,
    since: Moment,
}

impl Journal {
    /// Returns since when, as far as earlier calls of this have seen, an effect waits to be written,
    /// or to be synced with [`LogSync::Always`]; `None` if no effect has waited since the last call.
    /// Asks for the write of one that waited before, since no call may have asked for it.
    pub(crate) fn waiting_since(&self, now: Moment) -> Option<Moment> {
        let mut waiting = self.waiting.lock();
        if waiting.is_none_or(|effect| self.is_durable(effect.position)) {
            let position = self.queue.lock().end();
            let is_waiting = !self.is_durable(position);
            *waiting = is_waiting.then_some(WaitingEffect { position, since: now });
        }
        let since = (*waiting)?.since;
        if since < now {
            match self.sync {
                LogSync::Always => self.sync_requests.request(),
                LogSync::Interval(_) | LogSync::Never => self.write_requests.request(),
            }
        }
        Some(since)
    }
}
