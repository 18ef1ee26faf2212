//! Metrics of tenants and quotas under upstream's names; none without multi-tenancy.

use mooncake_base::exposition::Exposition;

use crate::{service::Service, state::TenantQuota};

/// Reads the value of a metric from a tenant's quota.
type Part = fn(&TenantQuota) -> u64;

/// Gauges per tenant: suffix of the name, help text, and value.
const GAUGES: [(&str, &str, Part); 6] = [
    ("requested_bytes", "Bytes granted by the quota file.", |quota| quota.requested),
    ("effective_bytes", "Bytes that may be used now.", |quota| quota.effective),
    ("charged_bytes", "Bytes in use, including unfinished puts.", |quota| quota.charged),
    ("admission_closed", "1: a put must evict first or is refused.", |quota| {
        u64::from(quota.is_used_up())
    }),
    ("over_quota", "1: more bytes are in use than the quota allows.", |quota| {
        u64::from(quota.is_exceeded())
    }),
    ("explicit_policy", "1: the quota file lists the tenant.", |_| 1),
];

/// Adds the metrics.
pub(super) fn add(out: &mut Exposition, service: &Service) {
    if !service.is_multi_tenant() {
        return;
    }
    let quotas = service.quotas();
    let rows: [(&str, &str, &str, Part); 6] = [
        ("requested_bytes", "gauge", "Bytes granted by the quota file.", |quota| quota.requested),
        ("quota_bytes", "gauge", "Bytes that may be used now.", |quota| quota.effective),
        ("used_bytes", "gauge", "Bytes of memory in use, including unfinished puts.", |quota| {
            quota.charged
        }),
        (
            "disk_bytes",
            "gauge",
            "Bytes of copies on disk, which the quota does not limit.",
            |quota| quota.on_disk,
        ),
        ("refused_puts_total", "counter", "Puts refused for lack of quota.", |quota| quota.refused),
        (
            "evicted_bytes_total",
            "counter",
            "Bytes of a tenant evicted for its own puts.",
            |quota| quota.evicted_bytes,
        ),
    ];
    for (ending, kind, help, part) in rows {
        let name = format!("mooncake_master_tenant_{ending}");
        out.head(&name, kind, help);
        for quota in &quotas {
            out.sample(&name, &[("tenant", quota.tenant.as_str())], part(quota));
        }
    }
}

/// Adds the metrics under upstream's names.
pub(super) fn add_upstream(out: &mut Exposition, service: &Service) {
    if !service.is_multi_tenant() {
        return;
    }
    let quotas = service.quotas();
    for (ending, help, part) in GAUGES {
        let name = format!("mooncake_tenant_quota_{ending}");
        out.head(&name, "gauge", help);
        for quota in &quotas {
            out.sample(&name, &[("tenant_id", quota.tenant.as_str())], part(quota));
        }
    }
    let name = "mooncake_tenant_quota_reject_total";
    out.head(name, "counter", "Puts refused for lack of quota.");
    for quota in &quotas {
        let labels = [("tenant_id", quota.tenant.as_str()), ("reason", "quota_exceeded")];
        out.sample(name, &labels, quota.refused);
    }
    let name = "mooncake_tenant_evict_bytes_total";
    out.head(name, "counter", "Bytes of a tenant evicted for its own puts.");
    for quota in &quotas {
        out.sample(name, &[("tenant_id", quota.tenant.as_str())], quota.evicted_bytes);
    }
    let sum = |part: Part| quotas.iter().map(|quota| u128::from(part(quota))).sum::<u128>();
    out.gauge(
        "mooncake_tenant_quota_allocatable_capacity_bytes",
        "Bytes that all tenants share.",
        service.totals().capacity,
    );
    for (ending, help, part) in &GAUGES[..2] {
        let name = format!("mooncake_tenant_quota_{ending}_sum");
        out.gauge(&name, &format!("{help} The sum over all tenants."), sum(*part));
    }
}
