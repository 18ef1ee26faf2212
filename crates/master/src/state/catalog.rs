//! The catalog: objects by tenant and key, their groups, the tenants' quotas, and calls that list or
//! remove objects.

pub(super) mod clear;
pub(super) mod group;
pub(super) mod key_arena;
pub(super) mod lifecycle;
pub(super) mod object;
pub(super) mod query;
pub(super) mod tenant;
