//! A peer as an engine knows it: its descriptor, and the paths to it that were tried.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use mooncake_base::sync::{RwLock, TimedMutex};
use mooncake_base::{Clock, Error, ErrorCode, ErrorKind, Moment, Result, SystemClock};

use crate::{
    descriptor::SegmentDescriptor,
    fork,
    metrics::{Metrics, PeerSnapshot, PoolSnapshot},
    path_selection::{PATHS_MAX, PathStats},
    transport::{Path, Transport, TransportKind},
};

/// After a peer could not be reached, how long the same answer is given without another try.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// Another engine, or this one, under the name by which it was opened.
#[derive(Debug)]
pub struct Peer {
    name: String,
    generation: u64,
    state: RwLock<State>,
    /// Held by the one who looks for the peer or for a path to it.
    reconnect: TimedMutex<Reconnect>,
    errors: AtomicU64,
    /// When it was last opened, counted in openings of its engine.
    last_use: AtomicU64,
    metrics: Metrics,
    path_stats: PathStats,
}

#[derive(Debug)]
struct State {
    /// Goes up with each new descriptor.
    version: u64,
    descriptor: Arc<SegmentDescriptor>,
    /// One for each of the engine's transports, in their order.
    slots: Vec<Slot>,
}

#[derive(Debug, Clone)]
enum Slot {
    Untried,
    Open(Arc<dyn Path>),
    Refused(Error),
}

#[derive(Debug, Default)]
struct Reconnect {
    failed: Option<(Moment, Error)>,
}

/// What there is in one place of the list of paths.
#[derive(Debug)]
pub(crate) enum PathState {
    Open(Arc<dyn Path>),
    /// There was one, and the peer is gone over it.
    Dead,
    None,
}

/// What is needed to make paths.
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
            "an engine has no more transports than ways"
        );
        Self {
            name: name.to_owned(),
            generation: fork::generation(),
            state: RwLock::new(State {
                version: 0,
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

    /// The name by which it was opened.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it last said of itself.
    pub fn descriptor(&self) -> Arc<SegmentDescriptor> {
        Arc::clone(&self.state.read().descriptor)
    }

    /// The cheapest way to it that is open now.
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

    /// What the ways to it were measured to give.
    pub(crate) const fn path_stats(&self) -> &PathStats {
        &self.path_stats
    }

    pub(crate) const fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Notes that it was opened; the one opened longest ago goes first when there are too many.
    pub(crate) fn touch(&self, now: u64) {
        self.last_use.store(now, Ordering::Relaxed);
    }

    pub(crate) fn last_use(&self) -> u64 {
        self.last_use.load(Ordering::Relaxed)
    }

    /// Ends every path to it. A transfer that is under way ends first.
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

    /// The path in that place, if it is open.
    pub(crate) fn open_path(&self, index: usize) -> Option<Arc<dyn Path>> {
        match self.path_state(index) {
            Some(PathState::Open(path)) => Some(path),
            _ => None,
        }
    }

    /// Whether nobody has asked for a path in that place yet.
    pub(crate) fn is_untried(&self, index: usize) -> bool {
        self.path_state(index).is_none()
    }

    pub(crate) fn count_errors(&self, count: u64) {
        self.errors.fetch_add(count, Ordering::Relaxed);
    }

    /// The version of the descriptor, to be handed to [`Peer::refresh`].
    pub(crate) fn version(&self) -> u64 {
        self.state.read().version
    }

    /// The path in that place, made now if it was not tried yet.
    pub(crate) fn path(
        &self,
        index: usize,
        context: PathContext<'_>,
        deadline: Moment,
    ) -> PathState {
        if let Some(found) = self.path_state(index) {
            return found;
        }
        let Some(_reconnect) = self.reconnect.take_within(lock_timeout(deadline)) else {
            return PathState::None;
        };
        if let Some(found) = self.path_state(index) {
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
        self.path_state(index).unwrap_or(PathState::None)
    }

    fn path_state(&self, index: usize) -> Option<PathState> {
        match &self.state.read().slots[index] {
            Slot::Untried => None,
            Slot::Open(path) if path.is_alive() => Some(PathState::Open(Arc::clone(path))),
            Slot::Open(_) => Some(PathState::Dead),
            Slot::Refused(_) => Some(PathState::None),
        }
    }

    /// Looks for the peer again, unless somebody did so since `version`; all paths are tried anew.
    pub(crate) fn refresh(
        &self,
        version: u64,
        deadline: Moment,
        resolve: impl FnOnce() -> Result<SegmentDescriptor>,
    ) -> Result<()> {
        let Some(mut reconnect) = self.reconnect.take_within(lock_timeout(deadline)) else {
            let text = "the deadline passed while the peer was looked for";
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
        let descriptor = resolve().inspect_err(|error| {
            reconnect.failed = Some((SystemClock.now(), error.clone()));
        })?;
        reconnect.failed = None;
        let mut state = self.state.write();
        if let Some(was) = engine_of(&state.descriptor)
            && engine_of(&descriptor) != Some(was)
        {
            tracing::debug!(peer = self.name, "another engine has taken the name");
        }
        state.version += 1;
        state.descriptor = Arc::new(descriptor);
        let old = state.slots.iter_mut().map(|slot| std::mem::replace(slot, Slot::Untried));
        let old: Vec<Slot> = old.collect();
        drop(state);
        // Ending a path may take other locks.
        drop(old);
        Ok(())
    }

    /// Why there is no path, in one error.
    pub(crate) fn unreachable(&self) -> Error {
        let state = self.state.read();
        let last = state.slots.iter().rev().find_map(|slot| match slot {
            Slot::Refused(error) => Some(error.clone()),
            _ => None,
        });
        drop(state);
        // Who was turned away should learn that at once.
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

fn engine_of(descriptor: &SegmentDescriptor) -> Option<mooncake_base::EngineId> {
    descriptor.mooncake.as_ref().and_then(|own| own.engine())
}

fn lock_timeout(deadline: Moment) -> Duration {
    // Bounded, so that a deadline at the end of time does not overflow the clock.
    deadline.left(SystemClock.now()).min(Duration::from_secs(3600))
}

impl Drop for Peer {
    fn drop(&mut self) {
        if fork::is_forked_since(self.generation) {
            // The sockets are the parent's.
            std::mem::forget(std::mem::take(&mut self.state.get_mut().slots));
        }
    }
}
