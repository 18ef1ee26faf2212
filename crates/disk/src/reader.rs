//! Reads of records: all of a batch in flight at the same time, each compared and checked.
//!
//! A batch is cut into [`operation`]s, which wait in a [`queue`] for the [`ring`] of the directory or
//! for one of its [`threads`]. The thread that asked takes their completions, checks them while
//! others are in flight, and copies what could not be read to its place.

mod operation;
mod pending_record;
mod queue;
mod record;
mod ring;
mod threads;

use std::{fmt, io, sync::Arc};

use mooncake_os::{fork, threads::Threads};
pub(crate) use pending_record::Verdict;
pub(crate) use record::RecordRead;

use self::{operation::ReadCounters, queue::Queue};
use crate::{
    error::{Error, Result},
    file_system::File,
};

/// The memory of a directory for reads that cannot go to the memory of the caller, unless an option
/// says otherwise: one slot for each read of a full ring, and some for those that are checked.
pub(crate) const ARENA_BYTES: usize = 64 << 20;

/// How a directory is to be read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ReadMethod {
    /// Through a ring if one can be set up and read through, otherwise by threads.
    #[default]
    Probe,
    /// By threads, each with one read in flight.
    Threads,
    /// Through a ring; a directory is not opened if that is not possible.
    Ring,
}

impl ReadMethod {
    /// Returns the method of a switch that is unset, off or on.
    pub const fn from_switch(switch: Option<bool>) -> Self {
        match switch {
            None => Self::Probe,
            Some(false) => Self::Threads,
            Some(true) => Self::Ring,
        }
    }

    /// Returns a name for metrics: of what reads, once that is chosen.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Probe => "probe",
            Self::Threads => "threads",
            Self::Ring => "io_uring",
        }
    }
}

/// How a directory is read, and why. Its text is for logs and people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChosenReadMethod {
    /// [`ReadMethod::Ring`] or [`ReadMethod::Threads`].
    pub method: ReadMethod,
    /// The reads in flight at the same time.
    pub depth: usize,
    /// Why it is not the other.
    pub why: String,
}

impl fmt::Display for ChosenReadMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { method, depth, why } = self;
        match method {
            ReadMethod::Ring => write!(f, "io_uring with {depth} reads in flight ({why})"),
            _ => write!(f, "{depth} threads ({why})"),
        }
    }
}

/// The ring or the threads of a directory.
#[derive(Debug)]
pub(crate) struct Reader {
    queue: Arc<Queue>,
    threads: Threads,
    counters: Arc<ReadCounters>,
    chosen: ChosenReadMethod,
    /// What direct reads need, which may be less than the unit of the directory.
    direct_alignment: u64,
    fork_generation: u64,
}

impl Reader {
    /// Starts the ring or the threads. The ring is tried out on a file of the directory.
    ///
    /// # Errors
    /// If the ring is asked for and not possible, and if no thread can be started.
    pub(crate) fn start(
        method: ReadMethod,
        threads: usize,
        arena_bytes: usize,
        direct_alignment: u64,
        probe: &Arc<dyn File>,
    ) -> Result<Self> {
        let fork_generation = fork::generation();
        let counters = Arc::new(ReadCounters::default());
        let owned = Threads::new(threads.max(1));
        let ring = || -> io::Result<Arc<Queue>> {
            let queue = Queue::new(arena_bytes, true)?;
            ring::start(&owned, &queue, &counters, probe)?;
            Ok(queue)
        };
        let why_not = match method {
            ReadMethod::Threads => "as the options say".to_owned(),
            ReadMethod::Ring | ReadMethod::Probe => match ring() {
                Ok(queue) => {
                    let why = match method {
                        ReadMethod::Ring => "as the options say",
                        _ => "a probe has read through it",
                    };
                    let (method, depth) = (ReadMethod::Ring, ring::DEPTH);
                    let chosen = ChosenReadMethod { method, depth, why: why.to_owned() };
                    let threads = owned;
                    let reader = Self {
                        queue,
                        threads,
                        counters,
                        chosen,
                        direct_alignment,
                        fork_generation,
                    };
                    return Ok(reader);
                }
                Err(error) if method == ReadMethod::Ring => {
                    return Err(Error::Invalid(format!(
                        "io_uring cannot be used: {error}; {REMEDY}"
                    )));
                }
                Err(error) => format!("io_uring cannot be used: {error}"),
            },
        };
        owned.join();
        let start = || {
            let queue = Queue::new(arena_bytes, false)?;
            let depth = threads::start(&owned, threads.max(1), &queue, &counters)?;
            Ok((queue, depth))
        };
        let (queue, depth) = start().map_err(|error: io::Error| {
            Error::Invalid(format!("no thread can be started: {error}"))
        })?;
        let chosen = ChosenReadMethod { method: ReadMethod::Threads, depth, why: why_not };
        Ok(Self { queue, threads: owned, counters, chosen, direct_alignment, fork_generation })
    }

    /// Reads records; the verdicts are in the order of the reads. Blocks until all are there.
    pub(crate) fn read(&self, reads: &mut [RecordRead<'_>]) -> Vec<Verdict> {
        if self.is_forked() {
            let why = "the process is a fork of the one that has the directory open";
            return reads.iter().map(|_| Verdict::Failed(why.to_owned())).collect();
        }
        record::read_all(&self.queue, self.direct_alignment, reads)
    }

    /// Tells whether this process is a fork of the one that started the reader.
    pub(crate) fn is_forked(&self) -> bool {
        fork::is_forked_since(self.fork_generation)
    }

    pub(crate) const fn direct_alignment(&self) -> u64 {
        self.direct_alignment
    }

    pub(crate) const fn chosen(&self) -> &ChosenReadMethod {
        &self.chosen
    }

    pub(crate) fn events(&self) -> operation::ReadEvents {
        self.counters.snapshot()
    }
}

const REMEDY: &str = "allow io_uring_setup, io_uring_enter and io_uring_register in the seccomp \
    profile of the container and set the sysctl kernel.io_uring_disabled to 0, or unset \
    MOONCAKE_OFFLOAD_USE_URING, which falls back to threads";

impl Drop for Reader {
    fn drop(&mut self) {
        // A forked child has none of the threads, and perhaps a lock that one of them held.
        if !self.is_forked() {
            self.queue.close();
            self.threads.join();
        }
    }
}
