//! Moving a batch: which path it takes, and what happens when one fails.

use std::{sync::Arc, time::Duration};

use mooncake_base::{Clock, Error, ErrorCode, ErrorKind, Moment, SystemClock};

use super::{Engine, Inner};
use crate::{
    choice::{Pick, Shape, WAYS},
    device::Stream,
    metrics::{Progress, Work},
    peer::{Found, Peer},
    piece::{Opcode, Piece},
    transport::{Path, TransportKind},
};

/// How long a path that is only wanted for a measurement may take to be made.
const TRIAL_CONNECT_MAX: Duration = Duration::from_secs(1);

/// The part of a batch that is being moved, once around the paths.
enum Round {
    Done,
    /// A path has died: the peer may be found elsewhere.
    PeerLost,
}

/// In which order the paths are tried for one batch.
struct Order {
    indexes: [usize; WAYS],
    /// What the measurement of the first is to be noted under, and whether it is a trial.
    measure: Option<(Shape, bool)>,
}

/// What is asked of one transfer, beside its pieces.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    pub(super) peer: &'a Peer,
    pub(super) opcode: Opcode,
    pub(super) hint: Option<TransportKind>,
    pub(super) deadline: Moment,
    /// In whose order device memory is read and written.
    pub(super) stream: Stream,
}

impl Engine {
    /// Moves pieces between local memory and a peer's, and gives each its outcome. Says over which
    /// way the last of the bytes went.
    ///
    /// Blocks. A piece that fails on one path is tried on the next while the deadline lasts; if the
    /// peer is gone it is looked for once more, since it may have been restarted. Pieces that have
    /// an outcome already are left alone.
    pub fn transfer(
        &self,
        peer: &Peer,
        opcode: Opcode,
        pieces: &mut [Piece],
        deadline: Moment,
    ) -> Option<TransportKind> {
        self.transfer_hinted(peer, opcode, pieces, deadline, None)
    }

    /// Like [`Engine::transfer`], trying the way that the caller names before all others, if there
    /// is a path over it.
    pub fn transfer_hinted(
        &self,
        peer: &Peer,
        opcode: Opcode,
        pieces: &mut [Piece],
        deadline: Moment,
        hint: Option<TransportKind>,
    ) -> Option<TransportKind> {
        self.carry(Call { peer, opcode, hint, deadline, stream: Stream::DEFAULT }, pieces)
    }

    /// Moves a batch and counts what fails.
    pub(super) fn carry(&self, call: Call<'_>, pieces: &mut [Piece]) -> Option<TransportKind> {
        if let Err(error) = self.inner.usable() {
            fail_open(pieces, &error);
            return None;
        }
        for piece in pieces.iter_mut() {
            if piece.local.length() == 0 && piece.outcome.is_none() {
                piece.outcome = Some(Ok(()));
            }
        }
        let before = Progress::of(pieces);
        let served = self.inner.transfer_any(call, pieces);
        call.peer.count_errors(Progress::of(pieces).errors() - before.errors());
        served
    }
}

impl Inner {
    pub(super) fn transfer(&self, call: Call<'_>, pieces: &mut [Piece]) -> Option<TransportKind> {
        let Call { peer, deadline, .. } = call;
        let mut served = None;
        for is_last in [false, true] {
            let version = peer.version();
            match self.round(call, pieces, &mut served) {
                Round::PeerLost if !is_last => {}
                _ => break,
            }
            let resolve = || self.resolve(peer.name(), deadline);
            if let Err(error) = peer.refresh(version, deadline, resolve) {
                fail_open(pieces, &error);
                return served;
            }
        }
        if pieces.iter().any(|piece| piece.outcome.is_none()) {
            let error = if deadline.has_passed(SystemClock.now()) {
                let text = "the deadline passed before the bytes were moved";
                Error::new(ErrorCode::TRANSFER_FAIL, text).with("peer", peer.name())
            } else {
                peer.unreachable()
            };
            fail_open(pieces, &error);
        }
        served
    }

