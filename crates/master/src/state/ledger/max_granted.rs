//! Upper bounds of granted fences and leases, as the log records them.

use std::time::Duration;

use mooncake_base::Moment;

use crate::state::{
    ledger::{Log, effect::Effect},
    rules::Rules,
};

/// The first bound of fences: reads of up to 64 MiB need no other.
const BOUND_MIN: Duration = Duration::from_secs(1);

/// A raised bound is kept for this long after the last fence that needs it, so that it is logged
/// seldom.
const BOUND_KEPT: Duration = Duration::from_secs(10);

/// Upper bounds of all granted fences and leases, as the log records them.
///
/// The bound of fences is zero until the first read, and then a power of two of seconds. It is
/// raised when a read needs more than half of it, and falls again. A read does not wait until a
/// raised bound is in the log: it gets a shorter fence until then.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::state) struct MaxGranted {
    /// The recorded bound of fences.
    pub(in crate::state) fence: Duration,
    /// Log position behind its record.
    recorded_at: u64,
    /// Effects up to this position survive a restart; `None`: without a log nothing has to.
    durable: Option<u64>,
    /// The bound of the fences granted now.
    durable_fence: Duration,
    /// Until then the bound is not lowered.
    pub(in crate::state) raised_until: Moment,
    /// Maximum lease that an earlier master may have granted.
    pub(in crate::state) lease: Duration,
}

impl MaxGranted {
    /// Returns whether memory that must rest for `time` rests after a restart without a record.
    pub(in crate::state) fn covers(&self, time: Duration) -> bool {
        time <= self.fence.min(BOUND_MIN)
    }

    /// Returns the fence that may be granted to a read that needs `fence`.
    pub(in crate::state) fn grantable(&self, fence: Duration) -> Duration {
        if self.durable.is_some() { fence.min(self.durable_fence) } else { fence }
    }

    /// Records that effects up to this position survive a restart of the master.
    pub(in crate::state) fn confirm_durable(&mut self, position: u64) {
        if self.durable != Some(position) {
            self.durable = Some(position);
            self.confirm();
        }
    }

    /// Records a larger bound in the log before a fence needs it. Returns whether it did.
    pub(in crate::state) fn raise(
        &mut self,
        now: Moment,
        fence: Duration,
        rules: &Rules,
        log: &mut Log,
    ) -> bool {
        let needed = rules.fence_max().min(fence * 2);
        if needed > BOUND_MIN {
            self.raised_until = self.raised_until.max(now + fence + BOUND_KEPT);
        }
        if needed <= self.fence {
            return false;
        }
        let seconds = needed.max(BOUND_MIN).as_secs_f64().ceil() as u64;
        let bound = Duration::from_secs(seconds.next_power_of_two());
        self.fence = bound.min(rules.fence_max());
        self.record(log);
        true
    }

    /// Lowers the bound again, so that a few long fences do not quarantine all memory after a
    /// restart.
    pub(in crate::state) fn lower(&mut self, now: Moment, log: &mut Log) {
        if self.fence > BOUND_MIN && self.raised_until.has_passed(now) {
            self.fence = BOUND_MIN;
            self.record(log);
        }
    }

    /// Records both bounds in the log.
    pub(in crate::state) fn record(&mut self, log: &mut Log) {
        let (fence, lease) = (self.fence, self.lease);
        log.effects.record(|| Effect::MaxGranted { fence, lease });
        self.recorded_at = log.effects.position();
        self.confirm();
    }

    fn confirm(&mut self) {
        self.durable_fence = match self.durable {
            Some(durable) if durable < self.recorded_at => self.durable_fence.min(self.fence),
            _ => self.fence,
        };
    }
}
