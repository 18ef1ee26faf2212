//! Exported device memory. Peers cannot access it, so its owner copies the bytes between device
//! memory and pinned memory, and pinned memory goes over the network.

use std::{os::fd::OwnedFd, sync::Arc};

use mooncake_base::{Error, ErrorCode, Moment, Result};
use mooncake_os::memory::page_size;

use super::{
    Cuda, StagedPart, Stream,
    driver::{Direction, Ordinal},
    fill_buffer,
    pinned::PinnedBuffer,
};
use crate::{
    copy::Copier,
    transfer_entry::{LocalRange, Opcode, TransferEntry},
};

/// A device with the driver that can access its memory.
#[derive(Debug, Clone)]
pub(crate) struct DeviceMemory {
    cuda: Arc<Cuda>,
    device: Ordinal,
}

/// An address in device memory, and the pinned memory that it is copied from or to.
pub(crate) type DeviceCopy = (u64, LocalRange);

impl DeviceMemory {
    /// Returns the device that a whole range belongs to, if any.
    ///
    /// # Errors
    /// The range belongs only partly to a device, or to two devices.
    pub(super) fn of(cuda: &Arc<Cuda>, address: u64, length: u64) -> Result<Option<Self>> {
        let last = address.saturating_add(length.saturating_sub(1));
        match (cuda.owner(address), cuda.owner(last)) {
            (None, None) => Ok(None),
            (Some(device), Some(other)) if device == other => {
                Ok(Some(Self { cuda: Arc::clone(cuda), device }))
            }
            _ => {
                Err(Error::new(ErrorCode::INVALID_PARAMS, "the range is partly memory of a device")
                    .with("address", format_args!("{address:#x}"))
                    .with("length", length))
            }
        }
    }

    /// Returns whether both are the same device, accessed by the same driver.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.device == other.device && Arc::ptr_eq(&self.cuda, &other.cuda)
    }

    /// The default location name of memory on this device, in the numbering of this process.
    pub(crate) fn location(&self) -> String {
        format!("cuda:{}", self.device)
    }

    /// Returns the PCI address of the device, if the driver tells it.
    #[cfg_attr(not(feature = "rdma"), allow(dead_code, reason = "RDMA devices have a place, too"))]
    pub(crate) fn pci_address(&self) -> Option<String> {
        self.cuda.driver.pci_address(self.device)
    }

    /// Exports a range of this memory as a dma-buf. Returns it with the offset of the range in it: a
    /// dma-buf has whole pages.
    ///
    /// # Errors
    /// The driver is too old, or refuses to export the memory.
    #[cfg_attr(not(feature = "rdma"), allow(dead_code, reason = "RDMA devices take dma-bufs"))]
    pub(crate) fn export(&self, address: u64, length: u64) -> Result<(OwnedFd, u64)> {
        let page = page_size() as u64;
        let offset = address % page;
        let whole = (offset + length).next_multiple_of(page);
        let file = self.cuda.driver.export(self.device, address - offset, whole as usize)?;
        Ok((file, offset))
    }

    /// Takes a pinned buffer for copies.
    ///
    /// # Errors
    /// All buffers are in use until the deadline, or the driver cannot allocate one.
    pub(crate) fn buffer(&self, deadline: Moment) -> Result<PinnedBuffer> {
        self.cuda.buffer(self.device, deadline)
    }

    /// Copies into the device for [`Opcode::Write`] and out of it for [`Opcode::Read`], as seen by
    /// peers. The copies run after earlier work of the default stream and are done when this
    /// returns.
    ///
    /// # Errors
    /// The driver refuses a copy; others may have been done.
    pub(crate) fn copy(&self, opcode: Opcode, stretches: &[DeviceCopy]) -> Result<()> {
        let direction = match opcode {
            Opcode::Write => Direction::ToDevice,
            Opcode::Read => Direction::ToHost,
        };
        let current = self.cuda.driver.push_context(Stream::DEFAULT, Some(self.device))?;
        let copied = stretches.iter().try_for_each(|(address, pinned)| {
            // SAFETY: the address is in device memory, to which there are no references.
            let device = unsafe { LocalRange::foreign(*address as usize, pinned.length()) };
            current.copy(direction, device, *pinned, Stream::DEFAULT)
        });
        // Synchronize after a failure, too: started copies must have left the buffer.
        let synchronized = current.synchronize(Stream::DEFAULT);
        copied.and(synchronized)
    }

    /// Moves entries between this memory, as the remote side, and memory of this process.
    pub(crate) fn transfer(
        &self,
        opcode: Opcode,
        entries: &mut [TransferEntry],
        gate: &dyn Fn() -> Result<()>,
        deadline: Moment,
    ) {
        let owners = vec![Some(self.device); entries.len()];
        let (mut place, mut copier) = ((0, 0), Copier::default());
        loop {
            let parts = fill_buffer(entries, &owners, &mut place);
            if parts.is_empty() {
                return;
            }
            let moved = gate()
                .and_then(|()| self.move_parts(opcode, deadline, &parts, entries, &mut copier));
            let failures = match moved {
                Ok(failures) => failures,
                Err(error) => parts.iter().map(|part| (part.entry, error.clone())).collect(),
            };
            for (entry, error) in failures {
                entries[entry].outcome.get_or_insert(Err(error));
            }
            for part in &parts {
                let entry = &mut entries[part.entry];
                if part.from + part.length == entry.local.length() {
                    entry.outcome.get_or_insert(Ok(()));
                }
            }
        }
    }

    /// Moves one bufferful. Returns the entries whose local memory could not be accessed.
    fn move_parts(
        &self,
        opcode: Opcode,
        deadline: Moment,
        parts: &[StagedPart],
        entries: &[TransferEntry],
        copier: &mut Copier,
    ) -> Result<Vec<(usize, Error)>> {
        let local = |part: &StagedPart| entries[part.entry].local.part(part.from, part.length);
        let stretch = |part: &StagedPart, pinned| {
            (entries[part.entry].remote.wrapping_add(part.from as u64), pinned)
        };
        // Bytes that an engine of this process has staged are pinned already and need no second
        // buffer. Waiting for a second buffer while holding one could be a deadlock.
        if parts.iter().all(|part| self.cuda.pool.is_pinned(local(part))) {
            let stretches: Vec<_> = parts.iter().map(|part| stretch(part, local(part))).collect();
            return self.copy(opcode, &stretches).map(|()| Vec::new());
        }
        let buffer = self.buffer(deadline)?;
        let pinned = |part: &StagedPart| buffer.range(part.at, part.length);
        let mut failures = Vec::new();
        let mut by_hand = |copier: &mut Copier, part: &StagedPart, is_out: bool| {
            let (from, to) =
                if is_out { (pinned(part), local(part)) } else { (local(part), pinned(part)) };
            copier.copy(from, to).map_err(|error| failures.push((part.entry, error))).is_ok()
        };
        let ready: Vec<&StagedPart> = match opcode {
            Opcode::Write => parts.iter().filter(|part| by_hand(copier, part, false)).collect(),
            Opcode::Read => parts.iter().collect(),
        };
        let stretches: Vec<_> = ready.iter().map(|part| stretch(part, pinned(part))).collect();
        self.copy(opcode, &stretches)?;
        if opcode == Opcode::Read {
            for part in parts {
                by_hand(copier, part, true);
            }
        }
        Ok(failures)
    }
}
