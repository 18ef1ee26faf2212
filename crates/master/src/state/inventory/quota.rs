//! Quotas of tenants: a put is admitted, and objects of its tenant are evicted for it.

use mooncake_base::{Error, ErrorCode, Moment, Result, TenantId};

use crate::state::{
    catalog::{
        object::NO_WRITE,
        order::EvictionPass,
        tenant::{QUOTA_MAX, TenantQuota},
    },
    ids::{ObjectSlot, TenantIndex},
    inventory::{Inventory, eviction::Verdict, moves},
    ledger::effect::Effect,
    pool::freed::FreedTo,
};

/// Objects evicted for the quota at a time.
const EVICTED_SLICE: usize = 512;

/// Maximum number of protected objects that one put skips.
const PASSED_MAX: usize = 1024;

/// Whether a quota covers a put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::state) enum QuotaVerdict {
    Granted,
    /// A slice of the tenant's objects was evicted: call again.
    Later,
    /// Disks have to take the tenant's next objects over first: call again when their progress, of
    /// which this was the last, goes on.
    Disks(u64),
}

/// Returns the bytes that a put adds to the usage: its replicas, less the object that it
/// replaces (unless other puts of that object are unfinished).
pub(in crate::state) fn growth(
    inventory: &Inventory,
    length: u64,
    copies: u32,
    existing: Option<ObjectSlot>,
) -> u64 {
    let copies = u64::from(copies).min(inventory.pool.segments.open().len() as u64).max(1);
    let replaced = existing.map_or(0, |slot| {
        let object = inventory.catalog.objects.at(slot);
        if object.newest_write == NO_WRITE { object.bytes() } else { 0 }
    });
    length.saturating_mul(copies).saturating_sub(replaced)
}

impl Inventory {
    /// Ensures that the quota covers `need` more bytes, evicting objects of the tenant but for
    /// `spared`.
    pub(in crate::state) fn admit(
        &mut self,
        now: Moment,
        tenant: TenantIndex,
        need: u64,
        spared: Option<ObjectSlot>,
    ) -> Result<QuotaVerdict> {
        if !self.catalog.tenants.is_enforced {
            return Ok(QuotaVerdict::Granted);
        }
        let requested = self.catalog.tenants.usage(tenant).quota;
        let limit = self.catalog.tenants.effective(requested, self.pool.segments.mounted_bytes);
        if need <= limit {
            match evict_own(self, now, tenant, limit - need, spared) {
                QuotaVerdict::Granted => {}
                later => return Ok(later),
            }
        }
        let charged = self.catalog.tenants.usage(tenant).charged;
        if charged.saturating_add(need) <= limit {
            return Ok(QuotaVerdict::Granted);
        }
        self.catalog.tenants.usage(tenant).refused += 1;
        let why = "the tenant's quota is used up, and none of its objects may be evicted";
        Err(Error::new(ErrorCode::TENANT_QUOTA_EXCEEDED, why)
            .with("bytes", need)
            .with("charged", charged)
            .with("quota", limit))
    }
}

/// Returns the number of a tenant, known or not.
///
/// # Errors
/// There are too many tenants.
pub(in crate::state) fn intern_tenant(
    inventory: &mut Inventory,
    tenant: &TenantId,
) -> Result<TenantIndex> {
    inventory.catalog.objects.intern_tenant(tenant)
}

/// Returns the quota of a tenant.
///
/// # Errors
/// `UNAVAILABLE_IN_CURRENT_MODE` without multi-tenancy, `OBJECT_NOT_FOUND` if it has none.
pub(in crate::state) fn quota(inventory: &Inventory, tenant: &TenantId) -> Result<TenantQuota> {
    inventory.catalog.tenants.quota(tenant, inventory.pool.segments.mounted_bytes)
}

/// Returns every quota, by name.
///
/// # Errors
/// `UNAVAILABLE_IN_CURRENT_MODE` without multi-tenancy.
pub(in crate::state) fn quotas(inventory: &Inventory) -> Result<Vec<TenantQuota>> {
    inventory.catalog.tenants.quotas(inventory.pool.segments.mounted_bytes)
}

