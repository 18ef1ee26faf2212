//! Puts as log effects.

use std::time::Duration;

use super::PutRef;
use crate::state::{
    Effect, LoggedPin, State, Value,
    catalog::object::ordinal_of,
    ids::WriteSlot,
    put::{options::RequestedPin, write::Write},
};

impl State {
    /// Logs that a put started.
    pub(super) fn log_put_started(&mut self, number: WriteSlot) {
        if !self.effects.is_recording() {
            return;
        }
        // Taken out, since the effect borrows from the state.
        let mut effects = std::mem::take(&mut self.effects);
        if let Some(started) = self.logged_write(self.writes.at(number)) {
            effects.record(|| started);
        }
        self.effects = effects;
    }

    /// Returns the effect of an unfinished put; `None` if it was displaced.
    pub(in crate::state) fn logged_write<'a>(&'a self, write: &'a Write) -> Option<Effect<'a>> {
        let object = self.objects.at(write.object?);
        let value = Value {
            tenant: self.objects.logged_tenant(object.tenant),
            key: self.objects.key(object),
            length: write.length,
            copies: self.logged_copies(&write.replicas),
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
        Some(Effect::Started { version, client, value, is_replacing, request })
    }

    pub(super) fn log_put_dropped(&mut self, version: u64) {
        self.effects.record(|| Effect::WriteDropped { version });
    }

    pub(super) fn log_put_published(
        &mut self,
        version: u64,
        put: &PutRef<'_>,
        pin: Option<Duration>,
    ) {
        if self.effects.is_recording() {
            // The replicas of a put have the lowest ordinals.
            let failed = put.failed_replicas.iter().filter_map(|&id| ordinal_of(id, version));
            let failed: Vec<u8> = failed.filter_map(|number| number.try_into().ok()).collect();
            let checksum = put.checksum;
            let failed = &failed[..];
            self.effects.record(|| Effect::Published { version, failed, checksum, pin });
        }
    }
}
