//! What a device has moved, and how its requests failed.

use mooncake_base::{DeviceCounters, DeviceUsage, counter::Counter};
use mooncake_verbs::Operation;

use crate::round::Reason;

/// The counters of a device.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    moved: DeviceCounters,
    errors: [Counter; Reason::LABELS.len()],
}

impl Counters {
    pub(crate) fn count_moved(&self, operation: Operation, slices: u32, bytes: u64) {
        let sum = match operation {
            Operation::Read => &self.moved.bytes_read,
            Operation::Write => &self.moved.bytes_written,
        };
        sum.add(bytes);
        self.moved.slices.add(slices.into());
    }

    pub(crate) fn count_failed(&self, reason: Reason, slices: u32) {
        self.errors[reason.index()].add(slices.into());
    }

    pub(crate) fn count_link_failure(&self) {
        self.moved.link_failures.increment();
    }

    /// Returns the counts, as the use of a device of which nothing else is known.
    pub(crate) fn usage(&self, name: &str) -> DeviceUsage {
        let errors = Reason::LABELS.into_iter().zip(&self.errors);
        DeviceUsage {
            name: name.to_owned(),
            errors: errors.map(|(label, sum)| (label, sum.get())).collect(),
            ..self.moved.snapshot()
        }
    }
}
