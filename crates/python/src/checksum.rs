//! `mooncake._native.xxh3`: the checksum of memory, computed without the GIL.

use std::hash::Hasher as _;

use mooncake_base::Result;
use mooncake_transfer_engine::{LocalRange, copy::copy};
use pyo3::prelude::*;
use twox_hash::XxHash3_64;

use crate::{
    buffer::{Views, caller_range},
    detach::detached,
    error::or_raise,
};

/// Length of the private memory through which bytes are read: it stays in a processor's cache.
const BLOCK_BYTES: usize = 64 << 10;

/// Returns the 64-bit XXH3 of a contiguous buffer.
#[pyfunction]
pub(crate) fn xxh3(py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<u64> {
    let views = Views::of(value)?;
    let ranges = views.ranges().to_vec();
    let hashed = detached(py, || hash(&ranges));
    or_raise(py, hashed.and_then(|hashed| hashed))
}

/// Hashes ranges, one after the other. The memory may change meanwhile, so each block is copied.
fn hash(ranges: &[LocalRange]) -> Result<u64> {
    let mut hasher = XxHash3_64::default();
    let mut block = vec![0_u8; BLOCK_BYTES];
    for range in ranges {
        let mut at = 0;
        while at < range.length() {
            let length = BLOCK_BYTES.min(range.length() - at);
            let own = caller_range(block.as_mut_ptr().addr(), length);
            copy(range.part(at, length), own)?;
            hasher.write(&block[..length]);
            at += length;
        }
    }
    Ok(hasher.finish())
}
