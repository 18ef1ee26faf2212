//! Transfers of batches: the order of paths, and the fallback when one fails.

use std::{sync::Arc, time::Duration};

use mooncake_base::{Clock, EngineMark, Error, ErrorCode, ErrorKind, Moment, SystemClock};

use super::{Engine, Inner};
use crate::{
    device::Stream,
    metrics::{Progress, Work},
    path::{
        peer::{PathState, Peer, RefreshReason},
        selection::{Decision, PATHS_MAX, TransferSizeClass},
    },
    transfer_entry::{Opcode, TransferEntry},
    transport::{Path, TimeLimits, TransportKind},
};

/// Timeout for opening a path that is only needed for a measurement.
const TRIAL_CONNECT_MAX: Duration = Duration::from_secs(1);

/// Result of trying every path once for the open entries of a batch.
enum Attempt {
    Done,
    /// A path has lost its peer, which may have moved elsewhere.
    PeerLost,
    /// The peer is another engine than the one that is meant, as far as this side knows.
    OtherEngine,
}

/// The order in which the paths are tried for one batch.
struct PathOrder {
    indexes: [usize; PATHS_MAX],
    /// The size class to record the first path's duration under, and whether this is a trial.
    measure: Option<(TransferSizeClass, bool)>,
}

/// Parameters of one transfer, beside its entries.
#[derive(Clone, Copy)]
pub(super) struct TransferParams<'a> {
    pub(super) peer: &'a Peer,
    /// The engine whose memory is meant. `None`: any that has the peer's name.
    pub(super) owner: Option<EngineMark>,
    pub(super) opcode: Opcode,
    pub(super) hint: Option<TransportKind>,
    pub(super) limits: TimeLimits,
    /// Device memory is accessed in the order of this stream.
    pub(super) stream: Stream,
}

impl<'a> TransferParams<'a> {
    /// Parameters with any owner, no hint and the default stream.
    pub(super) const fn new(peer: &'a Peer, opcode: Opcode, limits: TimeLimits) -> Self {
        Self { peer, owner: None, opcode, hint: None, limits, stream: Stream::DEFAULT }
    }
}

impl Engine {
    /// Moves entries between local memory and a peer's, and sets the outcome of each. Returns the
    /// transport that moved the last of the bytes.
    ///
    /// Blocks. An entry that fails on one path is tried on the next while the limits permit. A plain
    /// moment is a deadline without a stall limit. If the peer is gone, it is resolved once more, since it may have been restarted. Entries that
    /// have an outcome already are skipped.
    pub fn transfer(
        &self,
        peer: &Peer,
        opcode: Opcode,
        entries: &mut [TransferEntry],
        limits: impl Into<TimeLimits>,
    ) -> Option<TransportKind> {
        self.transfer_hinted(peer, opcode, entries, limits, None)
    }

    /// Like [`Engine::transfer`], with memory of a segment whose id carries this mark. Fails if another
    /// engine has taken the peer's name: its memory may have the same addresses. An engine whose
    /// segments carry no marks is accepted.
    pub fn transfer_to_owner(
        &self,
        peer: &Peer,
        owner: EngineMark,
        opcode: Opcode,
        entries: &mut [TransferEntry],
        limits: impl Into<TimeLimits>,
    ) -> Option<TransportKind> {
        let (limits, owner) = (limits.into(), Some(owner));
        let params = TransferParams { owner, ..TransferParams::new(peer, opcode, limits) };
        self.transfer_counted(params, entries)
    }

    /// Like [`Engine::transfer`], but tries the transport named by the caller first, if there is a
    /// path over it.
    pub fn transfer_hinted(
        &self,
        peer: &Peer,
        opcode: Opcode,
        entries: &mut [TransferEntry],
        limits: impl Into<TimeLimits>,
        hint: Option<TransportKind>,
    ) -> Option<TransportKind> {
        let params = TransferParams { hint, ..TransferParams::new(peer, opcode, limits.into()) };
        self.transfer_counted(params, entries)
    }

