//! The transport to engines of the same process, this engine included: bytes are copied directly.

use std::sync::{Arc, Weak};

use mooncake_base::{Clock, EngineId, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_os::call_limit;

use crate::{
    copy::Copier,
    discovery::descriptor::SegmentDescriptor,
    memory::{
        exported_memory::ExportedMemory,
        region::{Pin, Region},
    },
    transfer_entry::{LocalRange, Opcode, RemoteRange, TransferEntry},
    transport::{Capability, Path, TimeLimits, Transport, TransportKind},
};

/// The number of bytes that are copied before the limits are checked again.
const GATE_BYTES: usize = 64 << 20;

/// The transport within one process.
#[derive(Debug)]
pub(crate) struct MemoryTransport {
    /// The only engine that can be reached; `None`: all engines of this process.
    pub(crate) only: Option<EngineId>,
}

impl Transport for MemoryTransport {
    fn kind(&self) -> TransportKind {
        TransportKind::Memory
    }

    fn capability(&self) -> Capability {
        Capability {
            crosses_hosts: false,
            owner_checks: true,
            needs_registered_local: false,
            cost: 0,
        }
    }

    fn connect(&self, peer: &SegmentDescriptor, _deadline: Moment) -> Result<Arc<dyn Path>> {
        let id = peer.mooncake.as_ref().and_then(|own| own.engine());
        let id = id.filter(|id| self.only.is_none_or(|only| only == *id));
        let found = id.and_then(|id| Some((id, ExportedMemory::find(id)?)));
        let Some((id, lent)) = found else {
            let text = "the peer is not a reachable engine of this process";
            return Err(Error::new(ErrorCode::TRANSFER_FAIL, text));
        };
        Ok(Arc::new(MemoryPath { id, lent: Arc::downgrade(&lent) }))
    }
}

/// The path to one engine of this process.
#[derive(Debug)]
struct MemoryPath {
    id: EngineId,
    lent: Weak<ExportedMemory>,
}

impl MemoryPath {
    fn owner(&self) -> Option<Arc<ExportedMemory>> {
        self.lent.upgrade().filter(|lent| lent.is_open())
    }
}

impl Path for MemoryPath {
    fn kind(&self) -> TransportKind {
        TransportKind::Memory
    }

    fn reaches(&self, range: RemoteRange) -> bool {
        self.owner().is_some_and(|lent| lent.regions.find(range).is_some())
    }

    fn transfer(&self, opcode: Opcode, entries: &mut [TransferEntry], limits: TimeLimits) {
        let deadline = limits.deadline;
        let owner = self.owner();
        let mut rest = entries;
        loop {
            let done = rest.iter().take_while(|entry| entry.outcome.is_some()).count();
            rest = &mut rest[done..];
            let Some(entry) = rest.first_mut() else { return };
            let pinned = match &owner {
                Some(lent) => pin_region(lent, entry.remote_range()),
                None => Err(Error::new(ErrorCode::TRANSFER_FAIL, "the peer's engine is closed")
                    .with("engine", self.id)),
            };
            let pin = match pinned {
                Ok(pin) => pin,
                Err(error) => {
                    entry.outcome = Some(Err(error));
                    continue;
                }
            };
            // One pin covers all following entries in the same region.
            let region = pin.region();
            let count = rest
                .iter()
                .take_while(|entry| entry.outcome.is_some() || region.holds(entry.remote_range()))
                .count();
            let (run, behind) = rest.split_at_mut(count);
            let gate = || check_limits(deadline);
            match (region.device(), region.mapping()) {
                (Some(device), _) => device.transfer(opcode, run, &gate, deadline),
                (None, Some(mapping)) => mapping.transfer(opcode, run, region.base, &gate),
                (None, None) => copy_each(opcode, run, region, &gate),
            }
            rest = behind;
        }
    }

    fn is_alive(&self) -> bool {
        self.owner().is_some()
    }

    fn close(&self) {
        // Nothing to close: the path holds only a weak reference to its peer.
    }
}

/// Checks the range and pins the whole region that contains it.
fn pin_region(lent: &ExportedMemory, range: RemoteRange) -> Result<Pin> {
    let pin = lent.regions.pin(range)?;
    let region = pin.region();
    lent.regions.pin(RemoteRange { address: region.base, length: region.length })
}

/// Copies entries whose remote side is user memory, which may be unmapped without notice, or a
/// mapped file, which may be shortened.
fn copy_each(
    opcode: Opcode,
    entries: &mut [TransferEntry],
    region: &Region,
    gate: &dyn Fn() -> Result<()>,
) {
    let mut copier = Copier::of(entries);
    for entry in entries.iter_mut().filter(|entry| entry.outcome.is_none()) {
        let remote = region.local_range(entry.remote_range());
        let (from, to) = match opcode {
            Opcode::Write => (entry.local, remote),
            Opcode::Read => (remote, entry.local),
        };
        entry.outcome = Some(copy_in_parts(&mut copier, from, to, gate));
    }
}

fn copy_in_parts(
    copier: &mut Copier,
    from: LocalRange,
    to: LocalRange,
    gate: &dyn Fn() -> Result<()>,
) -> Result<()> {
    let (length, mut done) = (from.length(), 0);
    gate()?;
    loop {
        let part = GATE_BYTES.min(length - done);
        copier.copy(from.part(done, part), to.part(done, part))?;
        done += part;
        if done == length {
            return Ok(());
        }
        gate()?;
    }
}

/// Checks between the parts of a copy whether it may continue.
fn check_limits(deadline: Moment) -> Result<()> {
    if call_limit::is_interrupted() {
        return Err(Error::closed("the copy was interrupted"));
    }
    if deadline.has_passed(SystemClock.now()) {
        let text = "the deadline passed before the bytes were moved";
        return Err(Error::new(ErrorCode::TRANSFER_FAIL, text));
    }
    Ok(())
}
