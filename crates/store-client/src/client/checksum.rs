//! Object checksum: 64-bit XXH3 over the object's bytes in order.

use std::hash::Hasher as _;

use mooncake_base::Result;
use mooncake_transfer_engine::{LocalRange, copy};
use twox_hash::XxHash3_64;

/// Bytes hashed per step. A block of this size stays in the CPU cache.
const BLOCK: usize = 64 << 10;

/// Computes checksums block by block through a private buffer: the address may be a raw number from
/// a caller that points to unmapped memory, and the memory may change during the read.
#[derive(Debug, Default)]
pub(super) struct Checksummer {
    block: Vec<u8>,
}

impl Checksummer {
    /// Returns the checksum of the concatenated ranges.
    ///
    /// # Errors
    /// A range is not mapped or not readable.
    pub(super) fn checksum<'a>(
        &mut self,
        ranges: impl Iterator<Item = &'a LocalRange>,
    ) -> Result<u64> {
        self.block.resize(BLOCK, 0);
        let mut hasher = XxHash3_64::default();
        for range in ranges {
            let mut done = 0;
            while done < range.length() {
                let block = &mut self.block[..BLOCK.min(range.length() - done)];
                copy::read(range.part(done, block.len()), block)?;
                hasher.write(block);
                done += block.len();
            }
        }
        Ok(hasher.finish())
    }
}
