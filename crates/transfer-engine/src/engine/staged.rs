//! Transfers whose local side is device memory: staged through pinned memory, one bufferful at a
//! time, over any transport.

use mooncake_base::{Error, Moment, Result};

use super::{Engine, Inner, transfer::TransferParams};
use crate::{
    copy,
    device::{self, Cuda, Ordinal, StagedPart, Stream},
    metrics::Progress,
    path::peer::Peer,
    transfer_entry::{LocalRange, Opcode, TransferEntry},
    transport::TransportKind,
};

/// Bytes of host memory that are read at once. A block of this size stays in the CPU cache.
const READ_BLOCK: usize = 64 << 10;

/// Transfers ordered by a stream.
#[derive(Debug)]
pub struct OnStream<'a> {
    engine: &'a Engine,
    cuda: &'a Cuda,
    stream: Stream,
}

impl Engine {
    /// Returns a handle for transfers that run after all work queued on a device stream so far, and
    /// before later work. Loads the CUDA driver if this process has not.
    ///
    /// # Errors
    /// There is no driver, or it finds no device; the engine is closed.
    pub fn on_stream(&self, stream: Stream) -> Result<OnStream<'_>> {
        self.check_usable()?;
        let cuda = self.inner.devices.load()?;
        Ok(OnStream { engine: self, cuda, stream })
    }
}

impl Engine {
    /// Shows the bytes of local memory to `look`, block by block and in order. The memory may be that
    /// of a device, and may change meanwhile. `block` is private memory for the bytes of the host; a
    /// caller with many ranges keeps it.
    ///
    /// # Errors
    /// The range is not mapped or not readable, or the driver refuses a copy. `look` may have seen
    /// bytes before.
    pub fn read_local(
        &self,
        range: LocalRange,
        block: &mut Vec<u8>,
        deadline: Moment,
        mut look: impl FnMut(&[u8]),
    ) -> Result<()> {
        let devices = &self.inner.devices;
        if let Some((cuda, device)) = devices.known().and_then(|cuda| cuda.owner_of(&range)) {
            return cuda.read(device, range, deadline, look);
        }
        block.resize(READ_BLOCK, 0);
        let mut done = 0;
        while done < range.length() {
            let block = &mut block[..READ_BLOCK.min(range.length() - done)];
            if let Err(error) = copy::read(range.part(done, block.len()), block) {
                // The process may have loaded the driver since this engine looked for it.
                return match devices.find_loaded().and_then(|cuda| cuda.owner_of(&range)) {
                    Some((cuda, device)) if done == 0 => cuda.read(device, range, deadline, look),
                    _ => Err(error),
                };
            }
            look(block);
            done += block.len();
        }
        Ok(())
    }
}

impl OnStream<'_> {
    /// Like [`Engine::transfer_hinted`], between a peer and memory of devices or of this process.
    ///
    /// Blocks until the stream is synchronized, which no deadline cuts short, and until the bytes
    /// are moved. Therefore it cannot be part of a captured graph.
    ///
    /// # Errors
    /// Work of the stream has failed, or there is no such stream. Each entry holds its own outcome.
    pub fn transfer(
        &self,
        peer: &Peer,
        opcode: Opcode,
        entries: &mut [TransferEntry],
        deadline: Moment,
        hint: Option<TransportKind>,
    ) -> Result<Option<TransportKind>> {
        self.cuda.synchronize(self.stream)?;
        let params = TransferParams {
            hint,
            stream: self.stream,
            ..TransferParams::new(peer, opcode, deadline.into())
        };
        Ok(self.engine.transfer_counted(params, entries))
    }
}

impl Inner {
    /// Moves a batch in which some entries may have device memory.
    pub(super) fn transfer_any(
        &self,
        params: TransferParams<'_>,
        entries: &mut [TransferEntry],
    ) -> Option<TransportKind> {
        if let Some(cuda) = self.devices.known()
            && let Some(owners) = cuda.owners(entries)
        {
            return self.transfer_staged(cuda, &owners, params, entries);
        }
        let has_looked = self.devices.known().is_some() || Progress::of(entries).errors() > 0;
        let served = self.transfer(params, entries);
        if has_looked || Progress::of(entries).errors() == 0 {
            return served;
        }
        // The process may have loaded the driver since this engine looked for it.
        let Some(cuda) = self.devices.find_loaded() else { return served };
        for entry in entries.iter_mut().filter(|entry| matches!(entry.outcome, Some(Err(_)))) {
            if cuda.owner(entry.local.address() as u64).is_some() {
                entry.outcome = None;
            }
        }
        match cuda.owners(entries) {
            Some(owners) => self.transfer_staged(cuda, &owners, params, entries).or(served),
            None => served,
        }
    }