    /// Moves a batch and counts its errors.
    pub(super) fn transfer_counted(
        &self,
        params: TransferParams<'_>,
        entries: &mut [TransferEntry],
    ) -> Option<TransportKind> {
        if let Err(error) = self.inner.check_usable() {
            fail_open(entries, &error);
            return None;
        }
        for entry in entries.iter_mut() {
            if entry.local.length() == 0 && entry.outcome.is_none() {
                entry.outcome = Some(Ok(()));
            }
        }
        let before = Progress::of(entries);
        let served = self.inner.transfer_any(params, entries);
        params.peer.count_errors(Progress::of(entries).errors() - before.errors());
        served
    }
}

impl Inner {
    pub(super) fn transfer(
        &self,
        params: TransferParams<'_>,
        entries: &mut [TransferEntry],
    ) -> Option<TransportKind> {
        let TransferParams { peer, owner, limits, .. } = params;
        let connect_until = limits.give_up_at();
        let mut served = None;
        for is_last in [false, true] {
            let version = peer.version();
            let reason = match self.try_paths(params, connect_until, entries, &mut served) {
                Attempt::PeerLost if !is_last => RefreshReason::Lost,
                Attempt::OtherEngine if !is_last => RefreshReason::OtherEngine,
                Attempt::OtherEngine => {
                    fail_open(entries, &peer.other_engine(owner));
                    break;
                }
                Attempt::Done | Attempt::PeerLost => break,
            };
            // This engine, and not the peer, may be what has gone.
            if let Err(error) = self.check_usable() {
                fail_open(entries, &error);
                return served;
            }
            let resolve = || self.resolve(peer.name(), connect_until);
            if let Err(error) = peer.refresh(version, reason, connect_until, resolve) {
                fail_open(entries, &error);
                return served;
            }
        }
        if entries.iter().any(|entry| entry.outcome.is_none()) {
            let error = if connect_until.has_passed(SystemClock.now()) {
                let text = "the deadline passed before the bytes were moved";
                Error::new(ErrorCode::TRANSFER_FAIL, text).with("peer", peer.name())
            } else {
                peer.unreachable()
            };
            fail_open(entries, &error);
        }
        served
    }

    /// Tries every path once for the open entries, beginning with the fastest one for the batch.
    /// Opens paths until `connect_until`.
    fn try_paths(
        &self,
        params: TransferParams<'_>,
        connect_until: Moment,
        entries: &mut [TransferEntry],
        served: &mut Option<TransportKind>,
    ) -> Attempt {
        let mut was_reached = false;
        let mut order = self.path_order(params, entries);
        for index in order.indexes.into_iter().take(self.transports.len()) {
            if entries.iter().all(is_final) || params.limits.deadline.has_passed(SystemClock.now())
            {
                return Attempt::Done;
            }
            // An open path is closed with the engine, and a new one would outlive it.
            if let Err(error) = self.check_usable() {
                fail_open(entries, &error);
                return Attempt::Done;
            }
            let (peer, owner) = (params.peer, params.owner);
            let path = match peer.path_to(owner, index, self.path_context(), connect_until) {
                PathState::Open(path) => path,
                PathState::OtherEngine => return Attempt::OtherEngine,
                // The peer's successor must be resolved before bytes go there.
                PathState::Dead => return Attempt::PeerLost,
                PathState::None => {
                    order.measure = None;
                    continue;
                }
            };
            was_reached = true;
            entries.iter_mut().filter(|entry| !is_final(entry)).for_each(|entry| {
                entry.outcome = None;
            });
            let work = self.transfer_over(&*path, params, entries);
            if may_deliver_late(path.kind()) {
                mark_failed(params.opcode, entries);
            }
            if work.after.entries() > work.before.entries() {
                *served = Some(work.kind);
            }
            if let Some((size_class, is_trial)) = order.measure.take()
                && entries.iter().all(|entry| matches!(entry.outcome, Some(Ok(()))))
            {
                params.peer.path_stats().record(size_class, index, work.took, is_trial);
            }
            // The owner in this very process has answered; no other path can do better.
            if path.kind() == TransportKind::Memory && path.is_alive() {
                return Attempt::Done;
            }
            if !path.is_alive() && !entries.iter().all(is_final) {
                return Attempt::PeerLost;
            }
        }
        if was_reached { Attempt::Done } else { Attempt::PeerLost }
    }

