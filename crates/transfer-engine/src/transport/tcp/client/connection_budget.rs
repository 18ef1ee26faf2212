//! The connections of an engine to all its peers: how many they are, and which have been idle for long.
//!
//! A client of a large pool meets thousands of peers, each of which has a limit of connections, too.
//! While an engine has many connections, it opens one per peer, and those that nobody uses are closed
//! after a while.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use mooncake_base::Moment;
use mooncake_base::sync::Mutex;
use mooncake_os::rlimit;

use super::connection_pool::PoolState;

/// The number of connections from which on each peer gets only one, where descriptors suffice.
const MANY: usize = 1024;

/// The interval of looking for idle connections. One that was not used between two looks is closed.
const SWEEP_INTERVAL: Duration = Duration::from_secs(30);

/// The connections of one engine.
#[derive(Debug)]
pub(crate) struct ConnectionBudget {
    many: usize,
    open: AtomicUsize,
    /// The number of looks for idle connections.
    sweeps: AtomicU64,
    last_sweep: Mutex<Option<Moment>>,
    pools: Mutex<Pools>,
}

/// The pools of one engine. Locked before the state of a pool.
#[derive(Debug, Default)]
struct Pools {
    all: Vec<Weak<Mutex<PoolState>>>,
    is_closed: bool,
}

/// The count of one open connection.
#[derive(Debug)]
pub(super) struct CountedConnection(Arc<ConnectionBudget>);

impl ConnectionBudget {
    /// Raises the limit of open files of this process, and returns a budget for it.
    pub(crate) fn for_process() -> Arc<Self> {
        rlimit::raise();
        let share = usize::try_from(rlimit::limit() / 4).unwrap_or(usize::MAX);
        Self::with_limit(MANY.min(share))
    }

    /// Returns a budget of which `many` connections are many.
    pub(super) fn with_limit(many: usize) -> Arc<Self> {
        Arc::new(Self {
            many,
            open: AtomicUsize::new(0),
            sweeps: AtomicU64::new(0),
            last_sweep: Mutex::default(),
            pools: Mutex::default(),
        })
    }

    /// Returns the maximum number of connections to one peer now.
    pub(super) fn per_peer(&self, wanted: usize) -> usize {
        if self.open.load(Ordering::Relaxed) < self.many { wanted } else { 1 }
    }

    /// Counts a new connection.
    pub(super) fn count(self: &Arc<Self>) -> CountedConnection {
        self.open.fetch_add(1, Ordering::Relaxed);
        CountedConnection(Arc::clone(self))
    }

    /// Adds a pool, whose idle connections are closed after a while.
    pub(super) fn add_pool(&self, pool: &Arc<Mutex<PoolState>>) {
        let mut pools = self.pools.lock();
        if pools.is_closed {
            PoolState::close(pool);
            return;
        }
        if pools.all.len() == pools.all.capacity() {
            pools.all.retain(|pool| pool.strong_count() > 0);
        }
        pools.all.push(Arc::downgrade(pool));
    }

    /// Closes every pool, also one that its engine has forgotten, and those that are added later.
    pub(crate) fn close(&self) {
        let mut pools = self.pools.lock();
        pools.is_closed = true;
        let all = std::mem::take(&mut pools.all);
        drop(pools);
        all.iter().filter_map(Weak::upgrade).for_each(|pool| PoolState::close(&pool));
    }

    /// Returns the number of looks for idle connections so far.
    pub(super) fn sweeps(&self) -> u64 {
        self.sweeps.load(Ordering::Relaxed)
    }

    /// Closes the connections that were not used between the last two looks, if another look is due.
    pub(crate) fn sweep(&self, now: Moment) {
        {
            let mut last = self.last_sweep.lock();
            if last.is_some_and(|last| now.since(last) < SWEEP_INTERVAL) {
                return;
            }
            *last = Some(now);
        }
        let sweeps = self.sweeps.fetch_add(1, Ordering::Relaxed);
        let pools: Vec<_> = self.pools.lock().all.iter().filter_map(Weak::upgrade).collect();
        for pool in pools {
            let unused = pool.lock().take_unused(sweeps);
            // Closed without the lock.
            drop(unused);
        }
    }
}

impl Drop for CountedConnection {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}
