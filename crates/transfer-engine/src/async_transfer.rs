//! Transfers that go on while their caller does something else.
//!
//! A submitted batch waits in a bounded queue for one of a few mover threads, which start when the
//! first batch comes and end when none has come for a while. Who submits to a full queue waits for
//! room. The answer of a batch is kept until somebody takes it.

mod completion_table;
mod worker_pool;

use std::{fmt, sync::Arc, time::Duration};

use mooncake_base::{Clock, Error, ErrorCode, Moment, Result, SystemClock};

use self::worker_pool::Job;
pub(crate) use self::worker_pool::WorkerPool;
use crate::{
    Engine, Peer,
    handshake::{self, Notification},
    transfer_entry::{Opcode, TransferEntry},
    transport::TransportKind,
};

/// Up to so many bytes, a copy within this host is done before a thread could be woken for it.
const INLINE_BYTES_MAX: usize = 256 << 10;

/// Up to so many entries too.
const INLINE_ENTRIES_MAX: usize = 64;

/// How long after its deadline a batch is still waited for: a transfer ends by its deadline, give
/// or take what a busy machine needs.
const GRACE: Duration = Duration::from_secs(5);

/// Names a submitted batch. Never given out twice by one engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BatchId(u64);

impl BatchId {
    /// The batch of that number, for numbers that come back from a caller.
    pub const fn from_number(number: u64) -> Self {
        Self(number)
    }

    /// Its number; at least 1.
    pub const fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Display for BatchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How far a submitted batch is.
#[derive(Debug, Clone)]
pub enum BatchStatus {
    /// It waits or is being moved.
    Running,
    /// Every byte is where it belongs.
    Done,
    /// A entry failed; this is the first failure. Other entries may have been moved.
    Failed(Error),
    /// The deadline passed before everything was moved.
    TimedOut(Error),
}

impl BatchStatus {
    /// Whether it will not change any more.
    pub const fn has_ended(&self) -> bool {
        !matches!(self, Self::Running)
    }

    fn of(entries: &[TransferEntry], deadline: Moment) -> Self {
        let failed = |entry: &TransferEntry| match &entry.outcome {
            Some(Ok(())) => None,
            Some(Err(error)) => Some(error.clone()),
            None => Some(Error::internal("an entry was left without an outcome")),
        };
        match entries.iter().find_map(failed) {
            None => Self::Done,
            Some(error) if deadline.has_passed(SystemClock.now()) => Self::TimedOut(error),
            Some(error) => Self::Failed(error),
        }
    }
}

impl Engine {
    /// Has entries moved while the caller goes on. Their memory belongs to the transfer until the
    /// batch has ended. A small batch that stays on this host is moved at once, by the caller.
    ///
    /// Waits while the queue is full. Keeps the answers of the last 65536 batches that ended and
    /// that nobody asked for.
    ///
    /// # Errors
    /// The engine is closed, no thread is to be had, or the queue was full until the deadline.
    pub fn submit(
        &self,
        peer: Arc<Peer>,
        opcode: Opcode,
        entries: Vec<TransferEntry>,
        deadline: Moment,
    ) -> Result<BatchId> {
        self.submit_hinted(peer, opcode, entries, deadline, None)
    }

    /// Like [`Engine::submit`], trying the way that the caller names before all others, if there is
    /// a path over it.
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
        self.check_usable()?;
        let leaves = matches!(hint, Some(TransportKind::Tcp | TransportKind::Rdma));
        if !leaves && is_small(&peer, &entries) {
            self.transfer_hinted(&peer, opcode, &mut entries, deadline, hint);
            return Ok(self.workers().insert_completed(BatchStatus::of(&entries, deadline)));
        }
        self.workers().submit(self, Job { peer, opcode, entries, deadline, hint })
    }

    /// How far a batch is. Once it has ended the answer is given out and forgotten.
    ///
    /// # Errors
    /// There is no such batch, or its answer was given out.
    pub fn status(&self, batch: BatchId) -> Result<BatchStatus> {
        self.check_usable()?;
        self.workers().take_status(batch)
    }

    /// Waits until each of the batches has ended, and gives out their answers.
    ///
    /// An unknown batch, or one that did not end although its deadline passed, has failed.
    ///
    /// # Errors
    /// The engine is closed.
    pub fn wait(&self, batches: &[BatchId]) -> Result<Vec<BatchStatus>> {
        self.check_usable()?;
        let wait = |batch: &BatchId| {
            self.workers().wait(*batch, GRACE).unwrap_or_else(BatchStatus::Failed)
        };
        Ok(batches.iter().map(wait).collect())
    }

    /// Tells the owner of a segment something, and waits until it has it.
    ///
    /// # Errors
    /// The segment is unknown, its owner cannot be reached, or keeps too many already.
    pub fn notify(
        &self,
        segment_name: &str,
        notification: &Notification,
        deadline: Moment,
    ) -> Result<()> {
        self.check_usable()?;
        let endpoint = self.metadata().locate(segment_name, deadline)?;
        handshake::notify(&endpoint, notification, self.token(), deadline)
            .map_err(|error| self.count_refusal(error).with("segment", segment_name))
    }

    /// Asks whether the owner of a segment is there.
    ///
    /// # Errors
    /// The segment is unknown ([`mooncake_base::ErrorKind::NotFound`]), or nobody answers.
    pub fn probe(&self, segment_name: &str, deadline: Moment) -> Result<()> {
        self.check_usable()?;
        let endpoint = self.metadata().locate(segment_name, deadline)?;
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

fn unknown(batch: BatchId) -> Error {
    Error::new(
        ErrorCode::TASK_NOT_FOUND,
        "no such batch was submitted, or its end was told already",
    )
    .with("batch", batch)
}
