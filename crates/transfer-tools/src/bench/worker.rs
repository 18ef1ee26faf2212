//! One thread of the initiator: batch after batch until the time is over.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use mooncake_base::{Clock, Error, Result, SystemClock};
use mooncake_transfer_engine::{Engine, LocalRange, Opcode, Peer, TransferEntry};

use super::{latency::Latencies, options::BenchConfig};

/// How long one batch may take.
const BATCH_TIMEOUT: Duration = Duration::from_secs(60);

/// Throughput is shown over slices of the time, not finer than this many.
pub(super) const INTERVALS: usize = 100;

/// What every thread does.
#[derive(Debug)]
pub(super) struct Workload {
    opcode: Opcode,
    block_bytes: usize,
    batch_size: usize,
    local: u64,
    remote: u64,
    /// How many whole batches the smaller of both memories holds.
    slots: usize,
    duration: Duration,
}

/// What one thread did.
#[derive(Debug)]
pub(super) struct WorkerResult {
    pub(super) batches: Latencies,
    /// Bytes that ended in each interval_length of the time; what ended later counts to the last.
    pub(super) bytes: Vec<u64>,
}

impl Workload {
    /// # Errors
    /// A batch fits into neither memory.
    pub(super) fn new(config: &BenchConfig, local: (u64, u64), remote: (u64, u64)) -> Result<Self> {
        let batch_bytes = config.block_bytes * config.batch_size as u64;
        let slots = local.1.min(remote.1).min(config.buffer_bytes) / batch_bytes;
        if slots == 0 {
            return Err(Error::invalid("a batch does not fit into the target's memory")
                .with("batch_bytes", batch_bytes)
                .with("target_bytes", remote.1));
        }
        Ok(Self {
            opcode: if config.is_writing { Opcode::Write } else { Opcode::Read },
            block_bytes: config.block_bytes as usize,
            batch_size: config.batch_size,
            local: local.0,
            remote: remote.0,
            slots: slots as usize,
            duration: config.duration,
        })
    }

    /// The batch that lies at a slot of both memories.
    #[allow(unsafe_code, reason = "a transfer is told addresses")]
    fn pieces(&self, slot: usize) -> Vec<Piece> {
        let begin = slot % self.slots * self.batch_size * self.block_bytes;
        let piece = |index: usize| {
            let offset = (begin + index * self.block_bytes) as u64;
            let at = (self.local + offset) as usize as *mut u8;
            // SAFETY: the caller of the program's workers holds the memory that the workload was made
            // for until all of them have ended, and makes no reference into it.
            let local = unsafe { LocalRange::held(at, self.block_bytes) };
            TransferEntry::new(local, self.remote + offset)
        };
        (0..self.batch_size).map(piece).collect()
    }
}

/// Moves batches until the time is over or another thread has failed.
///
/// # Errors
/// A piece failed.
pub(super) fn run(
    engine: &Engine,
    peer: &Peer,
    workload: &Workload,
    number: usize,
    begin: Instant,
    is_failed: &AtomicBool,
) -> Result<WorkerResult> {
    let mut result = WorkerResult { batches: Latencies::default(), bytes: vec![0; INTERVALS] };
    let interval_length = (workload.duration / INTERVALS as u32).max(Duration::from_nanos(1));
    // Threads begin at slots of their own and go on from there.
    let mut slot = number;
    loop {
        let mut pieces = workload.pieces(slot);
        let start = Instant::now();
        engine.transfer(peer, workload.opcode, &mut pieces, SystemClock.now() + BATCH_TIMEOUT);
        let end = Instant::now();
        pieces.into_iter().try_for_each(|piece| piece.outcome.unwrap_or(Ok(())))?;
        result.batches.record(end - start);
        let interval = (end - begin).as_nanos() / interval_length.as_nanos();
        let interval = usize::try_from(interval).unwrap_or(usize::MAX).min(INTERVALS - 1);
        result.bytes[interval] += (workload.block_bytes * workload.batch_size) as u64;
        slot += 1;
        if end - begin >= workload.duration || is_failed.load(Ordering::Relaxed) {
            return Ok(result);
        }
    }
}
