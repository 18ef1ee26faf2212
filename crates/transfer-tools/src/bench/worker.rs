//! A thread of the initiator, which moves batch after batch until the time is over.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use mooncake_base::{Clock, Error, Result, SystemClock};
use mooncake_transfer_engine::{Engine, LocalRange, Opcode, Peer, TransferEntry};

use super::{latency::Latencies, options::BenchConfig};

/// The timeout of a batch.
const BATCH_TIMEOUT: Duration = Duration::from_secs(60);

/// The number of intervals of the run for which the throughput is reported.
pub(super) const INTERVALS: usize = 100;

/// The work of every thread.
#[derive(Debug)]
pub(super) struct Workload {
    opcode: Opcode,
    block_bytes: usize,
    batch_size: usize,
    local: u64,
    remote: u64,
    /// The number of whole batches that fit into the smaller of both memories.
    slots: usize,
    duration: Duration,
}

/// The result of one thread.
#[derive(Debug)]
pub(super) struct WorkerResult {
    pub(super) batches: Latencies,
    /// Bytes of batches that ended in each interval; batches that end later count to the last one.
    pub(super) bytes: Vec<u64>,
}

impl Workload {
    /// Creates the workload for a local and a remote memory, each given as address and length.
    ///
    /// # Errors
    /// A batch does not fit into one of the memories.
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

    /// Returns the batch at a slot of both memories.
    #[allow(unsafe_code, reason = "transfers are given by addresses")]
    fn entries(&self, slot: usize) -> Vec<TransferEntry> {
        let begin = slot % self.slots * self.batch_size * self.block_bytes;
        let entry = |index: usize| {
            let offset = (begin + index * self.block_bytes) as u64;
            let at = (self.local + offset) as usize as *mut u8;
            // SAFETY: the caller of the workers keeps the memory of the workload until all of them
            // have ended, and creates no reference into it.
            let local = unsafe { LocalRange::held(at, self.block_bytes) };
            TransferEntry::new(local, self.remote + offset)
        };
        (0..self.batch_size).map(entry).collect()
    }
}

/// Moves batches until the time is over or another thread has failed.
///
/// # Errors
/// An entry failed.
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
    // Each thread starts at its own slot and proceeds to the next ones.
    let mut slot = number;
    loop {
        let mut entries = workload.entries(slot);
        let start = Instant::now();
        engine.transfer(peer, workload.opcode, &mut entries, SystemClock.now() + BATCH_TIMEOUT);
        let end = Instant::now();
        entries.into_iter().try_for_each(|entry| entry.outcome.unwrap_or(Ok(())))?;
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
