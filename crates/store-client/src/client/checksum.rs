//! The checksum that is kept with an object: XXH3 with 64 bits, over its bytes in order.

use std::hash::Hasher as _;

use mooncake_base::Result;
use mooncake_transfer_engine::{LocalRange, copy};
use twox_hash::XxHash3_64;

/// How much is looked at in one go; it stays in the cache.
const BLOCK: usize = 64 << 10;

/// Sums memory up, block by block through a buffer of its own: the memory may be a bare number
/// from a caller that points nowhere, and may change while it is read.
#[derive(Debug, Default)]
pub(super) struct Checksummer {
    block: Vec<u8>,
}

impl Checksummer {
    /// The checksum of the ranges, one behind the other.
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
