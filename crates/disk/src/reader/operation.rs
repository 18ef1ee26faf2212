//! One read of a file: what it fills, how far it is, and what follows a part of it.

use std::{collections::VecDeque, io, sync::Arc, time::Duration};

use mooncake_base::{
    counters,
    sync::{Condvar, Mutex},
};

use crate::{
    extent::Extent,
    file_system::File,
    memory::{ArenaSlot, LentRange},
};

/// How often the system may put a read off before that is an error.
const TRIES_MAX: u32 = 1000;

counters! {
    /// Counts what happens to reads of a directory.
    pub(crate) struct ReadCounters;
    /// What happened to reads since the directory was opened.
    #[derive(Copy)]
    pub(crate) struct ReadEvents {}
    METRICS {
        /// Reads past the page cache that the system refused for their alignment.
        direct_refused,
        /// Reads that gave a part of what was asked for, and were continued.
        continued,
    }
}

/// A read that fills a slot of the arena and then a lent range. The thread that reads, or that of the
/// ring, owns it.
#[derive(Debug)]
pub(crate) struct Operation {
    /// Who waits for it.
    pub(crate) call: Arc<Call>,
    /// Which of the operations of the call it is.
    pub(crate) number: usize,
    pub(crate) extent: Arc<Extent>,
    pub(crate) offset: u64,
    /// The first bytes, which go to the slot.
    pub(crate) slot_bytes: usize,
    /// Given before the operation starts if `slot_bytes` is not 0.
    pub(crate) slot: Option<ArenaSlot>,
    pub(crate) lent: Option<LentRange>,
    /// What addresses, offsets and lengths of reads past the page cache are multiples of; `None` if
    /// the read goes through the cache.
    pub(crate) direct_alignment: Option<u64>,
    pub(crate) done: usize,
    pub(crate) tries: u32,
}

/// What follows a part of an operation.
#[derive(Debug)]
pub(crate) enum Progress {
    /// The operation has to be started again, for the rest.
    Again,
    /// The operation is over.
    Done(io::Result<()>),
}

impl Operation {
    /// Returns the file to read next.
    pub(crate) fn file(&self) -> Arc<dyn File> {
        match &self.extent.direct {
            Some(direct) if self.direct_alignment.is_some() => direct.clone(),
            _ => self.extent.file.clone(),
        }
    }

    /// Returns where to read next.
    pub(crate) const fn position(&self) -> u64 {
        self.offset + self.done as u64
    }

    /// Returns the memory to read into next.
    pub(crate) fn parts(&mut self) -> [&mut [u8]; 2] {
        let of_slot = self.done.min(self.slot_bytes);
        let of_lent = self.done - of_slot;
        let slot = self.slot.as_mut().map(|slot| &mut slot.bytes()[of_slot..self.slot_bytes]);
        let lent = self.lent.as_mut().map(|lent| &mut lent.bytes()[of_lent..]);
        [slot.unwrap_or_default(), lent.unwrap_or_default()]
    }

    /// Counts what a read gave.
    pub(crate) fn advance(
        &mut self,
        outcome: io::Result<usize>,
        counters: &ReadCounters,
    ) -> Progress {
        let bytes = self.slot_bytes + self.lent.as_ref().map_or(0, LentRange::len);
        match outcome {
            Ok(0) if self.done < bytes => Progress::Done(Err(io::ErrorKind::UnexpectedEof.into())),
            Ok(count) => {
                self.done += count;
                if self.done >= bytes {
                    return Progress::Done(Ok(()));
                }
                counters.continued.increment();
                // The rest of it may lie anywhere, which only the page cache allows.
                let is_aligned = |alignment: &u64| (self.done as u64).is_multiple_of(*alignment);
                self.direct_alignment = self.direct_alignment.filter(is_aligned);
                Progress::Again
            }
            Err(error) if is_put_off(&error) && self.tries < TRIES_MAX => {
                self.tries += 1;
                Progress::Again
            }
            Err(error) if self.direct_alignment.take().is_some() => {
                if error.kind() == io::ErrorKind::InvalidInput {
                    counters.direct_refused.increment();
                }
                // Refused for its alignment, or failed: the page cache tells which.
                Progress::Again
            }
            Err(error) => Progress::Done(Err(error)),
        }
    }

    /// Gives the memory back to the call.
    pub(crate) fn complete(self, result: io::Result<()>) {
        let Self { call, number, slot, lent, .. } = self;
        call.deliver(Completion { number, slot, lent, result });
    }
}

fn is_put_off(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

/// An operation that is over, with its memory.
#[derive(Debug)]
pub(crate) struct Completion {
    pub(crate) number: usize,
    pub(crate) slot: Option<ArenaSlot>,
    pub(crate) lent: Option<LentRange>,
    pub(crate) result: io::Result<()>,
}

/// Where the completions of a batch arrive.
#[derive(Debug, Default)]
pub(crate) struct Call {
    inbox: Mutex<Inbox>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct Inbox {
    completions: VecDeque<Completion>,
    is_waited_for: bool,
}

impl Call {
    fn deliver(&self, completion: Completion) {
        let mut inbox = self.inbox.lock();
        inbox.completions.push_back(completion);
        if std::mem::take(&mut inbox.is_waited_for) {
            drop(inbox);
            self.arrived.notify_one();
        }
    }

    /// Waits for completions, and takes all that are there.
    pub(crate) fn wait(&self) -> VecDeque<Completion> {
        let mut inbox = self.inbox.lock();
        while inbox.completions.is_empty() {
            inbox.is_waited_for = true;
            // Each operation completes, if late: its memory is in use until then.
            self.arrived.wait_for(&mut inbox, Duration::from_secs(1));
        }
        std::mem::take(&mut inbox.completions)
    }
}
