//! A peer as an engine knows it: its descriptor and the paths to it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use mooncake_base::sync::{RwLock, TimedMutex, TimedMutexGuard};
use mooncake_base::{Clock, EngineMark, Error, ErrorCode, ErrorKind, Moment, Result, SystemClock};
use mooncake_os::{call_limit, fork};

use crate::{
    discovery::descriptor::SegmentDescriptor,
    metrics::{Metrics, PeerSnapshot, PoolSnapshot},
    path::selection::{PATHS_MAX, PathStats},
    transport::{Path, Transport, TransportKind},
};

/// How long a failure to reach a peer is returned again without another attempt.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// Another engine, or this one, under the name by which it was opened.
#[derive(Debug)]
pub struct Peer {
    name: String,
    generation: u64,
    state: RwLock<KnownPeer>,
    /// Held while a thread resolves the peer or opens a path to it.
    reconnect: TimedMutex<Reconnect>,
    errors: AtomicU64,
    /// The engine's opening counter when the peer was last opened.
    last_use: AtomicU64,
    metrics: Metrics,
    path_stats: PathStats,
}

#[derive(Debug)]
struct KnownPeer {
    /// Incremented with each new descriptor.
    version: u64,
    descriptor: Arc<SegmentDescriptor>,
    /// The mark that the ids of segments in the peer's memory begin with, if they do.
    segment_mark: Option<EngineMark>,
    /// One slot per transport of the engine, in the same order.
    slots: Vec<Slot>,
}

#[derive(Debug, Clone)]
enum Slot {
    Untried,
    Open(Arc<dyn Path>),
    /// The path was lost and is dropped.
    Dead,
    Refused(Error),
}

#[derive(Debug, Default)]
struct Reconnect {
    failed: Option<(Moment, Error)>,
    /// When the peer was last found to be the engine that was known already.
    confirmed: Option<Moment>,
}

/// Why a peer is resolved again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RefreshReason {
    /// The paths to it are lost.
    Lost,
    /// It is not the engine that a transfer is meant for. Its paths stay open unless another engine has
    /// taken its name.
    OtherEngine,
}

/// State of the path in one slot.
#[derive(Debug)]
pub(crate) enum PathState {
    Open(Arc<dyn Path>),
    /// A path was open and its connection to the peer is lost.
    Dead,
    /// The peer is another engine than the one that is meant.
    OtherEngine,
    None,
}

/// The parts of an engine that are needed to open paths.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PathContext<'a> {
    pub(crate) transports: &'a [Arc<dyn Transport>],
    pub(crate) metrics: &'a Metrics,
    pub(crate) connect_timeout: Duration,
}

impl Peer {
    pub(crate) fn new(name: &str, descriptor: SegmentDescriptor, context: PathContext<'_>) -> Self {
        assert!(
            context.transports.len() <= PATHS_MAX,
            "an engine has at most PATHS_MAX transports"
        );
        Self {
            name: name.to_owned(),
            generation: fork::generation(),
            state: RwLock::new(KnownPeer {
                version: 0,
                segment_mark: descriptor.segment_mark(),
                descriptor: Arc::new(descriptor),
                slots: vec![Slot::Untried; context.transports.len()],
            }),
            reconnect: TimedMutex::default(),
            errors: AtomicU64::new(0),
            last_use: AtomicU64::new(0),
            metrics: Metrics::default(),
            path_stats: PathStats::default(),
        }
    }

    /// The name by which the peer was opened.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The descriptor that the peer last published.
    pub fn descriptor(&self) -> Arc<SegmentDescriptor> {
        Arc::clone(&self.state.read().descriptor)
    }

    /// The cheapest path that is open now.
    pub fn transport(&self) -> Option<TransportKind> {
        self.state.read().slots.iter().find_map(|slot| match slot {
            Slot::Open(path) if path.is_alive() => Some(path.kind()),
            _ => None,
        })
    }

    pub(crate) fn snapshot(&self, context: PathContext<'_>) -> PeerSnapshot {
        let state = self.state.read();
        let kinds: Vec<_> = context.transports.iter().map(|transport| transport.kind()).collect();
        let refusals = kinds.iter().zip(&state.slots).filter_map(|(kind, slot)| match slot {
            Slot::Refused(error) => Some((*kind, error.to_string())),
            _ => None,
        });
        let refusals = refusals.collect();
        let pools = state.slots.iter().filter_map(|slot| match slot {
            Slot::Open(path) => path.connections(),
            _ => None,
        });
        let connections = pools.fold(PoolSnapshot::default(), |sum, pool| PoolSnapshot {
            open: sum.open + pool.open,
            idle: sum.idle + pool.idle,
            limit: sum.limit + pool.limit,
            refused: sum.refused + pool.refused,
        });
        drop(state);
        let measured =
            self.path_stats.all().into_iter().map(|one| (kinds[one.path], one)).collect();
        PeerSnapshot {
            name: self.name.clone(),
            transport: self.transport(),
            errors: self.errors.load(Ordering::Relaxed),
            refusals,
            transports: self.metrics.snapshot(),
            connections,
            measured,
        }
    }

