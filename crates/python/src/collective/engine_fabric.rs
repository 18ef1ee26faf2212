//! Reads of memory on other hosts, by the engine of this process.
#![allow(unsafe_code, reason = "the engine writes memory that the caller lends")]

use std::{sync::Arc, time::Duration};

use mooncake_base::{Clock, Result, SystemClock};
use mooncake_collective::Fabric;
use mooncake_transfer_engine::{LocalRange, Opcode, TransferEntry, TransportKind};

use crate::engine::Running;

/// Reads memory of ranks on other hosts over the RDMA devices of an engine.
#[derive(Debug)]
pub(super) struct EngineFabric(Arc<Running>);

impl EngineFabric {
    /// Returns the fabric of an engine, if it has RDMA devices. Without them, ranks send bytes over
    /// their own connections.
    pub(super) fn of(running: Arc<Running>) -> Result<Option<Arc<dyn Fabric>>> {
        let has_devices = running.engine()?.transports().any(|kind| kind == TransportKind::Rdma);
        Ok(has_devices.then(|| Arc::new(Self(running)) as Arc<dyn Fabric>))
    }
}

impl Fabric for EngineFabric {
    fn segment(&self) -> &str {
        self.0.segment()
    }

    fn register(&self, address: u64, length: u64) -> Result<()> {
        self.0.engine()?.regions().register(address, length, "*")
    }

    fn unregister(&self, address: u64) {
        let unregistered = self.0.engine().and_then(|engine| engine.regions().unregister(address));
        if let Err(error) = unregistered {
            tracing::debug!(%error, "memory of a process group was not unregistered");
        }
    }

    fn read(
        &self,
        segment: &str,
        address: u64,
        (base, length): (u64, u64),
        limit: Duration,
    ) -> Result<()> {
        let (engine, deadline) = (self.0.engine()?, SystemClock.now() + limit);
        let peer = engine.open(segment, deadline)?;
        // SAFETY: the group keeps its buffer until this call has returned.
        let target = unsafe { LocalRange::held(base as *mut u8, length as usize) };
        let mut entries = [TransferEntry::new(target, address)];
        engine.transfer(&peer, Opcode::Read, &mut entries, deadline);
        entries.into_iter().try_for_each(|entry| entry.outcome.unwrap_or(Ok(())))
    }
}