    fn transfer_staged(
        &self,
        cuda: &Cuda,
        owners: &[Option<Ordinal>],
        params: TransferParams<'_>,
        entries: &mut [TransferEntry],
    ) -> Option<TransportKind> {
        let mut served = self.transfer_host_entries(owners, params, entries);
        served = self.transfer_registered(cuda, owners, params, entries).or(served);
        let mut place = (0, 0);
        loop {
            if let Err(error) = self.check_usable() {
                entries.iter_mut().for_each(|entry| fail(entry, &error));
                break;
            }
            let parts = device::fill_buffer(entries, owners, &mut place);
            let Some(first) = parts.first() else { break };
            let moved = cuda.buffer(first.device, params.limits.deadline).and_then(|buffer| {
                let (opcode, stream) = (params.opcode, params.stream);
                if opcode == Opcode::Write {
                    cuda.copy(opcode, &parts, entries, &buffer, stream)?;
                }
                let staged = |part: &StagedPart| {
                    let remote = entries[part.entry].remote.wrapping_add(part.from as u64);
                    TransferEntry::new(buffer.range(part.at, part.length), remote)
                };
                let mut staged: Vec<TransferEntry> = parts.iter().map(staged).collect();
                served = self.transfer(params, &mut staged).or(served);
                let mut arrived = Vec::with_capacity(parts.len());
                for (part, staged) in parts.iter().zip(staged) {
                    match staged.outcome {
                        Some(Err(error)) => fail(&mut entries[part.entry], &error),
                        _ => arrived.push(*part),
                    }
                }
                if opcode == Opcode::Read {
                    cuda.copy(opcode, &arrived, entries, &buffer, stream)?;
                }
                Ok(())
            });
            if let Err(error) = moved {
                parts.iter().for_each(|part| fail(&mut entries[part.entry], &error));
            }
            for part in &parts {
                let entry = &mut entries[part.entry];
                if part.from + part.length == entry.local.length() && entry.outcome.is_none() {
                    entry.outcome = Some(Ok(()));
                }
            }
        }
        served
    }

    /// Moves the entries of a batch whose device memory is registered with RDMA devices, if the peer is
    /// reached over them. Entries for which that fails have no outcome: they are staged.
    fn transfer_registered(
        &self,
        cuda: &Cuda,
        owners: &[Option<Ordinal>],
        params: TransferParams<'_>,
        entries: &mut [TransferEntry],
    ) -> Option<TransportKind> {
        let kind = TransportKind::Rdma;
        if params.peer.transport() != Some(kind) {
            return None;
        }
        let index = self.transports.iter().position(|transport| transport.kind() == kind)?;
        let path = params.peer.open_path_to(params.owner, index)?;
        let mut devices: Vec<Ordinal> = Vec::new();
        let (mut indexes, mut registered) = (Vec::new(), Vec::new());
        for (index, (entry, owner)) in entries.iter().zip(owners).enumerate() {
            if let Some(device) = owner
                && entry.outcome.is_none()
                && self.rdma.holds(&entry.local)
            {
                indexes.push(index);
                registered.push(TransferEntry::new(entry.local, entry.remote));
                if !devices.contains(device) {
                    devices.push(*device);
                }
            }
        }
        // Earlier work of the stream uses the memory before the RDMA devices do.
        for device in devices {
            if let Err(error) = cuda.synchronize_on(params.stream, device) {
                tracing::debug!(%error, "a stream cannot be synchronized");
                return None;
            }
        }
        if registered.is_empty() {
            return None;
        }
        let work = self.transfer_over(&*path, params, &mut registered);
        for (index, moved) in indexes.into_iter().zip(registered) {
            entries[index].outcome = moved.outcome.filter(Result::is_ok);
        }
        (work.after.entries() > work.before.entries()).then_some(work.kind)
    }

    /// Moves the entries of a batch whose local side is host memory.
    fn transfer_host_entries(
        &self,
        owners: &[Option<Ordinal>],
        params: TransferParams<'_>,
        entries: &mut [TransferEntry],
    ) -> Option<TransportKind> {
        let is_plain = |(entry, owner): &(&mut TransferEntry, &Option<Ordinal>)| {
            owner.is_none() && entry.outcome.is_none()
        };
        let mut rest: Vec<TransferEntry> = entries
            .iter_mut()
            .zip(owners)
            .filter(is_plain)
            .map(|(entry, _)| TransferEntry::new(entry.local, entry.remote))
            .collect();
        if rest.is_empty() {
            return None;
        }
        let served = self.transfer(params, &mut rest);
        let plain = entries.iter_mut().zip(owners).filter(is_plain);
        plain.zip(rest).for_each(|((entry, _), moved)| entry.outcome = moved.outcome);
        served
    }
}

fn fail(entry: &mut TransferEntry, error: &Error) {
    entry.outcome.get_or_insert_with(|| Err(error.clone()));
}
