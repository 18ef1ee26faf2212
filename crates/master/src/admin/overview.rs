//! GET /api/v1/overview: all data of the page in one JSON document.

use axum::{
    extract::{RawQuery, State},
    http::HeaderMap,
    response::Response,
};
use mooncake_base::ByteSize;
use serde_json::{Value, json};

use super::{
    AdminContext, disks,
    history::{STEP, now_ms},
    json_reply, parameter,
    segments::{SegmentRow, status_name},
};
use crate::{
    journal::JournalStatus,
    service::{
        SIZE_BOUNDS, Service, VERSION,
        call_times::{BOUNDS_US, CallTime},
        op_metrics::{Op, OpCount},
        slow_log::SlowCall,
    },
    state::{JobView, TaskKind, TaskView},
};

/// The maximum number of segments and clients listed.
const ROWS_MAX: usize = 500;

/// The maximum number of tasks and of drain jobs listed.
const TASKS_SHOWN: usize = 30;
const DRAINS_SHOWN: usize = 20;

/// The maximum number of slow calls listed.
const SLOW_SHOWN: usize = 50;

/// The history contains samples later than `since` (milliseconds since 1970); all samples without
/// it.
pub(super) async fn show(
    State(admin): AdminContext,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Response {
    let query = query.unwrap_or_default();
    let since = parameter(&query, "since").and_then(|text| text.parse().ok()).unwrap_or(0);
    let mut shown = overview(&admin.service);
    let shows_keys = admin.settings.secrets.may_see_keys(&headers);
    shown["shows_keys"] = shows_keys.into();
    if !shows_keys {
        hide_keys(&mut shown);
    }
    shown["history"] = admin.samples.lock().since(since);
    json_reply(&shown)
}

fn overview(service: &Service) -> Value {
    let t = service.totals();
    let c = &t.counters;
    let traffic = service.traffic();
    let slow = service.slow_log();
    json!({
        "version": VERSION,
        "now_ms": now_ms(),
        "step_ms": u64::try_from(STEP.as_millis()).unwrap_or(u64::MAX),
        "uptime_ms": millis(service.now().since(service.started())),
        "addresses": addresses(service),
        "pool": {
            "used": t.used, "capacity": t.capacity, "writing": t.writing, "fenced": t.fenced,
            "awaiting_sync": t.awaiting_sync,
            "keys": t.keys, "soft_pinned_keys": t.soft_pinned_keys,
            "clients": t.clients, "segments": t.segments,
        },
        "reads": {
            "gets": traffic.gets, "hits": traffic.hits, "hit_bytes": traffic.hit_bytes,
            "disk_hits": traffic.disk_hits, "disk_hit_bytes": traffic.disk_hit_bytes,
        },
        "offloads": {
            "done": c.offloads_done, "bytes": c.offloaded_bytes, "refused": c.offloads_refused,
            "failed": c.offloads_failed, "missed": c.offloads_missed, "lost": c.disk_copies_lost,
            "adopted": c.records_adopted,
        },
        "sizes": {"bounds": SIZE_BOUNDS, "counts": traffic.sizes.counts},
        "evictions": {
            "attempted": c.evictions_attempted, "succeeded": c.evictions_succeeded,
            "keys": c.evicted_keys, "bytes": c.evicted_bytes,
        },
        "puts": {
            "without_room": c.puts_without_room, "with_fewer_copies": c.puts_with_fewer_copies,
            "displaced": c.puts_displaced, "released": c.puts_released, "bytes": traffic.sizes.sum,
        },
        "clients_expired": c.clients_expired,
        "segments": segments(service),
        "disks": disks::rows(service),
        "clients": clients(service),
        "calls": calls(service),
        "call_times": call_times(service),
        "events": super::kv_events(service),
        "journal": service.journal_status().map(|status| journal(service, &status)),
        "tasks": tasks(service),
        "quotas": quotas(service),
        "refused_calls": service.admission().map_or(0, crate::service::Admission::refused),
        "slow": {
            "threshold_ms": millis(slow.threshold()),
            "total": slow.total(),
            "latest": slow.latest().iter().take(SLOW_SHOWN).map(slow_call).collect::<Vec<_>>(),
        },
    })
}

/// Returns the status of the log. The page formats values by the unit at the end of their name.
fn journal(service: &Service, s: &JournalStatus) -> Value {
    let now = service.now();
    let mean = s.sync_time.as_secs_f64() * 1e3 / s.syncs.max(1) as f64;
    json!({
        "state": if s.is_healthy { "healthy" } else { "failed" },
        "failure": s.failure,
        "failures": s.failures,
        "directory": s.path.display().to_string(),
        "since_snapshot_bytes": s.log_bytes,
        "written_bytes": s.bytes_written,
        "records": s.records,
        "writes": s.writes,
        "syncs": s.syncs,
        "sync_mean_ms": mean,
        "sync_longest_ms": s.sync_time_max.as_secs_f64() * 1e3,
        "snapshots": s.snapshots,
        "snapshot_bytes": s.snapshot_bytes,
        "snapshot_age_ms": s.snapshot_at.map(|at| millis(now.since(at))),
        "recovery_ms": s.recovery_time.as_secs_f64() * 1e3,
    })
}

/// Returns copies, moves and drains in progress, and the latest finished drains.
fn tasks(service: &Service) -> Value {
    let work = service.work(TASKS_SHOWN);
    let c = service.totals().counters;
    let note = format!(
        "{} pending, {} running; {} done, {} failed",
        work.pending, work.processing, c.tasks_done, c.tasks_failed
    );
    let drain = |job: &JobView| {
        json!({
            "name": format!("drain {}", job.segments.join(", ")),
            "id": job.id.to_string(),
            "state": format!("{:?}", job.status).to_lowercase(),
            "about": format!(
                "{} moved ({}), {} in progress, {} blocked, {} failed. {}",
                job.succeeded, ByteSize(job.moved_bytes), job.active, job.blocked, job.failed,
                job.message
            ),
        })
    };
    let task = |task: &TaskView| {
        let is_copy = task.kind == TaskKind::Copy;
        json!({
            "name": format!("{} {}", if is_copy { "copy" } else { "move" }, task.key),
            "id": task.id.to_string(),
            "state": format!("{:?}", task.status).to_lowercase(),
            "about": task.message,
        })
    };
    let drains = work.jobs.iter().take(DRAINS_SHOWN).map(drain);
    let rows: Vec<Value> = drains.chain(work.tasks.iter().map(task)).collect();
    json!({
        "note": note,
        "rows": rows,
        "pending": work.pending,
        "processing": work.processing,
        "done": c.tasks_done,
        "failed": c.tasks_failed,
        "drains": {
            "running": work.jobs.iter().filter(|job| !job.status.is_over()).count(),
            "done": c.drains_done, "failed": c.drains_failed, "cancelled": c.drains_cancelled,
        },
    })
}

/// Returns the tenants with a quota; empty without multi-tenancy.
fn quotas(service: &Service) -> Value {
    let row = |quota: crate::state::TenantQuota| {
        json!({
            "tenant": quota.tenant.as_str(), "requested": quota.requested,
            "effective": quota.effective, "charged": quota.charged, "on_disk": quota.on_disk,
            "refused": quota.refused,
        })
    };
    service.quotas().into_iter().take(ROWS_MAX).map(row).collect()
}

fn addresses(service: &Service) -> Value {
    let addresses = service.addresses();
    let text = |address: Option<std::net::SocketAddr>| address.map(|address| address.to_string());
    json!({
        "rpc": text(addresses.map(|a| a.rpc)),
        "admin": text(addresses.and_then(|a| a.admin)),
        "metadata": text(addresses.and_then(|a| a.metadata)),
    })
}

fn segments(service: &Service) -> Value {
    let row = |summary| {
        let shown = SegmentRow::new(summary);
        json!({
            "name": shown.segment.name,
            "endpoint": shown.segment.endpoint,
            "protocol": shown.segment.protocol,
            "client": shown.client,
            "status": status_name(shown.status),
            "used": shown.used,
            "size": shown.segment.length,
        })
    };
    service.segments().into_iter().take(ROWS_MAX).map(row).collect()
}

fn clients(service: &Service) -> Value {
    let row = |client: crate::service::ConnectedClient| {
        json!({
            "id": client.id.to_string(),
            "name": client.name,
            "heard_ms_ago": millis(client.since_heartbeat),
        })
    };
    service.clients().into_iter().take(ROWS_MAX).map(row).collect()
}

/// Returns the operations called at least once, with single calls and batches added up.
fn calls(service: &Service) -> Value {
    let row = |(op, ..): (Op, _, _)| {
        let count = service.op_metrics().count(op);
        (count != OpCount::default()).then(|| {
            json!({
                "name": op.call_name(),
                "calls": count.calls(),
                "items": count.all_items(),
                "missed": count.missed,
                "kept": count.kept,
                "failed": count.failures(),
            })
        })
    };
    Op::all().filter_map(row).collect()
}

/// Returns the durations of calls by kind: the number of calls by class, whose upper bounds are in
/// microseconds.
fn call_times(service: &Service) -> Value {
    let times = service.call_times().snapshot();
    let row = |(call, time): &(&str, CallTime)| json!({"name": call, "classes": time.counts});
    json!({"bounds_us": BOUNDS_US, "kinds": times.iter().map(row).collect::<Vec<_>>()})
}

/// Takes the keys out of the tasks and the slow calls.
fn hide_keys(overview: &mut Value) {
    fn rows<'a>(overview: &'a mut Value, list: &str) -> impl Iterator<Item = &'a mut Value> {
        overview.pointer_mut(list).and_then(Value::as_array_mut).into_iter().flatten()
    }
    for task in rows(overview, "/tasks/rows") {
        // The name is "drain" with segments, or another verb with a key.
        let verb = task["name"].as_str().and_then(|name| name.split(' ').next());
        if let Some(verb) = verb.filter(|verb| *verb != "drain") {
            task["name"] = verb.to_owned().into();
            task["about"] = "".into();
        }
    }
    for call in rows(overview, "/slow/latest") {
        call["key"] = "".into();
        if !call["failure"].is_null() {
            call["failure"] = "failed".into();
        }
    }
}

fn slow_call(call: &SlowCall) -> Value {
    json!({
        "ended_ms": call.ended_ms,
        "call": call.call,
        "items": call.items,
        "key": call.key,
        "client": call.client,
        "took_ms": call.took.as_secs_f64() * 1e3,
        "failure": call.failure,
    })
}

fn millis(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
