//! Finding the engine of a segment, and the peers that are open.

use std::sync::{Arc, atomic::Ordering};

use mooncake_base::{Moment, Result};

use super::{Engine, Inner};
use crate::{
    discovery::descriptor::SegmentDescriptor,
    path::peer::{PathContext, PathState, Peer, RefreshReason},
};

impl Engine {
    /// Finds a segment and opens a path to its engine. The same name gives the same peer; the
    /// engine's own name gives the engine itself.
    ///
    /// # Errors
    /// The segment is not known, or its engine cannot be reached on any path.
    pub fn open(&self, segment_name: &str, deadline: Moment) -> Result<Arc<Peer>> {
        let inner = &self.inner;
        inner.check_usable()?;
        let known = inner.peers.read().get(segment_name).cloned();
        let peer = match known {
            Some(peer) if peer.transport().is_some() => {
                peer.touch(inner.openings.fetch_add(1, Ordering::Relaxed));
                return Ok(peer);
            }
            Some(peer) => {
                let version = peer.version();
                let resolve = || inner.resolve(segment_name, deadline);
                if let Err(error) = peer.refresh(version, RefreshReason::Lost, deadline, resolve) {
                    inner.peers.write().remove(segment_name);
                    return Err(error);
                }
                peer
            }
            None => {
                let descriptor = inner.resolve(segment_name, deadline)?;
                Arc::new(Peer::new(segment_name, descriptor, inner.path_context()))
            }
        };
        let context = inner.path_context();
        let is_reached = (0..context.transports.len())
            .any(|index| matches!(peer.path(index, context, deadline), PathState::Open(_)));
        if !is_reached {
            inner.peers.write().remove(segment_name);
            return Err(peer.unreachable());
        }
        inner.devices.find_loaded();
        inner.drop_lost_peers();
        let now = inner.openings.fetch_add(1, Ordering::Relaxed);
        let mut peers = inner.peers.write();
        let peer = Arc::clone(peers.entry(segment_name.to_owned()).or_insert(peer));
        peer.touch(now);
        let evicted = (peers.len() > inner.config.peers_max).then(|| {
            let oldest = peers.values().min_by_key(|peer| peer.last_use())?.name().to_owned();
            peers.remove(&oldest)
        });
        drop(peers);
        if let Some(evicted) = evicted.flatten() {
            inner.evicted.fetch_add(1, Ordering::Relaxed);
            // Other holders of the peer can go on using it; its connections close when the last one
            // drops it.
            drop(evicted);
        }
        Ok(peer)
    }
}

impl Inner {
    pub(super) fn path_context(&self) -> PathContext<'_> {
        PathContext {
            transports: &self.transports,
            metrics: &self.metrics,
            connect_timeout: self.config.connect_timeout,
        }
    }

    /// Drops the paths that are lost, and forgets the peers that have no other. A peer that is opened or
    /// used again is resolved anew.
    pub(super) fn drop_lost_peers(&self) {
        let opened: Vec<_> = self.peers.read().values().cloned().collect();
        let lost: Vec<_> = opened.iter().filter(|peer| peer.drop_dead_paths()).collect();
        if lost.is_empty() {
            return;
        }
        let mut peers = self.peers.write();
        for peer in lost {
            // Another thread may have connected the peer, or opened another engine under the name.
            if peers.get(peer.name()).is_some_and(|known| Arc::ptr_eq(known, peer))
                && peer.transport().is_none()
            {
                peers.remove(peer.name());
            }
        }
    }

    pub(super) fn resolve(&self, name: &str, deadline: Moment) -> Result<SegmentDescriptor> {
        if name == self.template.name {
            return Ok(self.template.fill());
        }
        let found = self.metadata.resolve(name, deadline);
        found.map_err(|error| self.count_refusal(error).with("segment", name))
    }
}
