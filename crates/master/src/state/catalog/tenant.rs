//! Tenants: the bytes that their objects use, and their quotas.

use mooncake_base::{Error, ErrorCode, Moment, Result, TenantId};
use rustc_hash::FxHashMap;

use crate::state::{
    Effect,
    catalog::object::NO_WRITE,
    ids::{ObjectSlot, TenantIndex},
    inventory::Inventory,
    reclaim::{
        EvictionPass, Verdict,
        eviction::{IndexLinks, IndexList},
    },
};

/// Maximum quota in bytes.
const QUOTA_MAX: u64 = i64::MAX as u64;
/// Objects evicted for the quota at a time.
const EVICTED_SLICE: usize = 512;
/// Maximum number of protected objects that one put skips.
const PASSED_MAX: usize = 1024;

/// Usage and quotas of all tenants.
#[derive(Debug)]
pub(in crate::state) struct Tenants {
    is_enforced: bool,
    /// By tenant index.
    used: Vec<TenantUsage>,
    /// Tenants with a quota.
    numbers: FxHashMap<TenantId, TenantIndex>,
    /// Sum of all quotas.
    requested: u128,
    links: IndexLinks<ObjectSlot>,
}

#[derive(Debug, Default)]
struct TenantUsage {
    /// Bytes that the quota grants; 0 without a quota.
    quota: u64,
    /// Bytes of all replicas, unfinished puts included.
    charged: u64,
    /// Readable objects, least recently used first. Kept only where quotas are enforced.
    order: IndexList<ObjectSlot>,
    refused: u64,
    evicted_bytes: u64,
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
    /// Bytes of its replicas, unfinished puts included.
    pub charged: u64,
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
        self.usage(tenant).charged -= bytes;
    }

    /// Adds an object that became readable.
    pub(in crate::state) fn add_object(&mut self, tenant: TenantIndex, object: ObjectSlot) {
        if self.is_enforced {
            let links = &mut self.links;
            usage_at(&mut self.used, tenant).order.push_last(links, object);
        }
    }

    /// Records a use of the object.
    pub(in crate::state) fn touch_object(&mut self, tenant: TenantIndex, object: ObjectSlot) {
        if self.is_enforced {
            let links = &mut self.links;
            let order = &mut usage_at(&mut self.used, tenant).order;
            order.remove(links, object);
            order.push_last(links, object);
        }
    }

    /// Removes an object that is no longer readable.
    pub(in crate::state) fn remove_object(&mut self, tenant: TenantIndex, object: ObjectSlot) {
        if self.is_enforced {
            let links = &mut self.links;
            usage_at(&mut self.used, tenant).order.remove(links, object);
        }
    }

    fn usage(&mut self, tenant: TenantIndex) -> &mut TenantUsage {
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
            refused: used.refused,
            evicted_bytes: used.evicted_bytes,
        }
    }

    fn check_quotas(&self) -> Result<()> {
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
    fn effective(&self, requested: u64, mounted_bytes: u64) -> u64 {
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

impl Inventory {
    /// Sets the quota of a tenant in bytes.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_MODE` without multi-tenancy. `INVALID_PARAMS`: an invalid name, or a
    /// quota outside 1 to 2^63 - 1.
    pub(in crate::state) fn set_quota(&mut self, tenant: &TenantId, bytes: u64) -> Result<()> {
        self.catalog.tenants.check_quotas()?;
        let name = tenant.as_str();
        if name.starts_with('_') || name.contains(|c: char| c.is_control()) {
            let why = "the name of a tenant neither begins with '_' nor has control characters";
            return Err(Error::invalid(why).with("tenant", name));
        }
        if !(1..=QUOTA_MAX).contains(&bytes) {
            let why = "Tenant quota must be in [1, 2^63 - 1] bytes";
            return Err(Error::invalid(why));
        }
        let number = self.catalog.objects.intern_tenant(tenant)?;
        self.catalog.tenants.numbers.insert(tenant.clone(), number);
        let before = std::mem::replace(&mut self.catalog.tenants.usage(number).quota, bytes);
        self.catalog.tenants.requested += u128::from(bytes);
        self.catalog.tenants.requested -= u128::from(before);
        self.log.effects.record(|| Effect::Quota { tenant: name, bytes: Some(bytes) });
        Ok(())
    }

    /// Removes the quota of a tenant, and with it the right to write.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_MODE` without multi-tenancy, `OBJECT_NOT_FOUND` if it has none,
    /// `TENANT_NOT_EMPTY` while it has objects or unfinished puts.
    pub(in crate::state) fn remove_quota(&mut self, tenant: &TenantId) -> Result<()> {
        let quota = self.catalog.tenants.quota(tenant, self.pool.segments.mounted_bytes)?;
        if quota.charged > 0 {
            let why = "the tenant still owns objects";
            return Err(Error::new(ErrorCode::TENANT_NOT_EMPTY, why)
                .with("tenant", tenant)
                .with("charged", quota.charged));
        }
        if let Some(number) = self.catalog.tenants.numbers.remove(tenant) {
            let bytes = std::mem::take(&mut self.catalog.tenants.usage(number).quota);
            self.catalog.tenants.requested -= u128::from(bytes);
            self.log.effects.record(|| Effect::Quota { tenant: tenant.as_str(), bytes: None });
        }
        Ok(())
    }

    /// Returns the bytes that a put adds to the usage: its replicas, less the object that it
    /// replaces (unless other puts of that object are unfinished).
    pub(in crate::state) fn growth(
        &self,
        length: u64,
        copies: u32,
        existing: Option<ObjectSlot>,
    ) -> u64 {
        let copies = u64::from(copies).min(self.pool.segments.open().len() as u64).max(1);
        let replaced = existing.map_or(0, |slot| {
            let object = self.catalog.objects.at(slot);
            if object.newest_write == NO_WRITE { object.bytes() } else { 0 }
        });
        length.saturating_mul(copies).saturating_sub(replaced)
    }

    /// Ensures that the quota covers `need` more bytes, evicting objects of the tenant but for
    /// `spared`. Returns `false` if it evicted a slice of them and should be called again.
    pub(in crate::state) fn admit(
        &mut self,
        now: Moment,
        tenant: TenantIndex,
        need: u64,
        spared: Option<ObjectSlot>,
    ) -> Result<bool> {
        if !self.catalog.tenants.is_enforced {
            return Ok(true);
        }
        let requested = self.catalog.tenants.usage(tenant).quota;
        let limit = self.catalog.tenants.effective(requested, self.pool.segments.mounted_bytes);
        if need <= limit && !self.evict_own(now, tenant, limit - need, spared) {
            return Ok(false);
        }
        let charged = self.catalog.tenants.usage(tenant).charged;
        if charged.saturating_add(need) <= limit {
            return Ok(true);
        }
        self.catalog.tenants.usage(tenant).refused += 1;
        let why = "the tenant's quota is used up, and none of its objects may be evicted";
        Err(Error::new(ErrorCode::TENANT_QUOTA_EXCEEDED, why)
            .with("bytes", need)
            .with("charged", charged)
            .with("quota", limit))
    }

    /// Evicts objects of the tenant, least recently used first, down to `limit` bytes. Returns
    /// `false` if a slice of them was evicted and more are left.
    fn evict_own(
        &mut self,
        now: Moment,
        tenant: TenantIndex,
        limit: u64,
        spared: Option<ObjectSlot>,
    ) -> bool {
        let mut left = EVICTED_SLICE;
        let passes = [EvictionPass::Plain, EvictionPass::Soft];
        let passes = &passes[..1 + usize::from(self.rules.is_soft_pin_evictable)];
        for &pass in passes {
            let count = self.catalog.tenants.usage(tenant).order.count();
            for _ in 0..count.min(PASSED_MAX) {
                if self.catalog.tenants.usage(tenant).charged <= limit {
                    return true;
                }
                while let Some(object) = self.catalog.tenants.usage(tenant).order.first() {
                    if left == 0 {
                        return false;
                    }
                    // A skipped object goes to the end, so that the next put examines others.
                    let verdict = self.classify(now, object, pass, spared, &mut left);
                    if matches!(verdict, Verdict::Unfinished) {
                        return false;
                    }
                    if !matches!(verdict, Verdict::Evict) {
                        if self
                            .catalog
                            .objects
                            .get(object)
                            .is_some_and(|object| object.is_complete())
                        {
                            self.catalog.tenants.touch_object(tenant, object);
                        }
                        break;
                    }
                    let before = self.catalog.tenants.usage(tenant).charged;
                    left = left.saturating_sub(self.evict_group(now, object));
                    let used = self.catalog.tenants.usage(tenant);
                    used.evicted_bytes += before - used.charged;
                    if used.charged <= limit {
                        return true;
                    }
                }
            }
        }
        true
    }
}
