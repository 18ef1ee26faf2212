//! Reads through io_uring: up to [`DEPTH`] of a directory are in flight at the same time.
//!
//! One thread owns the ring. It starts operations of the queue, and gives each back with its memory
//! once its completion is reaped. Until then the operation stays in the table of that thread, so the
//! kernel never writes to memory that somebody else has, whatever becomes of the caller.
#![allow(unsafe_code, reason = "the kernel is told addresses of memory")]

use std::{
    fmt, io,
    os::fd::AsRawFd,
    process, ptr,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use io_uring::{IoUring, cqueue, opcode, squeue, types::Fd};
use libc::iovec;
use mooncake_os::threads::Threads;

use super::{
    operation::{Operation, Progress, ReadCounters},
    queue::{Next, Queue},
};
use crate::file_system::File;

/// The reads in flight.
pub(super) const DEPTH: usize = 128;

/// The entries of the submission queue: a power of two above the reads and the poll of the event.
const ENTRIES: u32 = 256;

/// The mark of the event's poll; reads are marked by their place in the table.
const EVENT: u64 = u64::MAX;

/// Starts the thread of a ring, after it has read from a file through it.
///
/// # Errors
/// If the system refuses a ring, or if it does not work.
pub(super) fn start(
    threads: &Threads,
    queue: &Arc<Queue>,
    counters: &Arc<ReadCounters>,
    probe: &Arc<dyn File>,
) -> io::Result<()> {
    let (send, receive) = mpsc::sync_channel(1);
    let (queue, counters, probe) = (queue.clone(), counters.clone(), probe.clone());
    threads.spawn("disk-ring", move || {
        // In this thread, as the kernel may take requests from one only.
        let ring = open().and_then(|mut ring| try_out(&mut ring, &*probe).map(|()| ring));
        match ring {
            Ok(ring) => {
                let is_started = send.send(Ok(())).is_ok();
                if is_started {
                    Driver::new(ring, queue, counters).run();
                }
            }
            Err(error) => drop(send.send(Err(error))),
        }
    })?;
    receive.recv().map_err(io::Error::other)?
}

/// Sets a ring up.
fn open() -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    // A forked child shall not touch the queues that it would share with its parent.
    builder.dontfork().setup_cqsize(2 * ENTRIES);
    let mut batched = builder.clone();
    batched.setup_single_issuer().setup_coop_taskrun().setup_defer_taskrun();
    let ring = match batched.build(ENTRIES) {
        // A kernel before 6.1, which completes each read by itself.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => builder.build(ENTRIES)?,
        outcome => outcome?,
    };
    // What a file system cannot start without waiting, the kernel gives to workers: without this to
    // four for each processor. Kernels before 5.15 have no such limit to set.
    let _ = ring.submitter().register_iowq_max_workers(&mut [DEPTH as u32, 0]);
    Ok(ring)
}

/// Lets the ring do nothing, and read the first bytes of a file.
fn try_out(ring: &mut IoUring, file: &dyn File) -> io::Result<()> {
    let Some(descriptor) = file.descriptor() else {
        return Err(io::Error::other("the file system has no descriptors"));
    };
    let mut bytes = [0_u8; 8];
    let vector = [iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }];
    let read = opcode::Readv::new(Fd(descriptor.as_raw_fd()), vector.as_ptr(), 1).build();
    for (entry, expected) in [(opcode::Nop::new().build(), 0), (read, bytes.len() as i32)] {
        // SAFETY: the file and the memory outlive the request, since this waits for its completion
        // without a limit: `submit_and_wait` fails before the request is taken, or is repeated.
        unsafe { ring.submission().push(&entry) }.map_err(io::Error::other)?;
        let completion = loop {
            match ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // It was taken; its completion is still to come.
                Err(_) if ring.submission().is_empty() => pause(),
                Err(error) => return Err(error),
            }
            if let Some(completion) = ring.completion().next() {
                break completion;
            }
        };
        match outcome_of(&completion)? {
            count if count as i32 == expected => {}
            count => return Err(io::Error::other(format!("a read gave {count} bytes"))),
        }
    }
    Ok(())
}

/// Waits a moment after the system has refused a request for a reason that passes.
fn pause() {
    thread::park_timeout(Duration::from_millis(1));
}

fn outcome_of(completion: &cqueue::Entry) -> io::Result<usize> {
    usize::try_from(completion.result())
        .map_err(|_| io::Error::from_raw_os_error(-completion.result()))
}

