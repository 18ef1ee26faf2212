//! The endpoints for drain jobs and quotas.

use std::sync::Arc;

use axum::{
    Router,
    body::Bytes,
    extract::{RawQuery, State},
    http::StatusCode,
    response::Response,
    routing::{get, post, put},
};
use mooncake_base::{Error, ErrorCode, JobId};
use mooncake_proto::v1::{self, request, response};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    Admin, AdminContext, body::LimitedBody, call_failure, decoded, failure, json_reply, parameter,
};

/// The number and name of a drain job's type in upstream's endpoints.
const DRAIN: (u32, &str) = (0, "DRAIN");

/// Returns the routes that change something; the caller adds the access guard.
pub(super) fn write_routes() -> Router<Arc<Admin>> {
    Router::new()
        .route("/api/v1/drain_jobs", post(create))
        .route("/api/v1/drain_jobs/cancel", post(cancel))
        .route("/api/v1/tenant_quotas", put(set_quota).delete(remove_quota))
}

/// Returns the read-only routes.
pub(super) fn read_routes() -> Router<Arc<Admin>> {
    Router::new()
        .route("/api/v1/drain_jobs/query", get(query))
        .route("/api/v1/tenant_quotas", get(quotas))
}

/// The body of a request that creates a drain job.
#[derive(Debug, Deserialize)]
struct NewDrainJob {
    #[serde(default)]
    segments: Vec<String>,
    #[serde(default)]
    target_segments: Vec<String>,
    #[serde(default)]
    max_concurrency: u32,
    #[serde(default)]
    allow_eviction: bool,
}

/// The body of a request that sets a quota.
#[derive(Debug, Deserialize)]
struct NewQuota {
    requested_quota_bytes: u64,
}

/// POST /api/v1/drain_jobs
async fn create(State(admin): AdminContext, LimitedBody(body): LimitedBody) -> Response {
    let job: NewDrainJob = match serde_json::from_slice(&body) {
        Ok(job) => job,
        Err(error) => return bad_request(&format!("Invalid JSON body: {error}")),
    };
    let job = v1::NewDrainJob {
        segments: job.segments,
        targets: job.target_segments,
        concurrency: job.max_concurrency,
        allow_eviction: job.allow_eviction,
    };
    let call = v1::CreateDrainJobsRequest { caller: None, jobs: vec![job] };
    match admin.ask(request::Call::CreateDrainJobs(call)).await {
        response::Call::CreateDrainJobs(answer) => single_job(answer.results, created),
        other => call_failure(other),
    }
}

/// GET /api/v1/drain_jobs/query?job_id=a-b
async fn query(State(admin): AdminContext, RawQuery(query): RawQuery) -> Response {
    let Some(job) = job_id(query) else { return bad_request("Missing or invalid job_id") };
    let call = v1::QueryDrainJobsRequest { caller: None, jobs: vec![job] };
    match admin.ask(request::Call::QueryDrainJobs(call)).await {
        response::Call::QueryDrainJobs(answer) => single_job(answer.results, details),
        other => call_failure(other),
    }
}

/// POST /api/v1/drain_jobs/cancel?job_id=a-b
async fn cancel(State(admin): AdminContext, RawQuery(query): RawQuery) -> Response {
    let Some(job) = job_id(query) else { return bad_request("Missing or invalid job_id") };
    let call = v1::CancelDrainJobsRequest { caller: None, jobs: vec![job] };
    match admin.ask(request::Call::CancelDrainJobs(call)).await {
        response::Call::CancelDrainJobs(answer) => single_job(answer.results, created),
        other => call_failure(other),
    }
}

/// GET /api/v1/tenant_quotas[?tenant_id=T]
async fn quotas(State(admin): AdminContext, RawQuery(query): RawQuery) -> Response {
    show_quotas(&admin, tenant_id(query)).await
}

/// Returns the quota of a tenant, or of all.
async fn show_quotas(admin: &Admin, tenant: Option<String>) -> Response {
    let tenants = tenant.iter().cloned().collect();
    let call = v1::QueryQuotasRequest { caller: None, tenants };
    let results = match admin.ask(request::Call::QueryQuotas(call)).await {
        response::Call::QueryQuotas(answer) => answer.results,
        response::Call::Failure(failure) => return item_failure(&failure),
        other => return call_failure(other),
    };
    if let Some(failure) = results.iter().find_map(|result| result.failure.as_ref()) {
        return item_failure(failure);
    }
    let mut shown: Vec<Value> = results.iter().map(quota).collect();
    let data = match tenant {
        Some(_) => shown.pop().unwrap_or_default(),
        None => Value::from(shown),
    };
    json_reply(&json!({"success": true, "data": data}))
}

/// PUT /api/v1/tenant_quotas?tenant_id=T
async fn set_quota(
    State(admin): AdminContext,
    RawQuery(query): RawQuery,
    LimitedBody(body): LimitedBody,
) -> Response {
    let Some(tenant) = tenant_id(query) else { return bad_request("Missing or invalid tenant_id") };
    let bytes = match serde_json::from_slice::<NewQuota>(&body) {
        Ok(quota) => quota.requested_quota_bytes,
        Err(error) => return bad_request(&format!("Invalid JSON body: {error}")),
    };
    if let Some(refusal) = change_quota(&admin, &tenant, Some(bytes)).await {
        return refusal;
    }
    show_quotas(&admin, Some(tenant)).await
}

