//! Reads by threads, where there is no ring: each has one read in flight.

use std::{
    io::{self, IoSliceMut},
    sync::Arc,
};

use mooncake_os::threads::Threads;

use super::{
    operation::{Operation, Progress, ReadCounters},
    queue::Queue,
};

/// Starts threads that read until the queue is closed; returns how many there are.
///
/// # Errors
/// If not even one can be started.
pub(super) fn start(
    threads: &Threads,
    count: usize,
    queue: &Arc<Queue>,
    counters: &Arc<ReadCounters>,
) -> io::Result<usize> {
    for started in 0..count {
        let (queue, counters) = (queue.clone(), counters.clone());
        let run = move || {
            while let Some(operation) = queue.wait() {
                read(operation, &counters);
            }
        };
        match threads.spawn("disk-read", run) {
            Ok(()) => {}
            Err(error) if started == 0 => return Err(error),
            Err(_) => return Ok(started),
        }
    }
    Ok(count)
}

fn read(mut operation: Operation, counters: &ReadCounters) {
    let result = loop {
        let (file, at) = (operation.file(), operation.position());
        let outcome = file.read_at(&mut operation.parts().map(IoSliceMut::new), at);
        if let Progress::Done(result) = operation.advance(outcome, counters) {
            break result;
        }
    };
    operation.complete(result);
}