    /// Measurements of the paths to the peer.
    pub(crate) const fn path_stats(&self) -> &PathStats {
        &self.path_stats
    }

    pub(crate) const fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Records that the peer was opened; the least recently opened peer is evicted first.
    pub(crate) fn touch(&self, now: u64) {
        self.last_use.store(now, Ordering::Relaxed);
    }

    pub(crate) fn last_use(&self) -> u64 {
        self.last_use.load(Ordering::Relaxed)
    }

    /// Closes every path. Transfers in flight fail soon.
    pub(crate) fn close(&self) {
        let state = self.state.read();
        let open = state.slots.iter().filter_map(|slot| match slot {
            Slot::Open(path) => Some(Arc::clone(path)),
            _ => None,
        });
        let open: Vec<_> = open.collect();
        drop(state);
        open.iter().for_each(|path| path.close());
    }

    /// Drops the paths that are lost, with their sockets and mappings. Returns whether that leaves the
    /// peer without a path.
    pub(crate) fn drop_dead_paths(&self) -> bool {
        let is_dead = |slot: &Slot| matches!(slot, Slot::Open(path) if !path.is_alive());
        let mut dropped = Vec::new();
        if self.state.read().slots.iter().any(is_dead) {
            let mut state = self.state.write();
            let dead = state.slots.iter_mut().filter(|slot| is_dead(slot));
            dropped.extend(dead.map(|slot| std::mem::replace(slot, Slot::Dead)));
        }
        // Closing a path may take other locks.
        drop(dropped);
        let state = self.state.read();
        let has_path = state.slots.iter().any(|slot| matches!(slot, Slot::Open(_)));
        !has_path && state.slots.iter().any(|slot| matches!(slot, Slot::Dead))
    }

    /// Returns the path in a slot, if it is open.
    pub(crate) fn open_path(&self, index: usize) -> Option<Arc<dyn Path>> {
        self.open_path_to(None, index)
    }

    /// Returns the path in a slot, if it is open and leads to this engine.
    pub(crate) fn open_path_to(
        &self,
        owner: Option<EngineMark>,
        index: usize,
    ) -> Option<Arc<dyn Path>> {
        match self.path_state(owner, index) {
            Some(PathState::Open(path)) => Some(path),
            _ => None,
        }
    }

    /// Returns whether no path was attempted in a slot yet.
    pub(crate) fn is_untried(&self, index: usize) -> bool {
        self.path_state(None, index).is_none()
    }

    pub(crate) fn count_errors(&self, count: u64) {
        self.errors.fetch_add(count, Ordering::Relaxed);
    }

    /// The version of the descriptor, as [`Peer::refresh`] expects it.
    pub(crate) fn version(&self) -> u64 {
        self.state.read().version
    }

    /// Returns the path in a slot and opens it if it was not attempted yet.
    pub(crate) fn path(
        &self,
        index: usize,
        context: PathContext<'_>,
        deadline: Moment,
    ) -> PathState {
        self.path_to(None, index, context, deadline)
    }

    /// Like [`Peer::path`], for a path that must lead to the engine with this mark.
    pub(crate) fn path_to(
        &self,
        owner: Option<EngineMark>,
        index: usize,
        context: PathContext<'_>,
        deadline: Moment,
    ) -> PathState {
        if let Some(found) = self.path_state(owner, index) {
            return found;
        }
        // An attempt without time would fail, and the path would count as refused.
        if deadline.has_passed(SystemClock.now()) {
            return PathState::None;
        }
        let Some(_reconnect) = self.lock_reconnect(deadline) else {
            return PathState::None;
        };
        if let Some(found) = self.path_state(owner, index) {
            return found;
        }
        let (version, descriptor) = {
            let state = self.state.read();
            (state.version, Arc::clone(&state.descriptor))
        };
        let transport = &context.transports[index];
        let until = deadline.min(SystemClock.now() + context.connect_timeout);
        let slot = match transport.connect(&descriptor, until) {
            Ok(path) => {
                if let Some(rate) = path.probed_bytes_per_second() {
                    self.path_stats.record_probe(rate);
                }
                Slot::Open(path)
            }
            Err(error) => {
                tracing::debug!(peer = self.name, over = %transport.kind(), %error, "no path");
                context.metrics.count_refusal(transport.kind());
                self.metrics.count_refusal(transport.kind());
                Slot::Refused(error)
            }
        };
        let mut state = self.state.write();
        if state.version == version {
            state.slots[index] = slot;
        }
        drop(state);
        self.path_state(owner, index).unwrap_or(PathState::None)
    }

