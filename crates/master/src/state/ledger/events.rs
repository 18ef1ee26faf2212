//! Object events: an object became readable, or stopped being readable.
//!
//! Recorded in the order of the changes, and only while events are enabled.

use mooncake_base::TenantId;

use crate::state::{catalog::Catalog, ids::ObjectSlot, ledger::Log};

/// An event about an object or a tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ObjectEvent {
    /// The object became readable.
    Stored {
        /// Tenant of the object.
        tenant: TenantId,
        /// Key of the object.
        key: Box<[u8]>,
        /// Group of the object; empty: none.
        group: Box<[u8]>,
    },
    /// The object was removed, evicted, replaced or lost.
    Removed {
        /// Tenant of the object.
        tenant: TenantId,
        /// Key of the object.
        key: Box<[u8]>,
        /// Group of the object; empty: none.
        group: Box<[u8]>,
    },
    /// All objects of the tenant were removed at once; an event for each of them precedes.
    Cleared {
        /// Tenant whose objects were removed.
        tenant: TenantId,
    },
}

impl ObjectEvent {
    /// Returns the tenant.
    pub fn tenant(&self) -> &str {
        match self {
            Self::Stored { tenant, .. }
            | Self::Removed { tenant, .. }
            | Self::Cleared { tenant } => tenant.as_str(),
        }
    }

    /// Returns the key; empty for an event about a tenant.
    pub fn key(&self) -> &[u8] {
        match self {
            Self::Stored { key, .. } | Self::Removed { key, .. } => key,
            Self::Cleared { .. } => &[],
        }
    }

    /// Returns the group; empty: none.
    pub fn group(&self) -> &[u8] {
        match self {
            Self::Stored { group, .. } | Self::Removed { group, .. } => group,
            Self::Cleared { .. } => &[],
        }
    }
}

/// Events since the last [`Log::take_events`]. Costs nothing while events are off.
#[derive(Debug, Default)]
pub(in crate::state) struct EventBuffer {
    is_enabled: bool,
    list: Vec<ObjectEvent>,
}

impl Catalog {
    fn event_names(&self, slot: ObjectSlot) -> (TenantId, Box<[u8]>, Box<[u8]>) {
        let object = self.objects.at(slot);
        let tenant = self.objects.tenant_name(object.tenant).clone();
        let group = self.groups.name(slot).unwrap_or_default();
        (tenant, Box::from(self.objects.key(object)), Box::from(group))
    }
}

impl Log {
    /// Records events from now on; take them after every change.
    pub fn enable_events(&mut self) {
        self.events.is_enabled = true;
    }

    /// Returns whether there are events to take.
    pub fn has_events(&self) -> bool {
        !self.events.list.is_empty()
    }

    /// Returns the events since the last call, in order.
    pub fn take_events(&mut self) -> Vec<ObjectEvent> {
        std::mem::take(&mut self.events.list)
    }

    /// Records that the object became readable.
    pub(in crate::state) fn emit_stored(&mut self, catalog: &Catalog, slot: ObjectSlot) {
        if self.events.is_enabled {
            let (tenant, key, group) = catalog.event_names(slot);
            self.events.list.push(ObjectEvent::Stored { tenant, key, group });
        }
    }

    /// Records that the object is no longer readable. Call it before the object leaves its group.
    pub(in crate::state) fn emit_removed(&mut self, catalog: &Catalog, slot: ObjectSlot) {
        if self.events.is_enabled {
            let (tenant, key, group) = catalog.event_names(slot);
            self.events.list.push(ObjectEvent::Removed { tenant, key, group });
        }
    }

    /// Records that all objects of the tenant were removed and none is left.
    pub(in crate::state) fn emit_cleared(&mut self, tenant: &TenantId) {
        if self.events.is_enabled {
            self.events.list.push(ObjectEvent::Cleared { tenant: tenant.clone() });
        }
    }
}
