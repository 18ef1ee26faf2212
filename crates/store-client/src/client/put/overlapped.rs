//! Pipelines a put of many small objects: while one part of the batch is written, the master
//! allocates space for the next part.
//!
//! For small objects, the allocation call takes about as long as the write, and each waits for the
//! other. With two parts in flight, the master and the client both stay busy.

use std::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use mooncake_base::sync::Mutex;
use mooncake_os::{
    call_limit::{self, Helpers},
    threads::start_scoped,
};

/// Maximum items per part. The master answers calls of up to this many items at once, on the
/// connection's own thread.
const ITEMS_MAX: usize = 1024;

/// Maximum mean object size. For larger objects, writing takes far longer than allocation, so that
/// overlapping gains nothing.
const MEAN_BYTES_MAX: usize = 16 << 10;

/// Splits a batch of many small objects into an even number of parts of about equal size. Returns
/// `None` if the batch does not qualify.
pub(in crate::client) fn split(sizes: &[usize]) -> Option<Vec<Range<usize>>> {
    let count = sizes.len();
    let bytes = sizes.iter().fold(0_usize, |sum, &size| sum.saturating_add(size));
    if count <= ITEMS_MAX || bytes / count > MEAN_BYTES_MAX {
        return None;
    }
    let parts = count.div_ceil(ITEMS_MAX).next_multiple_of(2);
    Some((0..parts).map(|part| count * part / parts..count * (part + 1) / parts).collect())
}

/// Processes the parts with two threads and returns their results in no particular order.
pub(in crate::client) fn run_overlapped<P: Sync, R: Send>(
    parts: &[P],
    work: impl Fn(&P) -> R + Sync,
) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(parts.len()));
    let run_parts = || {
        while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
            let outcome = work(part);
            done.lock().push(outcome);
        }
    };
    // The second thread is not joined explicitly: that would also wait for its stack to be
    // unmapped.
    let helpers = Helpers::new();
    thread::scope(|scope| {
        let (limit, helper) = (call_limit::current(), helpers.add());
        let help = || {
            let _helper = helper;
            call_limit::run_under(limit, run_parts);
        };
        if let Err(error) = start_scoped(scope, "mc-put", help) {
            // This thread processes all parts alone.
            tracing::debug!(%error, "cannot start a second thread for a batch, using one");
        }
        run_parts();
        helpers.wait();
    });
    done.into_inner()
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn splits_small_objects_into_even_number_of_parts() {
        assert_eq!(split(&[]), None);
        assert_eq!(split(&[1; ITEMS_MAX]), None);
        assert_eq!(split(&[MEAN_BYTES_MAX + 1; 2 * ITEMS_MAX]), None);
        assert_eq!(split(&[usize::MAX; 2 * ITEMS_MAX]), None);
        for count in [ITEMS_MAX + 1, 2 * ITEMS_MAX, 3000, 20_000] {
            let parts = split(&vec![MEAN_BYTES_MAX; count]).unwrap();
            assert_eq!(parts.len() % 2, 0);
            assert!(parts.iter().all(|part| (1..=ITEMS_MAX).contains(&part.len())));
            assert!(parts.into_iter().flatten().eq(0..count));
        }
    }

    #[test]
    fn runs_two_parts_at_a_time_and_each_once() {
        let parts: Vec<usize> = (0..8).collect();
        // The barrier passes only when two threads reach it.
        let meeting = Barrier::new(2);
        let mut done = run_overlapped(&parts, |part| {
            meeting.wait();
            *part
        });
        done.sort_unstable();
        assert_eq!(done, parts);
    }
}