/// Sets the quota of a tenant in bytes.
///
/// # Errors
/// `UNAVAILABLE_IN_CURRENT_MODE` without multi-tenancy. `INVALID_PARAMS`: an invalid name, or a
/// quota outside 1 to 2^63 - 1.
pub(in crate::state) fn set_quota(
    inventory: &mut Inventory,
    tenant: &TenantId,
    bytes: u64,
) -> Result<()> {
    inventory.catalog.tenants.check_quotas()?;
    let name = tenant.as_str();
    if name.starts_with('_') || name.contains(|c: char| c.is_control()) {
        let why = "the name of a tenant neither begins with '_' nor has control characters";
        return Err(Error::invalid(why).with("tenant", name));
    }
    if !(1..=QUOTA_MAX).contains(&bytes) {
        let why = "Tenant quota must be in [1, 2^63 - 1] bytes";
        return Err(Error::invalid(why));
    }
    let number = inventory.catalog.objects.intern_tenant(tenant)?;
    inventory.catalog.tenants.numbers.insert(tenant.clone(), number);
    let before = std::mem::replace(&mut inventory.catalog.tenants.usage(number).quota, bytes);
    inventory.catalog.tenants.requested += u128::from(bytes);
    inventory.catalog.tenants.requested -= u128::from(before);
    debug_assert!(inventory.catalog.tenants.is_summed(), "the sum is that of all quotas");
    inventory.log.effects.record(|| Effect::Quota { tenant: name, bytes: Some(bytes) });
    Ok(())
}

/// Removes the quota of a tenant, and with it the right to write.
///
/// # Errors
/// `UNAVAILABLE_IN_CURRENT_MODE` without multi-tenancy, `OBJECT_NOT_FOUND` if it has none,
/// `TENANT_NOT_EMPTY` while it has objects or unfinished puts.
pub(in crate::state) fn remove_quota(inventory: &mut Inventory, tenant: &TenantId) -> Result<()> {
    let quota = inventory.catalog.tenants.quota(tenant, inventory.pool.segments.mounted_bytes)?;
    if quota.charged > 0 || quota.on_disk > 0 {
        let why = "the tenant still owns objects";
        return Err(Error::new(ErrorCode::TENANT_NOT_EMPTY, why)
            .with("tenant", tenant)
            .with("charged", quota.charged)
            .with("on_disk", quota.on_disk));
    }
    if let Some(number) = inventory.catalog.tenants.numbers.remove(tenant) {
        let bytes = std::mem::take(&mut inventory.catalog.tenants.usage(number).quota);
        inventory.catalog.tenants.requested -= u128::from(bytes);
        debug_assert!(inventory.catalog.tenants.is_summed(), "the sum is that of all quotas");
        inventory.log.effects.record(|| Effect::Quota { tenant: tenant.as_str(), bytes: None });
    }
    Ok(())
}

/// Evicts objects of the tenant, least recently used first, down to `limit` bytes or as far as
/// possible.
fn evict_own(
    inventory: &mut Inventory,
    now: Moment,
    tenant: TenantIndex,
    limit: u64,
    spared: Option<ObjectSlot>,
) -> QuotaVerdict {
    let mut left = EVICTED_SLICE;
    let passes = [EvictionPass::Plain, EvictionPass::Soft];
    let passes = &passes[..1 + usize::from(inventory.rules.is_soft_pin_evictable)];
    for &pass in passes {
        let count = inventory.catalog.tenants.usage(tenant).order.count();
        for _ in 0..count.min(PASSED_MAX) {
            if inventory.catalog.tenants.usage(tenant).charged <= limit {
                return QuotaVerdict::Granted;
            }
            while let Some(object) = inventory.catalog.tenants.usage(tenant).order.first() {
                if left == 0 {
                    return QuotaVerdict::Later;
                }
                // A skipped object goes to the end, so that the next put examines others.
                let verdict = inventory.classify(now, object, pass, spared, &mut left);
                match verdict {
                    Verdict::Unfinished => return QuotaVerdict::Later,
                    Verdict::Move => {
                        let wanted = inventory.catalog.tenants.usage(tenant).charged - limit;
                        return QuotaVerdict::Disks(move_own(inventory, now, tenant, wanted));
                    }
                    _ => {}
                }
                if !matches!(verdict, Verdict::Evict) {
                    if inventory
                        .catalog
                        .objects
                        .get(object)
                        .is_some_and(|object| object.is_complete())
                    {
                        inventory.catalog.tenants.touch_object(tenant, object);
                    }
                    break;
                }
                let before = inventory.catalog.tenants.usage(tenant).charged;
                left = left.saturating_sub(inventory.evict_group(now, object, &mut FreedTo::Pool));
                let used = inventory.catalog.tenants.usage(tenant);
                used.evicted_bytes += before - used.charged;
                if used.charged <= limit {
                    return QuotaVerdict::Granted;
                }
            }
        }
    }
    QuotaVerdict::Granted
}

/// Lets objects of the tenant move down that are evicted next. Returns the progress of the disks
/// to wait for.
fn move_own(inventory: &mut Inventory, now: Moment, tenant: TenantIndex, wanted: u64) -> u64 {
    let next: Vec<ObjectSlot> =
        inventory.catalog.tenants.least_recent(tenant).take(EVICTED_SLICE).collect();
    let mut bytes = 0;
    for object in next {
        if bytes >= wanted {
            break;
        }
        moves::move_group_down(inventory, now, object);
        bytes += inventory.catalog.objects.at(object).bytes();
    }
    moves::await_disks(inventory, now, 0)
}