    /// Tries every path once, the one that is fastest for the batch first, for what is not moved
    /// yet.
    fn round(
        &self,
        call: Call<'_>,
        pieces: &mut [Piece],
        served: &mut Option<TransportKind>,
    ) -> Round {
        let mut was_reached = false;
        let mut order = self.order(call, pieces);
        for index in order.indexes.into_iter().take(self.transports.len()) {
            if pieces.iter().all(is_settled) || call.deadline.has_passed(SystemClock.now()) {
                return Round::Done;
            }
            let path = match call.peer.path(index, self.ways(), call.deadline) {
                Found::Open(path) => path,
                // Whoever has taken its place must be asked for before bytes go there.
                Found::Dead => return Round::PeerLost,
                Found::None => {
                    order.measure = None;
                    continue;
                }
            };
            was_reached = true;
            pieces.iter_mut().filter(|piece| !is_settled(piece)).for_each(|piece| {
                piece.outcome = None;
            });
            let work = self.over(&*path, call, pieces);
            if work.after.pieces() > work.before.pieces() {
                *served = Some(work.kind);
            }
            if let Some((shape, is_trial)) = order.measure.take()
                && pieces.iter().all(|piece| matches!(piece.outcome, Some(Ok(()))))
            {
                call.peer.scores().note(shape, index, work.took, is_trial);
            }
            // The owner itself has spoken, in this very process.
            if path.kind() == TransportKind::Memory && path.is_alive() {
                return Round::Done;
            }
            if !path.is_alive() && !pieces.iter().all(is_settled) {
                return Round::PeerLost;
            }
        }
        if was_reached { Round::Done } else { Round::PeerLost }
    }

    /// Sends a batch over one path, and counts.
    fn over(&self, path: &dyn Path, call: Call<'_>, pieces: &mut [Piece]) -> Work {
        let before = Progress::of(pieces);
        let begin = SystemClock.now();
        path.transfer(call.opcode, pieces, call.deadline);
        let took = SystemClock.now().since(begin);
        let (kind, opcode) = (path.kind(), call.opcode);
        let work = Work { kind, opcode, before, after: Progress::of(pieces), took };
        self.metrics.count(&work);
        call.peer.metrics().count(&work);
        work
    }

    /// The order by cost, with the path in front that the caller wants or that was measured to be
    /// the fastest for this batch.
    fn order(&self, call: Call<'_>, pieces: &[Piece]) -> Order {
        let indexes = std::array::from_fn(|index| index);
        let mut order = Order { indexes, measure: None };
        let kind_at = |index: usize| self.transports[index].kind();
        let count = self.transports.len();
        if let Some(hint) = call.hint {
            if let Some(index) = (0..count).find(|index| kind_at(*index) == hint) {
                order.put_first(index);
            }
            return order;
        }
        let first = (0..count).find_map(|index| Some((index, call.peer.open_path(index)?)));
        let Some((first, path)) = first else { return order };
        let Some(shape) = shape_over(&path, pieces) else { return order };
        order.measure = Some((shape, false));
        order.put_first(first);
        let can_serve = |index: &usize| {
            call.peer.open_path(*index).is_some()
                || call.peer.is_untried(*index) && shape.is_worth_a_connection()
        };
        let Some(second) = (first + 1..count).find(can_serve) else { return order };
        let (chosen, is_trial) = match call.peer.scores().pick(shape, first, second) {
            Pick::First => (first, false),
            Pick::TryFirst => (first, true),
            Pick::Second => (second, false),
            Pick::TrySecond => (second, true),
        };
        if chosen == second && call.peer.open_path(second).is_none() {
            let until = call.deadline.min(SystemClock.now() + TRIAL_CONNECT_MAX);
            if !matches!(call.peer.path(second, self.ways(), until), Found::Open(_)) {
                return order;
            }
        }
        order.put_first(chosen);
        order.measure = Some((shape, is_trial));
        order
    }
}

impl Order {
    fn put_first(&mut self, index: usize) {
        let place = self.indexes.iter().position(|other| *other == index);
        let place = place.expect("every index has a place");
        self.indexes[..=place].rotate_right(1);
    }
}

/// The shape of a batch, if the path knows what the memory of its first piece is.
fn shape_over(path: &Arc<dyn Path>, pieces: &[Piece]) -> Option<Shape> {
    let open = pieces.iter().find(|piece| piece.outcome.is_none())?;
    path.footing(open.remote_range()).map(|footing| Shape::of(pieces, footing))
}

/// Moved, or not to be moved because the call itself is wrong.
fn is_settled(piece: &Piece) -> bool {
    match &piece.outcome {
        Some(Ok(())) => true,
        Some(Err(error)) => error.kind() == ErrorKind::InvalidArgument,
        None => false,
    }
}

/// Gives every piece that has no outcome this one.
fn fail_open(pieces: &mut [Piece], error: &Error) {
    for piece in pieces.iter_mut().filter(|piece| piece.outcome.is_none()) {
        piece.outcome = Some(Err(error.clone()));
    }
}
