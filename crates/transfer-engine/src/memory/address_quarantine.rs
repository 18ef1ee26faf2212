//! Addresses that rest: memory we lent is gone at once, but its addresses mean nothing else for a
//! while.
//!
//! A peer names bytes by their address. One that learnt an address shortly before the memory went
//! must be refused, not be given whatever the system put there next; so the addresses stay taken,
//! without memory behind them, for longer than anybody may rely on a place it was told.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use mooncake_base::sync::Mutex;

/// How long addresses rest: longer than any fence and any write window.
const QUARANTINE_TIME: Duration = Duration::from_secs(120);

static QUARANTINED: Mutex<VecDeque<QuarantinedRange>> = Mutex::new(VecDeque::new());

struct QuarantinedRange {
    since: Instant,
    base: usize,
    length: usize,
}

/// Takes the memory of a mapping away and lets its addresses range.
///
/// # Safety
/// `base..base + length` is a mapping of the caller's that nobody uses any more.
pub(super) unsafe fn quarantine(base: usize, length: usize) {
    release_expired();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: it replaces only the mapping that the caller gives up, by one that nothing can touch.
    let kept = unsafe { libc::mmap(base as *mut _, length, libc::PROT_NONE, flags, -1, 0) };
    if kept == libc::MAP_FAILED {
        // Out of mappings: giving the memory back matters more than the range.
        // SAFETY: the caller gives the range up.
        unsafe { libc::munmap(base as *mut _, length) };
        return;
    }
    QUARANTINED.lock().push_back(QuarantinedRange { since: Instant::now(), base, length });
}

/// Gives back the addresses that have rested.
fn release_expired() {
    let mut quarantined = QUARANTINED.lock();
    while quarantined.front().is_some_and(|range| range.since.elapsed() >= QUARANTINE_TIME) {
        let Some(range) = quarantined.pop_front() else { return };
        // SAFETY: the reservation is ours, and nothing can be using it.
        unsafe { libc::munmap(range.base as *mut _, range.length) };
    }
}
