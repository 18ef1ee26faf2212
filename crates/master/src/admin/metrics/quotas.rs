//! Metrics of tenants and quotas under our and upstream's names; none without multi-tenancy.

use mooncake_base::exposition::{Exposition, Metric};

use crate::{service::Service, state::TenantQuota};

static TENANT: [Metric<TenantQuota>; 6] = [
    Metric::gauge("requested_bytes", "Bytes granted by the quota file.", |it| it.requested),
    Metric::gauge("quota_bytes", "Bytes that may be used now.", |it| it.effective),
    Metric::gauge("used_bytes", "Bytes of memory in use, including unfinished puts.", |it| {
        it.charged
    }),
    Metric::gauge("disk_bytes", "Bytes of copies on disk, which the quota does not limit.", |it| {
        it.on_disk
    }),
    Metric::counter("refused_puts_total", "Puts refused for lack of quota.", |it| it.refused),
    Metric::counter("evicted_bytes_total", "Bytes of a tenant evicted for its own puts.", |it| {
        it.evicted_bytes
    }),
];

/// Adds the metrics.
pub(super) fn add(out: &mut Exposition, service: &Service) {
    if service.is_multi_tenant() {
        let quotas = service.quotas();
        let rows = quotas.iter().map(|quota| (vec![("tenant", quota.tenant.as_str())], quota));
        out.rows("mooncake_master_tenant_", &TENANT, &rows.collect::<Vec<_>>());
    }
}

/// The first two are also shown as a sum.
static UPSTREAM: [Metric<TenantQuota>; 8] = [
    Metric::gauge("quota_requested_bytes", "Bytes granted by the quota file.", |it| it.requested),
    Metric::gauge("quota_effective_bytes", "Bytes that may be used now.", |it| it.effective),
    Metric::gauge("quota_charged_bytes", "Bytes in use, including unfinished puts.", |it| {
        it.charged
    }),
    Metric::gauge("quota_admission_closed", "1: a put must evict first or is refused.", |it| {
        it.is_used_up().into()
    }),
    Metric::gauge("quota_over_quota", "1: more bytes are in use than the quota allows.", |it| {
        it.is_exceeded().into()
    }),
    Metric::gauge("quota_explicit_policy", "1: the quota file lists the tenant.", |_| 1),
    Metric::counter("quota_reject_total", "Puts refused for lack of quota.", |it: &TenantQuota| {
        it.refused
    })
    .labelled("reason", "quota_exceeded"),
    Metric::counter("evict_bytes_total", "Bytes of a tenant evicted for its own puts.", |it| {
        it.evicted_bytes
    }),
];

/// Adds the metrics under upstream's names.
pub(super) fn add_upstream(out: &mut Exposition, service: &Service) {
    if !service.is_multi_tenant() {
        return;
    }
    let quotas = service.quotas();
    let rows = quotas.iter().map(|quota| (vec![("tenant_id", quota.tenant.as_str())], quota));
    out.rows("mooncake_tenant_", &UPSTREAM, &rows.collect::<Vec<_>>());
    out.gauge(
        "mooncake_tenant_quota_allocatable_capacity_bytes",
        "Bytes that all tenants share.",
        service.totals().capacity,
    );
    for metric in &UPSTREAM[..2] {
        let help = format!("{} The sum over all tenants.", metric.help);
        let values = quotas.iter().map(|quota| u128::from(metric.entry(quota).1));
        out.gauge(&format!("mooncake_tenant_{}_sum", metric.name), &help, values.sum::<u128>());
    }
}
