//! GET /api/v1/disks: the directories that clients keep for the pool.

use axum::{extract::State, response::Response};
use serde_json::{Value, json};

use super::{AdminContext, json_reply};
use crate::service::{DiskSummary, Service};

/// GET /api/v1/disks
pub(super) async fn list(State(admin): AdminContext) -> Response {
    json_reply(&json!({"success": true, "disks": rows(&admin.service)}))
}

/// Returns a row for each disk.
pub(super) fn rows(service: &Service) -> Value {
    service.disks().iter().map(row).collect()
}

fn row(disk: &DiskSummary) -> Value {
    json!({
        "disk_id": disk.spec.id.to_string(),
        "name": disk.spec.name,
        "address": disk.spec.address,
        "client_id": disk.client.to_string(),
        "capacity_bytes": disk.spec.capacity,
        "used_bytes": disk.used,
        "objects": disk.objects,
        "waiting_objects": disk.waiting,
        "is_readable": disk.is_readable,
    })
}
