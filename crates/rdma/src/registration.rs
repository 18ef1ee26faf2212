//! Memory of this process that is registered with all devices.

pub(crate) mod local_memory;
mod registered;
pub(crate) mod rule;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use mooncake_base::{Error, ErrorCode, Result, sync::RwLock};
use mooncake_verbs::{MemoryRegion, ProtectionDomain};

use self::{
    local_memory::LocalMemory,
    registered::{Registered, RegisteredPart},
    rule::RegistrationRule,
};
use crate::{near_devices::NearDevices, slices::MemoryRange};

/// All registered ranges.
#[derive(Debug, Default)]
pub(crate) struct Registrations {
    state: RwLock<RegistrationTable>,
}

#[derive(Debug, Default)]
struct RegistrationTable {
    by_base: BTreeMap<u64, Arc<Registered>>,
    /// The parts of all ranges; None after a change, until the next transfer.
    memory: Option<Arc<LocalMemory>>,
}

impl Registrations {
    /// Registers a range with all devices.
    ///
    /// # Errors
    /// A device refused; the message names it and says why. Nothing is registered then.
    ///
    /// # Safety
    /// Those of [`MemoryRegion::register`], until the range is deregistered.
    pub(crate) unsafe fn register(
        &self,
        domains: &[Arc<ProtectionDomain>],
        (base, length): (u64, u64),
        near: NearDevices,
        rule: RegistrationRule<'_>,
    ) -> Result<()> {
        // SAFETY: by the contract of the function.
        let mut registered = unsafe { Registered::new(domains, (base, length), rule) }?;
        registered.near = near;
        let mut state = self.state.write();
        state.by_base.insert(base, Arc::new(registered));
        state.memory = None;
        Ok(())
    }

    /// Ends the registration of the range that begins at `base`, if there is one. When this succeeds no
    /// device accesses the range any more.
    ///
    /// # Errors
    /// A transfer still used the range after the time. The registration ends with the transfer.
    pub(crate) fn deregister(&self, base: u64, timeout: Duration) -> Result<()> {
        let mut state = self.state.write();
        let Some(registered) = state.by_base.remove(&base) else { return Ok(()) };
        let memory = state.memory.take();
        drop(state);
        let ended = Arc::clone(&registered.ended);
        drop(memory);
        drop(registered);
        if ended.wait(timeout) {
            return Ok(());
        }
        let text = "a transfer of this process still uses the range";
        Err(Error::new(ErrorCode::OBJECT_REPLICA_BUSY, text)
            .with("address", format_args!("{base:#x}")))
    }

    /// Ends all registrations, those in use with their last transfer.
    pub(crate) fn clear(&self) {
        let state = std::mem::take(&mut *self.state.write());
        drop(state);
    }

    /// Returns the registered memory.
    pub(crate) fn memory(&self) -> Arc<LocalMemory> {
        if let Some(memory) = &self.state.read().memory {
            return Arc::clone(memory);
        }
        let mut state = self.state.write();
        if let Some(memory) = &state.memory {
            return Arc::clone(memory);
        }
        let memory = Arc::new(LocalMemory::new(state.by_base.values()));
        state.memory = Some(Arc::clone(&memory));
        memory
    }

    /// Returns the parts of the range that begins at `base`, each with the keys that peers need, one per
    /// device.
    pub(crate) fn keys(&self, base: u64) -> Vec<(MemoryRange, Vec<u32>)> {
        let found = self.state.read().by_base.get(&base).cloned();
        let parts = found.iter().flat_map(|registered| &registered.parts);
        let keys =
            |part: &RegisteredPart| part.regions.iter().map(MemoryRegion::remote_key).collect();
        parts.map(|part| (part.range, keys(part))).collect()
    }
}
