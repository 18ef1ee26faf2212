//! `mooncake._fast_copy`: many arrays copied one after the other into memory, without the GIL.

use std::thread;

use mooncake_base::{Error, Result};
use mooncake_transfer_engine::{LocalRange, copy::copy};
use pyo3::prelude::*;

use crate::{
    argument::Unsigned,
    caller_memory::{Views, caller_range},
    detach::detached,
    error::or_raise,
};

/// Threads that one call may use.
const THREADS_MAX: usize = 16;

/// Copies `arrays[start..start + count]` to an address, one after the other; returns the number of
/// bytes. Without `count`, or with a negative one, the rest of the list is copied.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "the arguments of upstream's function")]
#[pyo3(signature = (arrays, dest_ptr, dest_size, start = 0, count = None, nthreads = 1))]
pub(crate) fn concat_arrays_into(
    py: Python<'_>,
    arrays: Vec<Bound<'_, PyAny>>,
    dest_ptr: Unsigned,
    dest_size: Unsigned,
    start: isize,
    count: Option<isize>,
    nthreads: isize,
) -> PyResult<usize> {
    let selected = or_raise(py, select(&arrays, start, count.unwrap_or(-1)))?;
    let views = selected.iter().map(Views::of).collect::<PyResult<Vec<_>>>()?;
    let mut copies = Vec::with_capacity(views.len());
    let mut total = 0;
    for from in views.iter().flat_map(Views::ranges) {
        copies.push((*from, total));
        total += from.length();
    }
    if total > dest_size.0 {
        let error = Error::invalid("the arrays are larger than the destination")
            .with("bytes", total)
            .with("dest_size", dest_size.0);
        return or_raise(py, Err(error));
    }
    if total == 0 {
        return Ok(0);
    }
    let to = caller_range(dest_ptr.0, total);
    let threads = nthreads.clamp(1, THREADS_MAX as isize) as usize;
    let copied = detached(py, || copy_shares(&copies, to, threads));
    or_raise(py, copied.and_then(|copied| copied))?;
    Ok(total)
}

/// Returns the arrays of a call, with `start` and `count` checked against the list.
fn select<T>(arrays: &[T], start: isize, count: isize) -> Result<&[T]> {
    let first = usize::try_from(start).ok().filter(|first| *first <= arrays.len());
    let selected = first.map(|first| &arrays[first..]).and_then(|rest| {
        let count = usize::try_from(count).unwrap_or(rest.len());
        rest.get(..count)
    });
    selected.ok_or_else(|| {
        Error::invalid("start and count are outside of the list of arrays")
            .with("start", start)
            .with("count", count)
            .with("arrays", arrays.len())
    })
}

/// Copies each range to its offset in `to`, with a share of the ranges for each thread.
fn copy_shares(copies: &[(LocalRange, usize)], to: LocalRange, threads: usize) -> Result<()> {
    let copy_share = |share: &[(LocalRange, usize)]| {
        share.iter().try_for_each(|(from, at)| copy(*from, to.part(*at, from.length())))
    };
    if threads == 1 {
        return copy_share(copies);
    }
    thread::scope(|scope| {
        let shares: Vec<_> = copies
            .chunks(copies.len().div_ceil(threads))
            .map(|share| scope.spawn(move || copy_share(share)))
            .collect();
        shares.into_iter().try_for_each(|share| {
            share.join().unwrap_or_else(|_| Err(Error::internal("a copying thread panicked")))
        })
    })
}
