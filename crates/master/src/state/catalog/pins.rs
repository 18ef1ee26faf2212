//! Soft pins: objects that are evicted after all others while they are in use.

use std::time::Duration;

use mooncake_base::Moment;

use crate::state::{catalog::split_map::SplitMap, ids::ObjectSlot};

/// Soft pins; few objects have one.
#[derive(Debug, Default)]
pub(in crate::state) struct Pins(pub(in crate::state) SplitMap<ObjectSlot, Pin>);

#[derive(Debug, Clone, Copy)]
pub(in crate::state) struct Pin {
    pub(in crate::state) until: Moment,
    pub(in crate::state) ttl: Duration,
}

impl Pins {
    /// Returns the time that the pin lasts after each access.
    pub(in crate::state) fn ttl(&self, now: Moment, object: ObjectSlot) -> Option<Duration> {
        self.0.get(&object).filter(|pin| !pin.until.has_passed(now)).map(|pin| pin.ttl)
    }

    /// Returns the time of the pin, even of an expired one.
    pub(in crate::state) fn requested_ttl(&self, object: ObjectSlot) -> Option<Duration> {
        self.0.get(&object).map(|pin| pin.ttl)
    }

    /// Forgets the pin of an object.
    pub(in crate::state) fn remove(&mut self, object: ObjectSlot) {
        self.0.remove(&object);
    }

    pub(in crate::state) fn count(&self) -> u64 {
        self.0.len() as u64
    }
}
