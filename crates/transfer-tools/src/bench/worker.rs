//! One thread of the initiator: batch after batch until the time is over.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use mooncake_base::{Clock, Error, Result, SystemClock};
use mooncake_transfer_engine::{Engine, LocalRange, Opcode, Peer, TransferEntry};

use super::{latency::Latencies, options::BenchConfig};

/// How long one batch may take.
const BATCH_PATIENCE: Duration = Duration::from_secs(60);

/// Throughput is shown over slices of the time, not finer than this many.
pub(super) const SLICES: usize = 100;

/// What every thread does.
#[derive(Debug)]
pub(super) struct Plan {
    opcode: Opcode,
    block_bytes: usize,
    batch_size: usize,
    local: u64,
    remote: u64,
    /// How many whole batches the smaller of both memories holds.
    places: usize,
    duration: Duration,
}

/// What one thread did.
#[derive(Debug)]
pub(super) struct Tally {
    pub(super) batches: Latencies,
    /// Bytes that ended in each slice of the time; what ended later counts to the last.
    pub(super) bytes: Vec<u64>,
}

impl Plan {
    /// # Errors
    /// A batch fits into neither memory.
    pub(super) fn new(config: &BenchConfig, local: (u64, u64), remote: (u64, u64)) -> Result<Self> {
        let batch_bytes = config.block_bytes * config.batch_size as u64;
        let places = local.1.min(remote.1).min(config.buffer_bytes) / batch_bytes;
        if places == 0 {
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
            places: places as usize,
            duration: config.duration,
        })
    }

    /// The batch that lies at a place of both memories.
    #[allow(unsafe_code, reason = "a transfer is told addresses")]
    fn pieces(&self, place: usize) -> Vec<TransferEntry> {
        let begin = place % self.places * self.batch_size * self.block_bytes;
        let piece = |index: usize| {
            let offset = (begin + index * self.block_bytes) as u64;
            let at = (self.local + offset) as usize as *mut u8;
            // SAFETY: the caller of the program's workers holds the memory that the plan was made
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
pub(super) fn work(
    engine: &Engine,
    peer: &Peer,
    plan: &Plan,
    number: usize,
    begin: Instant,
    is_failed: &AtomicBool,
) -> Result<Tally> {
    let mut tally = Tally { batches: Latencies::default(), bytes: vec![0; SLICES] };
    let slice = (plan.duration / SLICES as u32).max(Duration::from_nanos(1));
    // Threads begin at places of their own and go on from there.
    let mut place = number;
    loop {
        let mut pieces = plan.pieces(place);
        let start = Instant::now();
        engine.transfer(peer, plan.opcode, &mut pieces, SystemClock.now() + BATCH_PATIENCE);
        let end = Instant::now();
        pieces.into_iter().try_for_each(|piece| piece.outcome.unwrap_or(Ok(())))?;
        tally.batches.record(end - start);
        let slot = (end - begin).as_nanos() / slice.as_nanos();
        let slot = usize::try_from(slot).unwrap_or(usize::MAX).min(SLICES - 1);
        tally.bytes[slot] += (plan.block_bytes * plan.batch_size) as u64;
        place += 1;
        if end - begin >= plan.duration || is_failed.load(Ordering::Relaxed) {
            return Ok(tally);
        }
    }
}