/// DELETE /api/v1/tenant_quotas?tenant_id=T
async fn remove_quota(State(admin): AdminContext, RawQuery(query): RawQuery) -> Response {
    let Some(tenant) = tenant_id(query) else { return bad_request("Missing or invalid tenant_id") };
    change_quota(&admin, &tenant, None)
        .await
        .unwrap_or_else(|| json_reply(&json!({"success": true, "data": null})))
}

/// Sets or removes the quota of a tenant. Returns the error reply if that is refused.
async fn change_quota(admin: &Admin, tenant: &str, bytes: Option<u64>) -> Option<Response> {
    let quotas = vec![v1::Quota { tenant: tenant.to_owned(), bytes }];
    let call = v1::SetQuotasRequest { caller: None, quotas };
    match admin.ask(request::Call::SetQuotas(call)).await {
        response::Call::SetQuotas(answer) => match answer.results.first() {
            Some(v1::ItemResult { failure: Some(failure) }) => Some(item_failure(failure)),
            _ => None,
        },
        other => Some(call_failure(other)),
    }
}

/// Returns the reply for the only job of a response, or its failure.
fn single_job(
    results: Vec<v1::DrainJobResult>,
    show: fn(&v1::DrainJobResult) -> Value,
) -> Response {
    match results.first() {
        Some(v1::DrainJobResult { failure: Some(failure), .. }) => item_failure(failure),
        Some(job) => json_reply(&show(job)),
        None => {
            call_failure(response::Call::CreateDrainJobs(v1::CreateDrainJobsResponse::default()))
        }
    }
}

fn created(job: &v1::DrainJobResult) -> Value {
    json!({
        "success": true,
        "job_id": job_id_text(job),
        "status": status_name(job.status()),
        "error_code": 0,
        "error_message": "",
    })
}

fn details(job: &v1::DrainJobResult) -> Value {
    json!({
        "success": true,
        "job_id": job_id_text(job),
        "type": DRAIN.0,
        "type_name": DRAIN.1,
        "status": job.status,
        "status_name": status_name(job.status()),
        "created_at_ms_epoch": job.created_at_ms,
        "last_updated_at_ms_epoch": job.updated_at_ms,
        "segments": job.segments,
        "succeeded_units": job.succeeded,
        "failed_units": job.failed,
        "blocked_units": job.blocked,
        "active_units": job.active,
        "migrated_bytes": job.moved_bytes,
        "evicted_objects": job.evicted,
        "evicted_bytes": job.evicted_bytes,
        "message": job.message,
        "error_code": 0,
        "error_message": "",
    })
}

fn quota(quota: &v1::QuotaResult) -> Value {
    json!({
        "tenant_id": quota.tenant,
        "requested_quota_bytes": quota.requested,
        "effective_quota_bytes": quota.effective,
        "charged_bytes": quota.charged,
        "disk_bytes": quota.on_disk,
        "admission_closed": quota.charged >= quota.effective,
        "over_quota": quota.charged > quota.effective,
        "has_explicit_policy": true,
    })
}

fn status_name(status: v1::JobStatus) -> &'static str {
    match status {
        v1::JobStatus::Created => "CREATED",
        v1::JobStatus::Planning => "PLANNING",
        v1::JobStatus::Running => "RUNNING",
        v1::JobStatus::Succeeded => "SUCCEEDED",
        v1::JobStatus::Failed => "FAILED",
        v1::JobStatus::Canceled => "CANCELED",
    }
}

fn job_id_text(job: &v1::DrainJobResult) -> String {
    JobId::from_bytes(&job.job).map(|id| id.to_string()).unwrap_or_default()
}

fn job_id(query: Option<String>) -> Option<Bytes> {
    let query = query.unwrap_or_default();
    let id = JobId::parse(&text(&query, "job_id")?)?;
    Some(Bytes::copy_from_slice(&id.to_bytes()))
}

fn tenant_id(query: Option<String>) -> Option<String> {
    text(&query.unwrap_or_default(), "tenant_id").filter(|name| !name.is_empty())
}

fn text(query: &str, name: &str) -> Option<String> {
    String::from_utf8(decoded(parameter(query, name)?)).ok()
}

fn bad_request(why: &str) -> Response {
    failure(StatusCode::BAD_REQUEST, &Error::invalid(why.to_owned()))
}

/// Returns the error reply of a failed call with upstream's status. Invalid requests get the
/// message, other failures the name of the error code, as upstream's, and the message.
fn item_failure(from: &v1::Failure) -> Response {
    let error = Error::from(from);
    let code = error.code();
    let status = match code {
        ErrorCode::OBJECT_NOT_FOUND | ErrorCode::SEGMENT_NOT_FOUND | ErrorCode::JOB_NOT_FOUND => {
            StatusCode::NOT_FOUND
        }
        ErrorCode::INVALID_PARAMS => StatusCode::BAD_REQUEST,
        ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS
        | ErrorCode::UNAVAILABLE_IN_CURRENT_MODE
        | ErrorCode::TENANT_NOT_EMPTY => StatusCode::CONFLICT,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    match code {
        ErrorCode::INVALID_PARAMS => failure(status, &error),
        _ => failure(status, &Error::new(code, format!("{}: {error}", code.name()))),
    }
}
