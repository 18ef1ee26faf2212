//! Transfers whose local side is memory of a device: a bufferful at a time through pinned memory,
//! over whichever way serves the batch.

use mooncake_base::{Error, Result};

use super::{Engine, Inner, transfer::Call};
use crate::{
    device::{self, Cuda, Ordinal, Part, Stream},
    metrics::Progress,
    peer::Peer,
    piece::{Opcode, Piece},
    transport::TransportKind,
};

/// Transfers in the order of a stream.
#[derive(Debug)]
pub struct OnStream<'a> {
    engine: &'a Engine,
    cuda: &'a Cuda,
    stream: Stream,
}

impl Engine {
    /// For transfers that come after everything that was given to a stream of a device, and before
    /// what will be. Loads the CUDA driver if this process has not.
    ///
    /// # Errors
    /// There is no driver, or it finds no device; the engine is closed.
    pub fn on_stream(&self, stream: Stream) -> Result<OnStream<'_>> {
        self.usable()?;
        let cuda = self.inner.devices.load()?;
        Ok(OnStream { engine: self, cuda, stream })
    }
}

impl OnStream<'_> {
    /// Like [`Engine::transfer_hinted`], between a peer and memory of devices or of this process.
    ///
    /// Blocks until the stream has come to its end, which no deadline cuts short, and until the
    /// bytes were moved. Therefore it cannot be part of a graph that is being captured.
    ///
    /// # Errors
    /// What was given to the stream has failed, or there is no such stream. What becomes of the
    /// pieces is told by themselves.
    pub fn transfer(
        &self,
        peer: &Peer,
        opcode: Opcode,
        pieces: &mut [Piece],
        deadline: mooncake_base::Moment,
        hint: Option<TransportKind>,
    ) -> Result<Option<TransportKind>> {
        self.cuda.settle(self.stream)?;
        let call = Call { peer, opcode, hint, deadline, stream: self.stream };
        Ok(self.engine.carry(call, pieces))
    }
}

impl Inner {
    /// Moves a batch, of which some pieces may be memory of a device.
    pub(super) fn transfer_any(
        &self,
        call: Call<'_>,
        pieces: &mut [Piece],
    ) -> Option<TransportKind> {
        if let Some(cuda) = self.devices.known()
            && let Some(owners) = cuda.owners(pieces)
        {
            return self.transfer_staged(cuda, &owners, call, pieces);
        }
        let has_looked = self.devices.known().is_some() || Progress::of(pieces).errors() > 0;
        let served = self.transfer(call, pieces);
        if has_looked || Progress::of(pieces).errors() == 0 {
            return served;
        }
        // The process may have loaded the driver since this engine looked for it.
        let Some(cuda) = self.devices.look() else { return served };
        for piece in pieces.iter_mut().filter(|piece| matches!(piece.outcome, Some(Err(_)))) {
            if cuda.owner(piece.local.address() as u64).is_some() {
                piece.outcome = None;
            }
        }
        match cuda.owners(pieces) {
            Some(owners) => self.transfer_staged(cuda, &owners, call, pieces).or(served),
            None => served,
        }
    }

    fn transfer_staged(
        &self,
        cuda: &Cuda,
        owners: &[Option<Ordinal>],
        call: Call<'_>,
        pieces: &mut [Piece],
    ) -> Option<TransportKind> {
        let mut served = self.transfer_rest(owners, call, pieces);
        let mut place = (0, 0);
        loop {
            let parts = device::next_parts(pieces, owners, &mut place);
            let Some(first) = parts.first() else { break };
            let moved = cuda.buffer(first.device, call.deadline).and_then(|buffer| {
                let (opcode, stream) = (call.opcode, call.stream);
                if opcode == Opcode::Write {
                    cuda.copy(opcode, &parts, pieces, &buffer, stream)?;
                }
                let staged = |part: &Part| {
                    let remote = pieces[part.piece].remote.wrapping_add(part.from as u64);
                    Piece::new(buffer.range(part.at, part.length), remote)
                };
                let mut staged: Vec<Piece> = parts.iter().map(staged).collect();
                served = self.transfer(call, &mut staged).or(served);
                let mut arrived = Vec::with_capacity(parts.len());
                for (part, staged) in parts.iter().zip(staged) {
                    match staged.outcome {
                        Some(Err(error)) => fail(&mut pieces[part.piece], &error),
                        _ => arrived.push(*part),
                    }
                }
                if opcode == Opcode::Read {
                    cuda.copy(opcode, &arrived, pieces, &buffer, stream)?;
                }
                Ok(())
            });
            if let Err(error) = moved {
                parts.iter().for_each(|part| fail(&mut pieces[part.piece], &error));
            }
            for part in &parts {
                let piece = &mut pieces[part.piece];
                if part.from + part.length == piece.local.length() && piece.outcome.is_none() {
                    piece.outcome = Some(Ok(()));
                }
            }
        }
        served
    }

    /// Moves the pieces of a batch that are no memory of a device.
    fn transfer_rest(
        &self,
        owners: &[Option<Ordinal>],
        call: Call<'_>,
        pieces: &mut [Piece],
    ) -> Option<TransportKind> {
        let is_plain = |(piece, owner): &(&mut Piece, &Option<Ordinal>)| {
            owner.is_none() && piece.outcome.is_none()
        };
        let mut rest: Vec<Piece> = pieces
            .iter_mut()
            .zip(owners)
            .filter(is_plain)
            .map(|(piece, _)| Piece::new(piece.local, piece.remote))
            .collect();
        if rest.is_empty() {
            return None;
        }
        let served = self.transfer(call, &mut rest);
        let plain = pieces.iter_mut().zip(owners).filter(is_plain);
        plain.zip(rest).for_each(|((piece, _), moved)| piece.outcome = moved.outcome);
        served
    }
}

fn fail(piece: &mut Piece, error: &Error) {
    piece.outcome.get_or_insert_with(|| Err(error.clone()));
}
