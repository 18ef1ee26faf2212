//! Asynchronous transfers: batches that run while their caller does something else.
//!
//! A submitted batch waits in a bounded queue for one of a few worker threads. The threads start
//! with the first batch and end after an idle time. A caller that submits to a full queue waits for
//! space. The result of a batch is kept until it is taken; too many results refuse further batches.

use std::{sync::Arc, time::Duration};

use mooncake_base::{Error, Moment, Result};

use super::{BatchId, BatchStatus, Engine};
use crate::{
    discovery::handshake::{self, Notification},
    path::peer::Peer,
    transfer_entry::{Opcode, TransferEntry},
    transport::TransportKind,
};

/// Up to this many bytes, a copy within this host is done before a thread could be woken for it.
const INLINE_BYTES_MAX: usize = 256 << 10;

/// Maximum number of entries of such a batch.
const INLINE_ENTRIES_MAX: usize = 64;

/// Extra time that a waiter allows after the deadline of a batch, for the delays of a busy machine:
/// a transfer ends by its deadline.
const GRACE: Duration = Duration::from_secs(5);

impl Engine {
    /// Queues entries for the worker threads and returns. Their memory belongs to the transfer
    /// until the batch has ended. The caller itself moves a small batch that stays on this host.
    ///
    /// Waits while the queue is full. At most 65536 batches run or have a result that was not taken.
    ///
    /// # Errors
    /// The engine is closed, no thread can be started, the queue was full until the deadline, or
    /// too many results were not taken.
    pub fn submit(
        &self,
        peer: Arc<Peer>,
        opcode: Opcode,
        entries: Vec<TransferEntry>,
        deadline: Moment,
    ) -> Result<BatchId> {
        self.submit_hinted(peer, opcode, entries, deadline, None)
    }

    /// Like [`Engine::submit`], but tries the transport named by the caller first, if there is a
    /// path over it.
    ///
    /// # Errors
    /// Those of [`Engine::submit`].
    pub fn submit_hinted(
        &self,
        peer: Arc<Peer>,
        opcode: Opcode,
        mut entries: Vec<TransferEntry>,
        deadline: Moment,
        hint: Option<TransportKind>,
    ) -> Result<BatchId> {
        self.inner.check_usable()?;
        let leaves = matches!(hint, Some(TransportKind::Tcp | TransportKind::Rdma));
        if !leaves && is_small(&peer, &entries) {
            let batch = self.inner.workers.insert(deadline)?;
            self.transfer_hinted(&peer, opcode, &mut entries, deadline, hint);
            self.inner.workers.complete(batch, BatchStatus::of(&entries, deadline));
            return Ok(batch);
        }
        // Weak, so that a queued batch keeps no engine open.
        let engine = Arc::downgrade(&self.inner);
        self.inner.workers.submit(deadline, move || {
            let Some(inner) = engine.upgrade() else {
                return BatchStatus::Failed(Error::closed("the engine is closed"));
            };
            Self { inner }.transfer_hinted(&peer, opcode, &mut entries, deadline, hint);
            BatchStatus::of(&entries, deadline)
        })
    }

    /// Returns the status of a batch. A final status is returned once and then dropped.
    ///
    /// # Errors
    /// There is no such batch, or its final status was taken already.
    pub fn status(&self, batch: BatchId) -> Result<BatchStatus> {
        self.inner.check_usable()?;
        self.inner.workers.take_status(batch)
    }

    /// Waits until each of the batches has ended, and takes their results.
    ///
    /// An unknown batch, or one that did not end although its deadline passed, counts as failed.
    ///
    /// # Errors
    /// The engine is closed.
    pub fn wait(&self, batches: &[BatchId]) -> Result<Vec<BatchStatus>> {
        self.inner.check_usable()?;
        let wait = |batch: &BatchId| {
            self.inner.workers.wait(*batch, GRACE).unwrap_or_else(BatchStatus::Failed)
        };
        Ok(batches.iter().map(wait).collect())
    }

    /// Checks whether a notification is short enough to be sent, so that a caller learns that before it
    /// moves bytes that the notification announces. The owner is assumed to have the limit of this engine.
    ///
    /// # Errors
    /// The notification is too long.
    pub fn check_notification(&self, notification: &Notification) -> Result<()> {
        let config = &self.inner.config;
        let length = handshake::notification_length(notification, config.token.is_some());
        if length <= config.handshake_bytes_max {
            return Ok(());
        }
        let text = "the notification is too long; raise MC_HANDSHAKE_MAX_LENGTH on both sides";
        Err(Error::invalid(text)
            .with("length", length)
            .with("length_max", config.handshake_bytes_max))
    }

    /// Sends a notification to the owner of a segment, and waits until it is delivered.
    ///
    /// # Errors
    /// The notification is too long, the segment is unknown, or its owner cannot be reached or has
    /// too many notifications queued.
    pub fn notify(
        &self,
        segment_name: &str,
        notification: &Notification,
        deadline: Moment,
    ) -> Result<()> {
        self.inner.check_usable()?;
        self.check_notification(notification)?;
        let endpoint = self.inner.metadata.locate(segment_name, deadline)?;
        handshake::notify(&endpoint, notification, self.inner.config.token.as_ref(), deadline)
            .map_err(|error| self.inner.count_refusal(error).with("segment", segment_name))
    }

    /// Checks whether the owner of a segment is alive.
    ///
    /// # Errors
    /// The segment is unknown ([`mooncake_base::ErrorKind::NotFound`]), or there is no answer.
    pub fn probe(&self, segment_name: &str, deadline: Moment) -> Result<()> {
        self.inner.check_usable()?;
        let endpoint = self.inner.metadata.locate(segment_name, deadline)?;
        handshake::probe(&endpoint, deadline).map_err(|error| error.with("segment", segment_name))
    }
}

fn is_small(peer: &Peer, entries: &[TransferEntry]) -> bool {
    let stays = matches!(peer.transport(), Some(TransportKind::Memory | TransportKind::Shm));
    let bytes =
        || entries.iter().fold(0, |sum: usize, entry| sum.saturating_add(entry.local.length()));
    entries.is_empty()
        || stays && entries.len() <= INLINE_ENTRIES_MAX && bytes() <= INLINE_BYTES_MAX
}
