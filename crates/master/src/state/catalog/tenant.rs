//! Tenants: the bytes that their objects use, and their quotas.

use mooncake_base::{Error, ErrorCode, Result, TenantId};
use rustc_hash::FxHashMap;

use crate::state::{
    catalog::eviction::{IndexLinks, IndexList},
    ids::{ObjectSlot, TenantIndex},
};

/// Maximum quota in bytes.
pub(in crate::state) const QUOTA_MAX: u64 = i64::MAX as u64;

/// Usage and quotas of all tenants.
#[derive(Debug)]
pub(in crate::state) struct Tenants {
    pub(in crate::state) is_enforced: bool,
    /// By tenant index.
    used: Vec<TenantUsage>,
    /// Tenants with a quota.
    pub(in crate::state) numbers: FxHashMap<TenantId, TenantIndex>,
    /// Sum of all quotas.
    pub(in crate::state) requested: u128,
    links: IndexLinks<ObjectSlot>,
}

#[derive(Debug, Default)]
pub(in crate::state) struct TenantUsage {
    /// Bytes that the quota grants; 0 without a quota.
    pub(in crate::state) quota: u64,
    /// Bytes of all replicas in memory, unfinished puts included.
    pub(in crate::state) charged: u64,
    /// Bytes of copies on disk, which no quota limits.
    pub(in crate::state) on_disk: u64,
    /// Readable objects, least recently used first. Kept only where quotas are enforced.
    pub(in crate::state) order: IndexList<ObjectSlot>,
    pub(in crate::state) refused: u64,
    pub(in crate::state) evicted_bytes: u64,
}

/// A tenant with its quota and usage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantQuota {
    /// Name of the tenant.
    pub tenant: TenantId,
    /// Bytes that the quota grants.
    pub requested: u64,
    /// Bytes that the tenant may use now: its share where the pool is smaller than the sum of all
    /// quotas.
    pub effective: u64,
    /// Bytes of its replicas in memory, unfinished puts included.
    pub charged: u64,
    /// Bytes of its copies on disk, which the quota does not limit.
    pub on_disk: u64,
    /// Puts refused because the quota was used up.
    pub refused: u64,
    /// Bytes of its own objects that its puts evicted.
    pub evicted_bytes: u64,
}

impl TenantQuota {
    /// Returns whether the next put must evict an object of the tenant.
    pub fn is_used_up(&self) -> bool {
        self.charged >= self.effective
    }

    /// Returns whether the tenant uses more than its quota.
    pub fn is_exceeded(&self) -> bool {
        self.charged > self.effective
    }
}

impl Tenants {
    pub(in crate::state) fn new(is_enforced: bool) -> Self {
        Self {
            is_enforced,
            used: Vec::new(),
            numbers: FxHashMap::default(),
            requested: 0,
            links: IndexLinks::default(),
        }
    }

    pub(in crate::state) fn charge(&mut self, tenant: TenantIndex, bytes: u64) {
        self.usage(tenant).charged += bytes;
    }

    pub(in crate::state) fn uncharge(&mut self, tenant: TenantIndex, bytes: u64) {
        let usage = self.usage(tenant);
        debug_assert!(usage.charged >= bytes, "a tenant is uncharged for what it was charged");
        usage.charged -= bytes;
    }

    /// Adds an object that got memory.
    pub(in crate::state) fn add_object(&mut self, tenant: TenantIndex, object: ObjectSlot) {
        if self.is_enforced {
            let links = &mut self.links;
            usage_at(&mut self.used, tenant).order.push_last(links, object);
        }
    }

    /// Records a use of the object, unless it has no memory.
    pub(in crate::state) fn touch_object(&mut self, tenant: TenantIndex, object: ObjectSlot) {
        if self.is_enforced && self.links.contains(object) {
            let links = &mut self.links;
            let order = &mut usage_at(&mut self.used, tenant).order;
            order.remove(links, object);
            order.push_last(links, object);
        }
    }

