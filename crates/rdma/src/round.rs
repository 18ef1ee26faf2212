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

use crate::{peer_memory::PeerMemory, registration::local_memory::LocalMemory, slices::Slice};

/// One try of slices of a transfer. Each is posted once.
#[derive(Debug)]
pub(crate) struct Round {
    pub(crate) operation: Operation,
    pub(crate) slices: Vec<Slice>,
    /// The local registrations of the slices, which live until the last request has ended.
    pub(crate) local: Arc<LocalMemory>,
    pub(crate) remote: Arc<PeerMemory>,
    pub(crate) progress: Arc<Progress>,
}

/// What is in flight of all rounds of a transfer, and what has failed.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Slices that are posted and have no outcome.
    open: AtomicU32,
    has_failures: AtomicBool,
    failures: Mutex<Vec<Failure>>,
    is_waiting: AtomicBool,
    waiting: Mutex<()>,
    changed: Condvar,
}

/// A slice that failed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Failure {
    pub(crate) slice: Slice,
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
    /// Another transfer ran out of time, whose requests could only be ended with the connection.
    Interrupted,
}

impl Round {
    /// Records outcomes of slices that were posted: how many succeeded, and which failed, by index.
    pub(crate) fn end(&self, succeeded: u32, failed: std::ops::Range<u32>, reason: Reason) {
        let failed = &self.slices[failed.start as usize..failed.end as usize];
        self.progress.end(succeeded, failed, reason);
    }
}

impl Progress {
    /// Records that slices are about to be posted.
    pub(crate) fn begin(&self, count: u32) {
        self.open.fetch_add(count, Ordering::SeqCst);
    }

    fn end(&self, succeeded: u32, failed: &[Slice], reason: Reason) {
        let mut count = succeeded;
        if !failed.is_empty() {
            let failures = failed.iter().map(|slice| Failure { slice: *slice, reason });
            self.failures.lock().extend(failures);
            self.has_failures.store(true, Ordering::SeqCst);
            count += u32::try_from(failed.len()).expect("at most the slices of a round");
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

    pub(crate) fn has_failures(&self) -> bool {
        self.has_failures.load(Ordering::SeqCst)
    }

    /// Waits until fewer slices than `count` are open, or the time is over.
    pub(crate) fn wait_below(&self, count: u32, timeout: Duration) {
        self.wait(timeout, || self.open() < count);
    }

    /// Waits until no slice is open, one has failed, or the time is over.
    pub(crate) fn wait_for_end(&self, timeout: Duration) {
        self.wait(timeout, || self.open() == 0 || self.has_failures());
    }

    fn wait(&self, timeout: Duration, is_over: impl Fn() -> bool) {
        self.is_waiting.store(true, Ordering::SeqCst);
        let mut waiting = self.waiting.lock();
        // Woken for each outcome; the time is short.
        if !is_over() {
            self.changed.wait_for(&mut waiting, timeout);
        }
        drop(waiting);
        self.is_waiting.store(false, Ordering::SeqCst);
    }

    /// Takes the failures so far.
    pub(crate) fn take_failures(&self) -> Vec<Failure> {
        let mut failures = self.failures.lock();
        self.has_failures.store(false, Ordering::SeqCst);
        std::mem::take(&mut failures)
    }
}

impl Reason {
    /// The names of the reasons in metrics.
    pub(crate) const LABELS: [&'static str; 13] = [
        "flushed",
        "no_answer",
        "receiver_not_ready",
        "remote_access",
        "remote_invalid_request",
        "remote_operation",
        "local_protection",
        "local_length",
        "local_failure",
        "other",
        "not_posted",
        "abandoned",
        "interrupted",
    ];

    /// Returns the index of the name of the reason.
    pub(crate) fn index(self) -> usize {
        match self {
            Self::Status(Status::Flushed) => 0,
            Self::Status(Status::NoAnswer) => 1,
            Self::Status(Status::ReceiverNotReady) => 2,
            Self::Status(Status::RemoteAccess) => 3,
            Self::Status(Status::RemoteInvalidRequest) => 4,
            Self::Status(Status::RemoteOperation) => 5,
            Self::Status(Status::LocalProtection) => 6,
            Self::Status(Status::LocalLength) => 7,
            Self::Status(Status::LocalFailure) => 8,
            Self::Status(Status::Success | Status::Other(_)) => 9,
            Self::NotPosted => 10,
            Self::Abandoned => 11,
            Self::Interrupted => 12,
        }
    }

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
            Self::Interrupted => {
                f.write_str("another transfer over the connection ran out of time")
            }
        }
    }
}
