//! Object checksum: 64-bit XXH3 over the object's bytes in order.

use std::hash::Hasher as _;

use mooncake_base::{Moment, Result};
use mooncake_transfer_engine::{Engine, LocalRange};
use twox_hash::XxHash3_64;

/// Computes checksums block by block through private memory: the address may be a raw number from
/// a caller that points to unmapped memory or to that of a device, and the memory may change during
/// the read.
#[derive(Debug)]
pub(super) struct Checksummer<'a> {
    engine: &'a Engine,
    /// Waiting for memory in which the bytes of a device are seen ends then.
    deadline: Moment,
    block: Vec<u8>,
}

impl<'a> Checksummer<'a> {
    /// Creates a checksummer of memory that an engine can read.
    pub(super) const fn new(engine: &'a Engine, deadline: Moment) -> Self {
        Self { engine, deadline, block: Vec::new() }
    }

    /// Returns the checksum of the concatenated ranges.
    ///
    /// # Errors
    /// A range is not mapped or not readable.
    pub(super) fn checksum(&mut self, ranges: impl Iterator<Item = LocalRange>) -> Result<u64> {
        let mut hasher = XxHash3_64::default();
        for range in ranges {
            self.engine.read_local(range, &mut self.block, self.deadline, |bytes| {
                hasher.write(bytes);
            })?;
        }
        Ok(hasher.finish())
    }
}
