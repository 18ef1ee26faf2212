//! A batch of many small objects, two parts of it abreast: the master names the ones while the
//! others are written.
//!
//! To name a small object takes about as long as to write it, and the one waits for the other. Cut
//! into parts, of which two are under way at a time, both ends have something to do.

use std::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use mooncake_base::sync::Mutex;

/// The most items of a part. The master answers calls of so many at once, on the
/// connection's own thread.
const ITEMS_MAX: usize = 1024;

/// Objects that are larger on the average take so much longer to be written than to be named that
/// two parts abreast gain nothing.
const MEAN_BYTES_MAX: usize = 16 << 10;

/// The parts of a batch of many small objects, about equally large, an even number of them. `None`:
/// it is no such batch.
pub(super) fn split(sizes: &[usize]) -> Option<Vec<Range<usize>>> {
    let count = sizes.len();
    let bytes = sizes.iter().fold(0_usize, |sum, &size| sum.saturating_add(size));
    if count <= ITEMS_MAX || bytes / count > MEAN_BYTES_MAX {
        return None;
    }
    let parts = count.div_ceil(ITEMS_MAX).next_multiple_of(2);
    Some((0..parts).map(|part| count * part / parts..count * (part + 1) / parts).collect())
}

/// Does the parts, two at a time, and returns what came of each, in no order.
pub(super) fn run_overlapped<P: Sync, R: Send>(
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
    // The other thread is not joined: that would wait for the end of its stack, too.
    thread::scope(|scope| {
        let builder = thread::Builder::new().name("mc-put".to_owned());
        if let Err(error) = builder.spawn_scoped(scope, run_parts) {
            // Its parts are done here.
            tracing::debug!(%error, "no second thread for a batch");
        }
        run_parts();
    });
    done.into_inner()
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn many_small_objects_are_cut_into_an_even_number_of_parts_that_hold_them_all() {
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
    fn two_parts_are_under_way_at_a_time_and_each_is_done_once() {
        let parts: Vec<usize> = (0..8).collect();
        // Two threads must come here for either to go on.
        let meeting = Barrier::new(2);
        let mut done = run_overlapped(&parts, |part| {
            meeting.wait();
            *part
        });
        done.sort_unstable();
        assert_eq!(done, parts);
    }
}
