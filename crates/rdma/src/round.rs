//! One try of the slices of a transfer: what is in flight and what failed.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_verbs::{Operation, Status};

use crate::{peer_memory::PeerMemory, registration::LocalMemory, slices::Slice};

/// One try of the slices of a transfer. Each is posted once.
#[derive(Debug)]
pub(crate) struct Round {
    pub(crate) operation: Operation,
    pub(crate) slices: Vec<Slice>,
    /// The local registrations of the slices, which live until the last request has ended.
    pub(crate) local: Arc<LocalMemory>,
    pub(crate) remote: Arc<PeerMemory>,
    /// Slices that are posted and have no outcome.
    open: AtomicU32,
    failures: Mutex<Vec<Failure>>,
    is_waiting: AtomicBool,
    waiting: Mutex<()>,
    changed: Condvar,
}

/// A slice that failed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Failure {
    /// Index of the slice in the round.
    pub(crate) slice: u32,
    pub(crate) reason: Reason,
}

/// Why a slice failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The device reported it.
    Status(Status),
    /// The device refused to take the request.
    NotPosted,
    /// The connection was destroyed with the request in flight.
    Abandoned,
}

impl Round {
    pub(crate) fn new(
        operation: Operation,
        slices: Vec<Slice>,
        local: Arc<LocalMemory>,
        remote: Arc<PeerMemory>,
    ) -> Arc<Self> {
        Arc::new(Self {
            operation,
            slices,
            local,
            remote,
            open: AtomicU32::new(0),
            failures: Mutex::default(),
            is_waiting: AtomicBool::new(false),
            waiting: Mutex::default(),
            changed: Condvar::default(),
        })
    }

    /// Records that slices are about to be posted.
    pub(crate) fn begin(&self, count: u32) {
        self.open.fetch_add(count, Ordering::SeqCst);
    }

    /// Records outcomes of slices that were posted.
    pub(crate) fn end(&self, succeeded: u32, failed: impl IntoIterator<Item = Failure>) {
        let mut count = succeeded;
        let mut failed = failed.into_iter().peekable();
        if failed.peek().is_some() {
            let mut failures = self.failures.lock();
            let before = failures.len();
            failures.extend(failed);
            count += u32::try_from(failures.len() - before).expect("at most the slices of a round");
        }
        self.open.fetch_sub(count, Ordering::SeqCst);
        if self.is_waiting.load(Ordering::SeqCst) {
            // The waiter looks at the count with this lock held, or has not begun to wait.
            drop(self.waiting.lock());
            self.changed.notify_all();
        }
    }

    /// Returns the number of slices that are posted and have no outcome.
    pub(crate) fn open(&self) -> u32 {
        self.open.load(Ordering::SeqCst)
    }

    /// Waits until fewer slices than `count` are open, or the time is over.
    pub(crate) fn wait_below(&self, count: u32, timeout: Duration) {
        self.is_waiting.store(true, Ordering::SeqCst);
        let mut waiting = self.waiting.lock();
        if self.open() >= count {
            self.changed.wait_for(&mut waiting, timeout);
        }
        drop(waiting);
        self.is_waiting.store(false, Ordering::SeqCst);
    }

    /// Takes the failures so far.
    pub(crate) fn take_failures(&self) -> Vec<Failure> {
        std::mem::take(&mut self.failures.lock())
    }
}

impl Reason {
    /// Returns whether another path would fail, too.
    pub(crate) fn is_final(self) -> bool {
        matches!(self, Self::Status(status) if status.is_invalid_request())
    }
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Status(status) => status.fmt(f),
            Self::NotPosted => f.write_str("the device refused the request"),
            Self::Abandoned => f.write_str("the connection was given up"),
        }
    }
}
