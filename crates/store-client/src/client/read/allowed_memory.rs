//! The memory that a call may write to: any, or what is registered.

use std::sync::Arc;

use mooncake_base::{Error, Result};
use mooncake_transfer_engine::{Engine, LocalRange, Region, RemoteRange};

use crate::object::BufferScope;

/// The memory that a call may access.
pub(super) enum AllowedMemory<'a> {
    Any,
    /// Regions sorted by address, and the buffer of each object if it has one.
    Registered(Vec<Arc<Region>>, &'a [Option<RemoteRange>]),
}

impl<'a> AllowedMemory<'a> {
    pub(super) fn new(engine: &Engine, scope: BufferScope<'a>) -> Self {
        match scope {
            BufferScope::Anywhere => Self::Any,
            BufferScope::Registered => Self::Registered(engine.regions().all(), &[]),
            BufferScope::RegisteredBuffers(buffers) => {
                Self::Registered(engine.regions().all(), buffers)
            }
        }
    }

    /// Checks the memory of a part of the object at that place in the list.
    pub(super) fn check(&self, object: usize, range: &LocalRange) -> Result<()> {
        let Self::Registered(regions, buffers) = self else { return Ok(()) };
        let (address, length) = (range.address() as u64, range.length() as u64);
        if let Some(buffer) = buffers.get(object).copied().flatten() {
            let offset = address.checked_sub(buffer.address);
            let end = offset.and_then(|offset| offset.checked_add(length));
            if end.is_none_or(|end| end > buffer.length) {
                return Err(Error::invalid("the memory is not within its registered buffer")
                    .with("address", format_args!("{address:#x}"))
                    .with("length", length)
                    .with("buffer", format_args!("{:#x}", buffer.address))
                    .with("buffer_bytes", buffer.length));
            }
        }
        let after = regions.partition_point(|region| region.base <= address);
        let region = after.checked_sub(1).map(|at| &regions[at]);
        if region.is_some_and(|region| region.holds(RemoteRange { address, length })) {
            return Ok(());
        }
        Err(Error::invalid("the memory is not in a registered range")
            .with("address", format_args!("{address:#x}"))
            .with("length", length))
    }
}
