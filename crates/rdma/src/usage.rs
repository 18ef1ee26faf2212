//! What a device has moved, and how its requests failed.

use std::sync::atomic::{AtomicU64, Ordering};

use mooncake_base::DeviceUsage;
use mooncake_verbs::Operation;

use crate::round::Reason;

/// The counters of a device.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
    slices: AtomicU64,
    errors: [AtomicU64; Reason::LABELS.len()],
    link_failures: AtomicU64,
}

impl Counters {
    pub(crate) fn count_moved(&self, operation: Operation, slices: u32, bytes: u64) {
        let sum = match operation {
            Operation::Read => &self.bytes_read,
            Operation::Write => &self.bytes_written,
        };
        sum.fetch_add(bytes, Ordering::Relaxed);
        self.slices.fetch_add(slices.into(), Ordering::Relaxed);
    }

    pub(crate) fn count_failed(&self, reason: Reason, slices: u32) {
        self.errors[reason.index()].fetch_add(slices.into(), Ordering::Relaxed);
    }

    pub(crate) fn count_link_failure(&self) {
        self.link_failures.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the counts, as the use of a device of which nothing else is known.
    pub(crate) fn usage(&self, name: &str) -> DeviceUsage {
        let read = |sum: &AtomicU64| sum.load(Ordering::Relaxed);
        let errors = Reason::LABELS.into_iter().zip(&self.errors);
        DeviceUsage {
            name: name.to_owned(),
            bytes_read: read(&self.bytes_read),
            bytes_written: read(&self.bytes_written),
            slices: read(&self.slices),
            errors: errors.map(|(label, sum)| (label, read(sum))).collect(),
            link_failures: read(&self.link_failures),
            ..DeviceUsage::default()
        }
    }
}
