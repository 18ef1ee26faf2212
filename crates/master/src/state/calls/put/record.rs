//! Puts as log effects.

use std::time::Duration;

use crate::state::{
    calls::put::{PutCalls, write::Write},
    ids::WriteSlot,
    inventory::Inventory,
    ledger::effect::{Effect, LoggedPin, Value},
    options::RequestedPin,
};

impl PutCalls<'_> {
    /// Logs that a put started.
    pub(super) fn log_put_started(&mut self, number: WriteSlot) {
        if !self.inventory.log.effects.is_recording() {
            return;
        }
        // Taken out, since the effect borrows from the state.
        let mut effects = std::mem::take(&mut self.inventory.log.effects);
        if let Some(started) = logged_write(self.inventory, self.writes.at(number)) {
            effects.record(|| started);
        }
        self.inventory.log.effects = effects;
    }

    pub(super) fn log_put_dropped(&mut self, version: u64) {
        self.inventory.log.effects.record(|| Effect::WriteDropped { version });
    }

    pub(super) fn log_put_published(
        &mut self,
        version: u64,
        failed: &[u8],
        checksum: Option<u64>,
        pin: Option<Duration>,
    ) {
        self.inventory.log.effects.record(|| Effect::Published { version, failed, checksum, pin });
    }
}

/// Returns the effect of an unfinished put; `None` if it was displaced.
pub(in crate::state) fn logged_write<'a>(
    inventory: &'a Inventory,
    write: &'a Write,
) -> Option<Effect<'a>> {
    let object = inventory.catalog.objects.at(write.object?);
    let value = Value {
        tenant: inventory.catalog.objects.logged_tenant(object.tenant),
        key: inventory.catalog.objects.key(object),
        length: write.length,
        copies: inventory.pool.logged_copies(&write.replicas),
        data_type: write.data_type,
        is_hard_pinned: write.is_hard_pinned,
        group: &write.group,
        pin: match write.soft_pin {
            RequestedPin::Preserve => LoggedPin::Preserve,
            RequestedPin::None => LoggedPin::None,
            RequestedPin::For(ttl) => LoggedPin::For(ttl),
        },
    };
    let &Write { version, client, is_replacing, request, .. } = write;
    let terms = write.terms.clone();
    Some(Effect::Started { version, client, value, is_replacing, request, terms })
}
