//! Objects during a replay, in the table that becomes the table of the state: a copy of each object
//! would double the memory of a recovery.

use std::time::Duration;

use mooncake_base::KeyRef;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::state::{
    catalog::object::{Flags, Objects},
    ids::{ObjectSlot, Slot, TenantIndex},
    ledger::{
        effect::LoggedCopy,
        replay::{LiveObject, LoggedAnnotation},
    },
};

/// The seed of the table until a restore gives it a secret one.
const REPLAY_SEED: u64 = 0;

/// The replicas of an object. The usual single one needs no heap memory.
pub(in crate::state) type LoggedCopies = SmallVec<[LoggedCopy; 1]>;

/// The objects of all tenants.
#[derive(Debug, Clone)]
pub(in crate::state) struct LoggedObjects {
    /// Without replicas: a restore allocates them.
    pub(in crate::state) table: Objects,
    /// By slot.
    pub(in crate::state) copies: Vec<LoggedCopies>,
    pub(in crate::state) extras: FxHashMap<ObjectSlot, LoggedExtras>,
}

/// What few objects have.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(in crate::state) struct LoggedExtras {
    pub(in crate::state) group: Box<[u8]>,
    pub(in crate::state) pin: Option<Duration>,
    pub(in crate::state) annotation: Option<Box<LoggedAnnotation>>,
}

impl Default for LoggedObjects {
    fn default() -> Self {
        Self { table: Objects::new(REPLAY_SEED), copies: Vec::new(), extras: FxHashMap::default() }
    }
}

impl LoggedObjects {
    /// Inserts the object of a key in place of an earlier one.
    pub(in crate::state) fn insert(
        &mut self,
        tenant: TenantIndex,
        key: KeyRef<'_>,
        live: LiveObject,
    ) {
        let hash = self.table.hash(tenant, key.as_bytes());
        let found = self.table.find_hashed(hash, tenant, key.as_bytes());
        // The limit of objects held when the object was put.
        let inserted = found.ok_or(()).or_else(|()| self.table.insert_hashed(hash, tenant, key));
        let Ok(slot) = inserted else { return };
        let object = self.table.at_mut(slot);
        object.version = live.version;
        object.length = live.length;
        object.data_type = live.data_type;
        object.flags.set(Flags::COMPLETE, true);
        object.flags.set(Flags::HARD_PINNED, live.is_hard_pinned);
        object.flags.set(Flags::GROUPED, !live.group.is_empty());
        self.table.set_checksum(slot, live.checksum);
        if slot.index() >= self.copies.len() {
            self.copies.resize(slot.index() + 1, LoggedCopies::new());
        }
        self.copies[slot.index()] = live.copies;
        let LiveObject { group, pin, annotation, .. } = live;
        self.set_extras(slot, LoggedExtras { group, pin, annotation });
    }

    /// Removes an object.
    pub(in crate::state) fn remove(&mut self, slot: ObjectSlot) {
        self.table.remove(slot);
        self.copies[slot.index()] = LoggedCopies::new();
        self.extras.remove(&slot);
    }

    /// Finds an object of that version.
    pub(in crate::state) fn find(
        &self,
        tenant: TenantIndex,
        key: &[u8],
        version: u64,
    ) -> Option<ObjectSlot> {
        let slot = self.table.find(tenant, key)?;
        (self.table.at(slot).version == version).then_some(slot)
    }

    pub(in crate::state) fn copies(&self, slot: ObjectSlot) -> &LoggedCopies {
        &self.copies[slot.index()]
    }

    pub(in crate::state) fn copies_mut(&mut self, slot: ObjectSlot) -> &mut LoggedCopies {
        &mut self.copies[slot.index()]
    }

    /// Changes what few objects have.
    pub(in crate::state) fn change_extras(
        &mut self,
        slot: ObjectSlot,
        change: impl FnOnce(&mut LoggedExtras),
    ) {
        let mut extras = self.extras.remove(&slot).unwrap_or_default();
        change(&mut extras);
        self.set_extras(slot, extras);
    }

    fn set_extras(&mut self, slot: ObjectSlot, extras: LoggedExtras) {
        if extras == LoggedExtras::default() {
            self.extras.remove(&slot);
        } else {
            self.extras.insert(slot, extras);
        }
    }

    /// Returns the number of objects.
    pub(in crate::state) fn len(&self) -> u64 {
        self.table.len()
    }

    /// Returns every object with its tenant and key.
    #[cfg(test)]
    pub(in crate::state) fn iter(&self) -> impl Iterator<Item = (TenantIndex, &[u8], LiveObject)> {
        ObjectSlot::range(0, self.table.slot_count()).filter_map(|slot| {
            let object = self.table.get(slot)?;
            let LoggedExtras { group, pin, annotation } =
                self.extras.get(&slot).cloned().unwrap_or_default();
            let live = LiveObject {
                version: object.version,
                length: object.length,
                copies: self.copies[slot.index()].clone(),
                data_type: object.data_type,
                is_hard_pinned: object.flags.has(Flags::HARD_PINNED),
                group,
                checksum: self.table.checksum(slot),
                pin,
                annotation,
            };
            Some((object.tenant, self.table.key(object), live))
        })
    }
}
