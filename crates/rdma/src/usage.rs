//! What a device has moved, and how its requests failed.

use std::sync::atomic::{AtomicU64, Ordering};

use mooncake_verbs::Operation;

use crate::round::Reason;

/// The use of a device at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceUsage {
    /// Name of the device.
    pub name: String,
    /// The link is up.
    pub is_active: bool,
    /// Bytes read from peers.
    pub bytes_read: u64,
    /// Bytes written to peers.
    pub bytes_written: u64,
    /// Slices that were moved.
    pub slices: u64,
    /// Slices that failed on this device, by reason. A slice that fails is tried again.
    pub errors: Vec<(&'static str, u64)>,
    /// Times that the device was given up, because its link went down or it failed.
    pub link_failures: u64,
    /// Requests in flight.
    pub in_flight: u32,
    /// Maximum number of requests in flight.
    pub in_flight_max: u32,
    /// Connected queue pairs.
    pub queue_pairs: usize,
}

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
            is_active: false,
            bytes_read: read(&self.bytes_read),
            bytes_written: read(&self.bytes_written),
            slices: read(&self.slices),
            errors: errors.map(|(label, sum)| (label, read(sum))).collect(),
            link_failures: read(&self.link_failures),
            in_flight: 0,
            in_flight_max: 0,
            queue_pairs: 0,
        }
    }
}