    /// Removes an object that has no memory any more.
    pub(in crate::state) fn remove_object(&mut self, tenant: TenantIndex, object: ObjectSlot) {
        if self.is_enforced && self.links.contains(object) {
            let links = &mut self.links;
            usage_at(&mut self.used, tenant).order.remove(links, object);
        }
    }

    /// Returns the objects of a tenant, least recently used first. None where no quotas are enforced.
    pub(in crate::state) fn least_recent(
        &self,
        tenant: TenantIndex,
    ) -> impl Iterator<Item = ObjectSlot> {
        let used = self.used.get(tenant.index());
        used.into_iter().flat_map(|used| used.order.iter(&self.links))
    }

    pub(in crate::state) fn usage(&mut self, tenant: TenantIndex) -> &mut TenantUsage {
        usage_at(&mut self.used, tenant)
    }

    /// Returns the quota of a tenant.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_MODE` without multi-tenancy, `OBJECT_NOT_FOUND` if it has none.
    pub(in crate::state) fn quota(
        &self,
        tenant: &TenantId,
        mounted_bytes: u64,
    ) -> Result<TenantQuota> {
        self.check_quotas()?;
        let missing = || {
            Error::new(ErrorCode::OBJECT_NOT_FOUND, "the tenant has no quota")
                .with("tenant", tenant)
        };
        let &number = self.numbers.get(tenant).ok_or_else(missing)?;
        Ok(self.show_quota(tenant, number, mounted_bytes))
    }

    /// Returns every quota, by name.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_MODE` without multi-tenancy.
    pub(in crate::state) fn quotas(&self, mounted_bytes: u64) -> Result<Vec<TenantQuota>> {
        self.check_quotas()?;
        let numbers = self.numbers.iter();
        let mut shown: Vec<_> = numbers
            .map(|(tenant, &number)| self.show_quota(tenant, number, mounted_bytes))
            .collect();
        shown.sort_by(|a, b| a.tenant.as_str().cmp(b.tenant.as_str()));
        Ok(shown)
    }

    /// Returns whether [`requested`](Self::requested) is the sum of all quotas, to assert it.
    pub(in crate::state) fn is_summed(&self) -> bool {
        self.requested == self.used.iter().map(|used| u128::from(used.quota)).sum::<u128>()
    }

    fn show_quota(
        &self,
        tenant: &TenantId,
        number: TenantIndex,
        mounted_bytes: u64,
    ) -> TenantQuota {
        let used = &self.used[number.index()];
        TenantQuota {
            tenant: tenant.clone(),
            requested: used.quota,
            effective: self.effective(used.quota, mounted_bytes),
            charged: used.charged,
            on_disk: used.on_disk,
            refused: used.refused,
            evicted_bytes: used.evicted_bytes,
        }
    }

    pub(in crate::state) fn check_quotas(&self) -> Result<()> {
        if self.is_enforced {
            return Ok(());
        }
        let why = "quotas need --enable_multi_tenants, without which the master runs";
        Err(Error::new(ErrorCode::UNAVAILABLE_IN_CURRENT_MODE, why))
    }

    /// Checks whether the tenant may write.
    pub(in crate::state) fn check_tenant(&self, tenant: &TenantId) -> Result<()> {
        if !self.is_enforced || self.numbers.contains_key(tenant) {
            return Ok(());
        }
        Err(Error::new(ErrorCode::TENANT_NOT_REGISTERED, "the tenant has no quota")
            .with("tenant", tenant))
    }

    /// Returns the part of the quota that the tenant may use in a pool of that size.
    pub(in crate::state) fn effective(&self, requested: u64, mounted_bytes: u64) -> u64 {
        let share = match self.requested {
            sum if sum <= u128::from(mounted_bytes) => return requested,
            sum => u128::from(requested) * u128::from(mounted_bytes) / sum,
        };
        u64::try_from(share).unwrap_or(u64::MAX)
    }
}

fn usage_at(used: &mut Vec<TenantUsage>, tenant: TenantIndex) -> &mut TenantUsage {
    let index = tenant.index();
    if index >= used.len() {
        used.resize_with(index + 1, TenantUsage::default);
    }
    &mut used[index]
}
