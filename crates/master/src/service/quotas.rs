//! The calls about quotas of tenants, and the quota file.

use std::sync::Arc;

use mooncake_base::sync::Mutex;
use mooncake_base::{Error, Result, TenantId};
use mooncake_proto::{
    calls::Method,
    v1::{self, ItemResult},
};

use super::{check_batch, check_name, shared_state::SharedState};
use crate::{config::quota_file::QuotaFile, state::TenantQuota};

/// The calls about quotas.
#[derive(Debug)]
pub(super) struct QuotaService {
    shared: Arc<SharedState>,
    /// The quota file, if there is one. Locked before the state.
    file: Mutex<Option<QuotaFile>>,
}

impl QuotaService {
    pub(super) fn new(shared: Arc<SharedState>) -> Self {
        Self { shared, file: Mutex::default() }
    }

    /// Applies the quotas of the file, and writes later changes back to it.
    ///
    /// # Errors
    /// The file cannot be read or parsed, or a quota is invalid.
    pub(super) fn load_file(&self, path: &str) -> Result<()> {
        let quota_file = QuotaFile::read(path)?;
        let mut state = self.shared.lock();
        let mut known = state.quotas()?;
        for (tenant, bytes) in quota_file.quotas() {
            let id = TenantId::new(tenant);
            let granted = state.set_quota(&id, bytes);
            granted.map_err(|error| error.with("file", path).with("tenant", tenant))?;
            known.retain(|quota| quota.tenant != id);
        }
        // The log may contain tenants that the file no longer lists.
        for TenantQuota { tenant, .. } in known {
            if let Err(error) = state.remove_quota(&tenant) {
                tracing::warn!(%error, %tenant, "a tenant missing from the quota file keeps its quota");
            }
        }
        drop(state);
        *self.file.lock() = Some(quota_file);
        Ok(())
    }

    /// Writes the quotas of the log to the file, which may be older: that of a master that did not lead.
    /// Later changes go to the file, too.
    ///
    /// # Errors
    /// The file cannot be written; changes go to the log alone then.
    pub(super) fn write_file(&self, path: &str) -> Result<()> {
        let quotas = self.list().into_iter();
        let quotas = quotas.map(|quota| (quota.tenant.as_str().to_owned(), quota.requested));
        *self.file.lock() = Some(QuotaFile::create(path, quotas)?);
        Ok(())
    }

    /// Returns the quota of every tenant, for metrics and pages; empty without multi-tenancy.
    pub(super) fn list(&self) -> Vec<TenantQuota> {
        self.shared.lock().quotas().unwrap_or_default()
    }

    pub(super) fn query_quotas(
        &self,
        r: &v1::QueryQuotasRequest,
    ) -> Result<v1::QueryQuotasResponse> {
        check_batch(r.tenants.len())?;
        self.shared.op_metrics().count_one(Method::QueryQuotas, || {
            let state = self.shared.lock();
            let results = match &r.tenants[..] {
                [] => state.quotas()?.iter().map(quota_to_wire).collect(),
                names => {
                    let quota = |name: &String| state.quota(&TenantId::new(name));
                    names.iter().map(|name| quota_result(name, quota(name))).collect()
                }
            };
            Ok(v1::QueryQuotasResponse { results })
        })
    }

    pub(super) fn set_quotas(&self, r: &v1::SetQuotasRequest) -> Result<v1::SetQuotasResponse> {
        check_batch(r.quotas.len())?;
        // Held while the state changes, so that the file records the changes in the same order.
        let mut quota_file = self.file.lock();
        let results = r.quotas.iter().map(|quota| {
            let result = self.set_quota(quota_file.as_mut(), quota);
            self.shared.op_metrics().count_batch(
                Method::SetQuotas,
                1,
                usize::from(result.is_err()),
            );
            ItemResult::from(result)
        });
        Ok(v1::SetQuotasResponse { results: results.collect() })
    }

    fn set_quota(&self, quota_file: Option<&mut QuotaFile>, quota: &v1::Quota) -> Result<()> {
        if quota.tenant.is_empty() {
            return Err(Error::invalid("Missing or invalid tenant_id"));
        }
        check_name("tenant", &quota.tenant)?;
        let tenant = TenantId::new(&quota.tenant);
        let earlier = self.shared.lock().quota(&tenant).ok().map(|quota| quota.requested);
        self.apply(&tenant, quota.bytes)?;
        let Some(quota_file) = quota_file else { return Ok(()) };
        quota_file.set(&quota.tenant, quota.bytes).inspect_err(|_| {
            // A quota that the next master would not know is not in effect here either. A tenant
            // that has begun to write meanwhile keeps its quota: it cannot be removed.
            let _ = self.apply(&tenant, earlier);
        })
    }

    fn apply(&self, tenant: &TenantId, bytes: Option<u64>) -> Result<()> {
        let mut state = self.shared.lock();
        match bytes {
            Some(bytes) => state.set_quota(tenant, bytes),
            None => state.remove_quota(tenant),
        }
    }
}

fn quota_result(name: &str, quota: Result<TenantQuota>) -> v1::QuotaResult {
    match quota {
        Ok(quota) => quota_to_wire(&quota),
        Err(error) => v1::QuotaResult {
            failure: Some((&error).into()),
            tenant: name.to_owned(),
            ..v1::QuotaResult::default()
        },
    }
}

fn quota_to_wire(quota: &TenantQuota) -> v1::QuotaResult {
    v1::QuotaResult {
        failure: None,
        tenant: quota.tenant.as_str().to_owned(),
        requested: quota.requested,
        effective: quota.effective,
        charged: quota.charged,
        refused: quota.refused,
        evicted_bytes: quota.evicted_bytes,
        on_disk: quota.on_disk,
    }
}