    /// Sends a batch over one path and counts the result.
    pub(super) fn transfer_over(
        &self,
        path: &dyn Path,
        params: TransferParams<'_>,
        entries: &mut [TransferEntry],
    ) -> Work {
        let before = Progress::of(entries);
        let begin = SystemClock.now();
        path.transfer(params.opcode, entries, params.limits);
        let took = SystemClock.now().since(begin);
        let (kind, opcode) = (path.kind(), params.opcode);
        let work = Work { kind, opcode, before, after: Progress::of(entries), took };
        self.metrics.count(&work);
        params.peer.metrics().count(&work);
        work
    }

    /// The paths by cost, with the hinted path or the one measured to be the fastest first.
    fn path_order(&self, params: TransferParams<'_>, entries: &[TransferEntry]) -> PathOrder {
        let indexes = std::array::from_fn(|index| index);
        let mut order = PathOrder { indexes, measure: None };
        let kind_at = |index: usize| self.transports[index].kind();
        let count = self.transports.len();
        if let Some(hint) = params.hint {
            if let Some(index) = (0..count).find(|index| kind_at(*index) == hint) {
                order.put_first(index);
            }
            return order;
        }
        let first = (0..count).find_map(|index| Some((index, params.peer.open_path(index)?)));
        let Some((first, path)) = first else { return order };
        let Some(size_class) = size_class_over(&path, entries) else { return order };
        order.measure = Some((size_class, false));
        order.put_first(first);
        let can_serve = |index: &usize| {
            params.peer.open_path(*index).is_some()
                || params.peer.is_untried(*index) && size_class.justifies_connection()
        };
        let Some(second) = (first + 1..count).find(can_serve) else { return order };
        let (chosen, is_trial) = match params.peer.path_stats().decide(size_class, first, second) {
            Decision::First => (first, false),
            Decision::TryFirst => (first, true),
            Decision::Second => (second, false),
            Decision::TrySecond => (second, true),
        };
        if chosen == second && params.peer.open_path(second).is_none() {
            let until = params.limits.give_up_at().min(SystemClock.now() + TRIAL_CONNECT_MAX);
            if !matches!(params.peer.path(second, self.path_context(), until), PathState::Open(_)) {
                return order;
            }
        }
        order.put_first(chosen);
        order.measure = Some((size_class, is_trial));
        order
    }
}

impl PathOrder {
    fn put_first(&mut self, index: usize) {
        let place = self.indexes.iter().position(|other| *other == index);
        let place = place.expect("every index has a place");
        self.indexes[..=place].rotate_right(1);
    }
}

/// The size class of a batch, if the path knows the kind of memory of its first entry.
fn size_class_over(path: &Arc<dyn Path>, entries: &[TransferEntry]) -> Option<TransferSizeClass> {
    let open = entries.iter().find(|entry| entry.outcome.is_none())?;
    path.remote_memory(open.remote_range())
        .map(|remote_memory| TransferSizeClass::of(entries, remote_memory))
}

/// True if the entry was moved, or if its arguments are invalid, so that no path can move it.
fn is_final(entry: &TransferEntry) -> bool {
    match &entry.outcome {
        Some(Ok(())) => true,
        Some(Err(error)) => error.kind() == ErrorKind::InvalidArgument,
        None => false,
    }
}

/// Returns whether bytes of an attempt that failed may still be on their way.
fn may_deliver_late(kind: TransportKind) -> bool {
    matches!(kind, TransportKind::Tcp | TransportKind::Rdma)
}

/// Records of the entries that failed, and may be tried again, that bytes of them may arrive later.
fn mark_failed(opcode: Opcode, entries: &mut [TransferEntry]) {
    if opcode == Opcode::Write {
        let failed = entries.iter_mut().filter(|entry| !is_final(entry));
        failed.for_each(|entry| entry.may_arrive_late = true);
    }
}

/// Sets this error as the outcome of every open entry.
fn fail_open(entries: &mut [TransferEntry], error: &Error) {
    for entry in entries.iter_mut().filter(|entry| entry.outcome.is_none()) {
        entry.outcome = Some(Err(error.clone()));
    }
}