/// The ring and what is in flight. The kernel has the addresses of `vectors` and of the memory of
/// `operations` where those are `Some`.
struct Driver {
    ring: IoUring,
    queue: Arc<Queue>,
    counters: Arc<ReadCounters>,
    operations: Box<[Option<Operation>]>,
    vectors: Box<[[iovec; 2]]>,
    free: Vec<usize>,
    is_event_polled: bool,
}

impl Driver {
    fn new(ring: IoUring, queue: Arc<Queue>, counters: Arc<ReadCounters>) -> Self {
        let none = iovec { iov_base: ptr::null_mut(), iov_len: 0 };
        Self {
            ring,
            queue,
            counters,
            operations: (0..DEPTH).map(|_| None).collect(),
            vectors: (0..DEPTH).map(|_| [none; 2]).collect(),
            free: (0..DEPTH).rev().collect(),
            is_event_polled: false,
        }
    }

    fn run(mut self) {
        let abort = AbortOnPanic;
        let mut completions = Vec::with_capacity(2 * ENTRIES as usize);
        while self.start_operations() {
            self.poll_event();
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The kernel has no memory for a request at the moment. What it did not take stays
                // in the queue; what is in flight completes.
                Err(_) => pause(),
            }
            completions.extend(self.ring.completion());
            for completion in completions.drain(..) {
                self.reap(&completion);
            }
        }
        drop(abort);
    }

    /// Starts what there is a place for; `false` once the queue is closed and nothing is in flight.
    fn start_operations(&mut self) -> bool {
        while let Some(place) = self.free.pop() {
            match self.queue.take() {
                Next::Operation(operation) => {
                    self.operations[place] = Some(operation);
                    self.submit(place);
                }
                Next::Nothing => {
                    self.free.push(place);
                    return true;
                }
                Next::Closed => {
                    self.free.push(place);
                    return self.free.len() < DEPTH;
                }
            }
        }
        true
    }

    /// Submits the rest of an operation of the table.
    fn submit(&mut self, place: usize) {
        let Some(operation) = &mut self.operations[place] else { return };
        let (file, at) = (operation.file(), operation.position());
        let Some(descriptor) = file.descriptor().map(|descriptor| descriptor.as_raw_fd()) else {
            self.finish(place, Err(io::ErrorKind::Unsupported.into()));
            return;
        };
        self.vectors[place] = operation
            .parts()
            .map(|part| iovec { iov_base: part.as_mut_ptr().cast(), iov_len: part.len() });
        let entry = opcode::Readv::new(Fd(descriptor), self.vectors[place].as_ptr(), 2)
            .offset(at)
            .build()
            .user_data(place as u64);
        self.push(&entry);
    }

    /// Asks for a completion when the event of the queue is readable.
    fn poll_event(&mut self) {
        if self.is_event_polled {
            return;
        }
        let Some(event) = self.queue.event().map(|event| event.as_raw_fd()) else { return };
        let entry = opcode::PollAdd::new(Fd(event), libc::POLLIN as u32).build().user_data(EVENT);
        self.push(&entry);
        self.is_event_polled = true;
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the entry names memory and vectors of an operation in the table, which owns its
        // memory and keeps its file open, and which is taken out once its completion is reaped; or
        // the event, which the queue keeps open as long as the ring. The table and the vectors are
        // not dropped while something is in flight: `run` ends when nothing is, and a panic aborts.
        let pushed = unsafe { self.ring.submission().push(entry) };
        pushed.expect("there are more entries than reads in flight");
    }

    fn reap(&mut self, completion: &cqueue::Entry) {
        if completion.user_data() == EVENT {
            if let Some(event) = self.queue.event() {
                // It only wakes: what it counts does not matter.
                let _ = rustix::io::read(event, &mut [0; 8]);
            }
            self.is_event_polled = false;
            return;
        }
        let place = completion.user_data() as usize;
        let Some(operation) = &mut self.operations[place] else { return };
        match operation.advance(outcome_of(completion), &self.counters) {
            Progress::Again => self.submit(place),
            Progress::Done(result) => self.finish(place, result),
        }
    }

    fn finish(&mut self, place: usize, result: io::Result<()>) {
        if let Some(operation) = self.operations[place].take() {
            self.free.push(place);
            operation.complete(result);
        }
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Driver with {} reads in flight", DEPTH - self.free.len())
    }
}

/// Ends the process if the thread of a ring panics: memory of callers would be written to after it
/// was given back, or never be given back.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            process::abort();
        }
    }
}