    /// Returns the state of the path in a slot; `None` if it was not attempted yet. The paths lead to
    /// the engine of the descriptor: each connection and attachment names the engine that it wants,
    /// and each key of an RDMA device is of that engine's memory.
    fn path_state(&self, owner: Option<EngineMark>, index: usize) -> Option<PathState> {
        let state = self.state.read();
        if let (Some(owner), Some(mark)) = (owner, state.segment_mark)
            && owner != mark
        {
            return Some(PathState::OtherEngine);
        }
        match &state.slots[index] {
            Slot::Untried => None,
            Slot::Open(path) if path.is_alive() => Some(PathState::Open(Arc::clone(path))),
            Slot::Open(_) | Slot::Dead => Some(PathState::Dead),
            Slot::Refused(_) => Some(PathState::None),
        }
    }

    /// Waits for the thread that resolves the peer or opens a path. `None`: the time is over.
    fn lock_reconnect(&self, deadline: Moment) -> Option<TimedMutexGuard<'_, Reconnect>> {
        loop {
            // Bounded, so that a deadline at the end of time does not overflow the clock.
            let wait = call_limit::next_wait(deadline).min(Duration::from_secs(3600));
            let taken = self.reconnect.take_within(wait);
            if taken.is_some() || wait.is_zero() {
                return taken;
            }
        }
    }

    /// Resolves the peer again, unless another thread did so since `version`. Every path is then
    /// attempted again.
    pub(crate) fn refresh(
        &self,
        version: u64,
        reason: RefreshReason,
        deadline: Moment,
        resolve: impl FnOnce() -> Result<SegmentDescriptor>,
    ) -> Result<()> {
        let Some(mut reconnect) = self.lock_reconnect(deadline) else {
            let text = "the deadline passed while the peer was resolved";
            return Err(Error::new(ErrorCode::TRANSFER_FAIL, text).with("peer", &self.name));
        };
        if self.version() != version {
            return Ok(());
        }
        if let Some((moment, error)) = &reconnect.failed
            && SystemClock.now().since(*moment) < RETRY_PAUSE
        {
            return Err(error.clone());
        }
        let is_wrong_engine = reason == RefreshReason::OtherEngine;
        let is_recent = |moment: Moment| SystemClock.now().since(moment) < RETRY_PAUSE;
        if is_wrong_engine && reconnect.confirmed.is_some_and(is_recent) {
            return Ok(());
        }
        let descriptor = resolve().inspect_err(|error| {
            reconnect.failed = Some((SystemClock.now(), error.clone()));
        })?;
        reconnect.failed = None;
        let mut state = self.state.write();
        let was = state.descriptor.engine();
        if is_wrong_engine && descriptor.engine() == was {
            reconnect.confirmed = Some(SystemClock.now());
            return Ok(());
        }
        if was.is_some() && descriptor.engine() != was {
            tracing::debug!(peer = self.name, "another engine has taken the name");
        }
        state.version += 1;
        state.segment_mark = descriptor.segment_mark();
        state.descriptor = Arc::new(descriptor);
        let old = state.slots.iter_mut().map(|slot| std::mem::replace(slot, Slot::Untried));
        let old: Vec<Slot> = old.collect();
        drop(state);
        // Closing a path may take other locks.
        drop(old);
        Ok(())
    }

    /// The error for a transfer that is meant for another engine than the peer is now.
    pub(crate) fn other_engine(&self, owner: Option<EngineMark>) -> Error {
        let text = "another engine has the address of the segment's owner, which has left";
        let error = Error::new(ErrorCode::TRANSFER_FAIL, text).with("peer", &self.name);
        match (owner, self.state.read().segment_mark) {
            (Some(owner), Some(now)) => error.with("owner", owner).with("now", now),
            _ => error,
        }
    }

    /// Explains in one error why there is no path.
    pub(crate) fn unreachable(&self) -> Error {
        let state = self.state.read();
        let last = state.slots.iter().rev().find_map(|slot| match slot {
            Slot::Refused(error) => Some(error.clone()),
            _ => None,
        });
        drop(state);
        // A caller whose token was refused should learn that at once.
        let code = match &last {
            Some(last) if last.kind() == ErrorKind::PermissionDenied => last.code(),
            _ => ErrorCode::TRANSFER_FAIL,
        };
        let error = Error::new(code, "there is no path to the peer").with("peer", &self.name);
        match last {
            Some(last) => error.caused_by(last),
            None => error,
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if fork::is_forked_since(self.generation) {
            // The sockets belong to the parent process.
            std::mem::forget(std::mem::take(&mut self.state.get_mut().slots));
        }
    }
}
