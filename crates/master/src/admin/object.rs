//! GET /api/v1/object and /api/v1/memory: an object in full, and the reasons that hold memory.

use std::collections::BTreeMap;

use axum::{
    extract::{RawQuery, State},
    http::StatusCode,
    response::Response,
};
use mooncake_base::ErrorCode;
use serde_json::{Value, json};

use super::{AdminContext, decoded, failure, json_reply, parameter};
use crate::state::{CopyView, MemoryUse, ObjectView};

/// GET /api/v1/object?key=K&tenant_id=T: copies, leases, pins and version of an object; grants no
/// lease.
pub(super) async fn show(State(admin): AdminContext, RawQuery(query): RawQuery) -> Response {
    let query = query.unwrap_or_default();
    let key = decoded(parameter(&query, "key").unwrap_or_default());
    let tenant = decoded(parameter(&query, "tenant_id").unwrap_or_default());
    match admin.service.view_object(&String::from_utf8_lossy(&tenant), &key) {
        Ok(view) => json_reply(&object(&key, &view)),
        Err(error) if error.code() == ErrorCode::OBJECT_NOT_FOUND => {
            failure(StatusCode::NOT_FOUND, &error)
        }
        Err(error) => failure(StatusCode::BAD_REQUEST, &error),
    }
}

/// GET /api/v1/memory: the bytes of the pool by the reason that holds them.
pub(super) async fn memory(State(admin): AdminContext) -> Response {
    json_reply(&parts(&admin.service.memory_use()))
}

fn parts(held: &MemoryUse) -> Value {
    json!({
        "success": true,
        "free_bytes": held.free,
        "evictable_bytes": held.evictable,
        "leased_bytes": held.leased,
        "hard_pinned_bytes": held.hard_pinned,
        "soft_pinned_bytes": held.soft_pinned,
        "writing_bytes": held.writing,
        "fenced_bytes": held.fenced,
        "awaiting_sync_bytes": held.awaiting_sync,
    })
}

fn object(key: &[u8], view: &ObjectView) -> Value {
    let millis = |left: std::time::Duration| u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
    let copy = |copy: &CopyView| {
        json!({
            "segment": copy.segment,
            "tier": if copy.is_on_disk { "disk" } else { "memory" },
            "endpoint": copy.endpoint,
            "occupied_bytes": copy.occupied,
            "is_readable": copy.is_readable,
        })
    };
    json!({
        "success": true,
        "key": String::from_utf8_lossy(key),
        "bytes": view.length,
        "is_complete": view.version.is_some(),
        // Versions exceed the integers that JSON readers keep exactly.
        "version": view.version.map(|version| version.0.to_string()),
        "checksum": view.checksum.map(|checksum| format!("{checksum:016x}")),
        "lease_left_ms": millis(view.lease_left),
        "fence_left_ms": millis(view.fence_left),
        "data_type": view.data_type,
        "expires_in_ms": view.expires_in.map(millis),
        "tags": view.tags.iter().collect::<BTreeMap<_, _>>(),
        "is_hard_pinned": view.is_hard_pinned,
        "soft_pin_ttl_ms": view.soft_pin_ttl.map(millis),
        "is_being_copied": view.is_being_copied,
        "group": view.group.as_deref().map(String::from_utf8_lossy),
        "unfinished_puts": view.unfinished_puts,
        "copies": view.copies.iter().map(copy).collect::<Vec<_>>(),
    })
}
