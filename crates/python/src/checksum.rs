//! `mooncake._native.xxh3`: the checksum of memory, computed without the GIL.

use std::hash::Hasher as _;

use mooncake_base::Result;
use mooncake_transfer_engine::{LocalRange, copy};
use pyo3::prelude::*;
use twox_hash::XxHash3_64;

use crate::{caller_memory::Views, detach::detached, error::or_raise};

/// Length of the private memory through which bytes are read. It stays in the first cache of a
/// processor: with 64 KiB, in the second, 2 GiB take 1.6 times as long.
const BLOCK_BYTES: usize = 4 << 10;

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
    let mut block = [0_u8; BLOCK_BYTES];
    for range in ranges {
        copy::read_by_block(*range, &mut block, |bytes| hasher.write(bytes))?;
    }
    Ok(hasher.finish())
}
