//! What others may want to hear of objects: that one can be read from now on, or no more.
//!
//! Told in the order in which it happens, and only while somebody listens.

use crate::state::ids::ObjectSlot;
use mooncake_base::TenantId;

use super::State;

/// One piece of news.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ObjectEvent {
    /// The object can be read from now on.
    Stored {
        /// Whose.
        tenant: TenantId,
        /// Under which key.
        key: Box<[u8]>,
        /// The group it belongs to; empty: none.
        group: Box<[u8]>,
    },
    /// The object cannot be read any more: removed, evicted, replaced or lost.
    Removed {
        /// Whose.
        tenant: TenantId,
        /// Under which key.
        key: Box<[u8]>,
        /// The group it belonged to; empty: none.
        group: Box<[u8]>,
    },
    /// All objects of the tenant were removed at once; the news of each of them came before.
    Cleared {
        /// Whose.
        tenant: TenantId,
    },
}

impl ObjectEvent {
    /// Whose objects it is about.
    pub fn tenant(&self) -> &str {
        match self {
            Self::Stored { tenant, .. }
            | Self::Removed { tenant, .. }
            | Self::Cleared { tenant } => tenant.as_str(),
        }
    }

    /// The key; empty if it is not about one.
    pub fn key(&self) -> &[u8] {
        match self {
            Self::Stored { key, .. } | Self::Removed { key, .. } => key,
            Self::Cleared { .. } => &[],
        }
    }

    /// The group; empty if there is none.
    pub fn group(&self) -> &[u8] {
        match self {
            Self::Stored { group, .. } | Self::Removed { group, .. } => group,
            Self::Cleared { .. } => &[],
        }
    }
}

/// The news since they were last taken. Costs nothing while nobody listens.
#[derive(Debug, Default)]
pub(super) struct EventBuffer {
    is_enabled: bool,
    list: Vec<ObjectEvent>,
}

impl State {
    /// Keeps news from now on, to be taken after every change.
    pub fn enable_events(&mut self) {
        self.events.is_enabled = true;
    }

    /// Whether there are news to take.
    pub fn has_events(&self) -> bool {
        !self.events.list.is_empty()
    }

    /// The news since the last call, in their order.
    pub fn take_events(&mut self) -> Vec<ObjectEvent> {
        std::mem::take(&mut self.events.list)
    }

    /// All objects were removed at once, and none is left.
    pub(super) fn emit_cleared(&mut self, tenant: &TenantId) {
        if self.events.is_enabled {
            self.events.list.push(ObjectEvent::Cleared { tenant: tenant.clone() });
        }
    }

    /// The object can be read from now on.
    pub(super) fn emit_stored(&mut self, slot: ObjectSlot) {
        if self.events.is_enabled {
            let (tenant, key, group) = self.event_names(slot);
            self.events.list.push(ObjectEvent::Stored { tenant, key, group });
        }
    }

    /// The object can be read no more; it is still in its group.
    pub(super) fn emit_removed(&mut self, slot: ObjectSlot) {
        if self.events.is_enabled {
            let (tenant, key, group) = self.event_names(slot);
            self.events.list.push(ObjectEvent::Removed { tenant, key, group });
        }
    }

    fn event_names(&self, slot: ObjectSlot) -> (TenantId, Box<[u8]>, Box<[u8]>) {
        let object = self.objects.at(slot);
        let tenant = self.objects.tenant_name(object.tenant).clone();
        let group = self.groups.name(slot).unwrap_or_default();
        (tenant, Box::from(self.objects.key(object)), Box::from(group))
    }
}
