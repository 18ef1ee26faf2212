//! The catalog: objects by tenant and key, their groups, the tenants' quotas, and calls that list or
//! remove objects.

pub(super) mod annotations;
pub(super) mod clear;
pub(super) mod group;
pub(super) mod key_arena;
pub(super) mod lifecycle;
pub(super) mod object;
pub(super) mod query;
pub(super) mod split_map;
pub(super) mod tenant;
pub(super) mod view;

use mooncake_base::Moment;
use rustc_hash::FxHashMap;

use self::{annotations::Annotations, group::Groups, object::Objects, tenant::Tenants};
use super::{
    ids::ObjectSlot,
    reclaim::{ReleasedObjects, eviction_queue::EvictionQueue, pins::Pins},
};

/// Objects by key, and the tables that name them by their slots.
///
/// A complete object that is not hard-pinned is in the order of eviction or parked, a grouped one is
/// a member of its group, and one of a tenant with a quota is in the list of the tenant.
#[derive(Debug)]
pub(super) struct Catalog {
    pub(super) objects: Objects,
    pub(super) groups: Groups,
    pub(super) tenants: Tenants,
    pub(super) pins: Pins,
    pub(super) queue: EvictionQueue,
    pub(super) annotations: Annotations,
    pub(super) released: ReleasedObjects,
    /// Objects that clients copy, and until when.
    pub(super) copied: FxHashMap<ObjectSlot, Moment>,
}
