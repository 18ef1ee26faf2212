//! Changes of the expiry of an object.

use std::time::Duration;

use mooncake_base::{Moment, Result, TenantId, Version};

use crate::state::{
    calls::put::PutCalls,
    inventory::{
        errors::{not_found, not_ready},
        expiry,
    },
    options::check_ttl,
};

impl PutCalls<'_> {
    /// Lets an object expire after `ttl`, or never. Returns its version.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`; `REPLICA_IS_NOT_READY`: the first put is unfinished; `INVALID_PARAMS`: no
    /// time at all.
    pub fn set_expiry(
        &mut self,
        now: Moment,
        tenant: &TenantId,
        key: &[u8],
        ttl: Option<Duration>,
    ) -> Result<Version> {
        check_ttl(ttl)?;
        let tenant = self.inventory.objects().tenant_index(tenant);
        let found = tenant.and_then(|tenant| self.inventory.find(now, tenant, key));
        let found = found.filter(|&slot| !self.inventory.is_unclaimed(slot));
        let slot = found.ok_or_else(|| not_found(key))?;
        if !self.inventory.object(slot).is_complete() {
            return Err(not_ready(key));
        }
        expiry::set_expiry(self.inventory, slot, ttl.map(|ttl| now + ttl));
        Ok(self.inventory.object(slot).version())
    }
}
