//! Puts as log effects.

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
        self.inventory.record_of(self.writes.at(number), logged_write);
    }

    pub(super) fn log_put_dropped(&mut self, version: u64) {
        self.inventory.record(|| Effect::WriteDropped { version });
    }
}

/// Returns the effect of an unfinished put; `None` if it was displaced.
pub(in crate::state) fn logged_write<'a>(
    inventory: &'a Inventory,
    write: &'a Write,
) -> Option<Effect<'a>> {
    let object = inventory.object(write.object?);
    let value = Value {
        tenant: inventory.objects().logged_tenant(object.tenant),
        key: inventory.objects().key(object),
        length: write.length,
        copies: inventory.pool().logged_copies(&write.replicas),
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
