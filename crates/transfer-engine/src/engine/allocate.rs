//! Memory that the engine allocates or maps, and its withdrawal from peers.

use std::{
    path::Path,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use mooncake_base::{Clock, Result, SystemClock};
use mooncake_os::fork;

use super::{Engine, Inner};
use crate::memory::{
    FileMemory, SharedMemory,
    region::{MemoryOwner, Region},
};

/// How long a withdrawal waits for the end of connections that it closed.
const CUT_TIMEOUT: Duration = Duration::from_millis(500);

/// How often a withdrawal looks for connections to close during that time.
const CUT_INTERVAL: Duration = Duration::from_millis(20);

/// How long publishing a change may take.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(5);

impl Engine {
    /// Allocates shared memory that is registered with the engine and that peers of this host can
    /// map.
    ///
    /// Pages are allocated as they are written; a background thread faults in the first ones (see
    /// [`EngineConfig::prefault_bytes_max`](crate::EngineConfig::prefault_bytes_max)). Peers address the memory by its first address in this
    /// process.
    ///
    /// # Errors
    /// The system has no such memory, or the engine is closed.
    pub fn allocate(&self, length: u64) -> Result<SharedMemory> {
        self.inner.check_usable()?;
        let mut memory = SharedMemory::create(length, self.inner.config.huge_pages)?;
        let mapping = Arc::clone(memory.mapping());
        let node = self.inner.config.numa_node;
        if let Some(Err(error)) = node.map(|node| mapping.prefer_node(node)) {
            tracing::info!(%error, node, "memory cannot be bound to the preferred NUMA node");
        }
        let location = format!("cpu:{}", node.unwrap_or(0));
        let range = (memory.base(), memory.length());
        let owner = MemoryOwner::Shared(mapping);
        let region = self.inner.exported.regions.register_owned(range, &location, owner)?;
        self.inner.rdma.register(&region);
        memory.on_drop(self.withdrawal());
        self.inner.announce()?;
        self.inner.prefaulter.prefault(memory.mapping());
        Ok(memory)
    }

    /// Maps a part of a file as memory that peers may access.
    ///
    /// # Errors
    /// The file cannot be mapped, `offset` is not a multiple of the page size, the file is shorter
    /// than the range, or the engine is closed.
    pub fn map_file(
        &self,
        path: &Path,
        offset: u64,
        length: u64,
        location: &str,
    ) -> Result<FileMemory> {
        self.inner.check_usable()?;
        let mut memory = FileMemory::map(path, offset, length)?;
        let range = (memory.base(), memory.length());
        let owner = MemoryOwner::File(Arc::clone(memory.mapping()));
        let region = self.inner.exported.regions.register_owned(range, location, owner)?;
        self.inner.rdma.register(&region);
        memory.on_drop(self.withdrawal());
        self.inner.announce()?;
        Ok(memory)
    }

    /// Returns the drop hook of engine memory: withdraws it by its first address before it is
    /// unmapped.
    fn withdrawal(&self) -> impl FnOnce(u64) + Send + Sync + 'static {
        let (weak, generation) = (Arc::downgrade(&self.inner), self.inner.generation);
        move |base| {
            if fork::is_forked_since(generation) {
                return;
            }
            let Some(inner) = weak.upgrade() else { return };
            if let Err(error) = inner.withdraw(base) {
                tracing::warn!(%error, "memory was dropped while peers still used it");
            }
            inner.announce_withdrawal();
        }
    }
}

impl Inner {
    /// Removes a region from the table and waits until no peer uses it. Peers of this host are
    /// told, connections over TCP that use it at the deadline are closed.
    ///
    /// # Errors
    /// No region begins there; or it is still in use, and the call can be repeated.
    pub(super) fn withdraw(&self, base: u64) -> Result<()> {
        let _withdrawal = self.withdrawals.read();
        let deadline = Instant::now() + self.config.withdraw_timeout;
        let regions = self.exported.regions.withdraw(base)?;
        // All peers leave at the same time: one that stalls costs the others nothing.
        if let Some(shm_server) = &self.shm_server {
            regions.iter().for_each(|region| shm_server.begin_withdrawal(region));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let deregistered = self.rdma.deregister(base, left);
        let unpinned = regions.iter().try_for_each(|region| self.wait_unpinned(region, deadline));
        let left_by_peers = match &self.shm_server {
            Some(shm_server) => shm_server.await_withdrawal(base, deadline),
            None => Ok(()),
        };
        let outcome = deregistered.and(unpinned).and(left_by_peers);
        if outcome.is_err() {
            self.exported.regions.keep_leaving(regions);
        }
        outcome
    }

    /// Waits until the last pin of a withdrawn region is dropped. Connections that hold pins at the
    /// deadline are closed.
    fn wait_unpinned(&self, region: &Arc<Region>, deadline: Instant) -> Result<()> {
        let mut unpinned = region.wait_unpinned(deadline);
        let closed = deadline + CUT_TIMEOUT;
        while unpinned.is_err() && Instant::now() < closed {
            // A connection that was about to record its pin is found the next time.
            self.data.cut_users(region);
            unpinned = region.wait_unpinned(closed.min(Instant::now() + CUT_INTERVAL));
        }
        unpinned
    }

    /// Publishes a change on the metadata server. Peers that ask the engine itself always get the
    /// current state.
    pub(super) fn announce(&self) -> Result<()> {
        if self.config.is_p2p() || self.is_closed.load(Ordering::Acquire) {
            return Ok(());
        }
        self.publish()
    }

    /// Announces that memory is gone. Of repeated failures only the first is a warning.
    fn announce_withdrawal(&self) {
        let announced = self.announce();
        let has_failed = announced.is_err();
        let had_failed = self.is_announcement_late.swap(has_failed, Ordering::Relaxed);
        match announced {
            Err(error) if !had_failed => tracing::warn!(
                %error,
                "the metadata server still lists memory that is gone, until it can be told"
            ),
            Err(error) => tracing::debug!(%error, "the metadata server still lists memory"),
            Ok(()) => {}
        }
    }

    pub(super) fn publish(&self) -> Result<()> {
        if self.config.is_unpublished {
            return Ok(());
        }
        let deadline = SystemClock.now() + PUBLISH_TIMEOUT;
        self.metadata.publish(&self.template.fill(), &self.rpc, deadline)
    }
}
