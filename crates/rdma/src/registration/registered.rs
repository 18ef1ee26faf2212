//! One range that is registered with all devices.

use std::{
    fmt,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use mooncake_base::{
    Error, Result,
    sync::{Condvar, Mutex},
};
use mooncake_verbs::{MemoryRegion, ProtectionDomain};

use super::rule::RegistrationRule;
use crate::{near_devices::NearDevices, slices::MemoryRange};

/// A registered range.
pub(super) struct Registered {
    length: u64,
    /// The devices that are near the memory.
    pub(super) near: NearDevices,
    /// Neighbouring parts, each as long as a device allows.
    pub(super) parts: Vec<RegisteredPart>,
    pub(super) ended: Arc<EndedFlag>,
}

pub(super) struct RegisteredPart {
    pub(super) range: MemoryRange,
    /// One registration per device, in the order of devices.
    pub(super) regions: Vec<MemoryRegion>,
}

/// Tells that a range has no registration any more.
#[derive(Debug, Default)]
pub(super) struct EndedFlag {
    is_ended: Mutex<bool>,
    changed: Condvar,
}

impl Registered {
    /// Registers a range with all devices side by side, the parts of a long range in turn.
    ///
    /// # Errors
    /// A device refused; the message names it and says why. Nothing is registered then.
    ///
    /// # Safety
    /// Those of [`MemoryRegion::register`], while the value lives.
    pub(super) unsafe fn new(
        domains: &[Arc<ProtectionDomain>],
        (base, length): (u64, u64),
        rule: RegistrationRule<'_>,
    ) -> Result<Self> {
        let parts = split(base, length, rule.bytes_max);
        let register = |part: MemoryRange, domain: &Arc<ProtectionDomain>| {
            // SAFETY: by the contract of the function.
            unsafe { rule.register(domain, base, part) }
        };
        // One thread per further device: registering pins pages, which takes long.
        let columns = thread::scope(|scope| {
            let mut rows = Vec::new();
            for part in &parts {
                let others: Vec<_> = domains
                    .iter()
                    .skip(1)
                    .map(|domain| scope.spawn(move || register(*part, domain)))
                    .collect();
                let first = domains.iter().take(1).map(|domain| register(*part, domain));
                let first: Vec<_> = first.collect();
                let others = others.into_iter().map(|thread| {
                    let panicked = |_| Err(Error::internal("a registration panicked"));
                    thread.join().unwrap_or_else(panicked)
                });
                rows.push(first.into_iter().chain(others).collect::<Result<Vec<_>>>());
            }
            rows
        });
        let parts: Result<Vec<_>> = parts
            .into_iter()
            .zip(columns)
            .map(|(range, regions)| Ok(RegisteredPart { range, regions: regions? }))
            .collect();
        Ok(Self { length, near: NearDevices::ALL, parts: parts?, ended: Arc::default() })
    }
}

impl EndedFlag {
    /// Waits until the range has no registration. Returns whether it has none.
    pub(super) fn wait(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut is_ended = self.is_ended.lock();
        while !*is_ended {
            if self.changed.wait_until(&mut is_ended, deadline).timed_out() {
                return *is_ended;
            }
        }
        true
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.parts.clear();
        *self.ended.is_ended.lock() = true;
        self.ended.changed.notify_all();
    }
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registered")
            .field("length", &self.length)
            .field("parts", &self.parts.len())
            .finish_non_exhaustive()
    }
}

/// Cuts a range into parts of at most `bytes_max`, the last one shorter.
fn split(base: u64, length: u64, bytes_max: u64) -> Vec<MemoryRange> {
    let starts = (0..length).step_by(usize::try_from(bytes_max).unwrap_or(usize::MAX));
    let part = |start| MemoryRange { address: base + start, length: bytes_max.min(length - start) };
    starts.map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_range_is_split_with_a_shorter_rest() {
        let lengths = |length| -> Vec<u64> {
            let parts = split(4096, length, 131_072);
            let mut end = 4096;
            for part in &parts {
                assert_eq!(part.address, end);
                end += part.length;
            }
            parts.iter().map(|part| part.length).collect()
        };
        assert_eq!(lengths(300_000), [131_072, 131_072, 37_856]);
        assert_eq!(lengths(131_072), [131_072]);
        assert_eq!(lengths(1), [1]);
    }
}
