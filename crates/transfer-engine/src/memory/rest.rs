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
const REST: Duration = Duration::from_secs(120);

static RESTING: Mutex<VecDeque<Resting>> = Mutex::new(VecDeque::new());

struct Resting {
    since: Instant,
    base: usize,
    length: usize,
}

/// Takes the memory of a mapping away and lets its addresses rest.
///
/// # Safety
/// `base..base + length` is a mapping of the caller's that nobody uses any more.
pub(super) unsafe fn retire(base: usize, length: usize) {
    end_rests();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: it replaces only the mapping that the caller gives up, by one that nothing can touch.
    let kept = unsafe { libc::mmap(base as *mut _, length, libc::PROT_NONE, flags, -1, 0) };
    if kept == libc::MAP_FAILED {
        // Out of mappings: giving the memory back matters more than the rest.
        // SAFETY: the caller gives the range up.
        unsafe { libc::munmap(base as *mut _, length) };
        return;
    }
    RESTING.lock().push_back(Resting { since: Instant::now(), base, length });
}

/// Gives back the addresses that have rested.
fn end_rests() {
    let mut resting = RESTING.lock();
    while resting.front().is_some_and(|rest| rest.since.elapsed() >= REST) {
        let Some(rest) = resting.pop_front() else { return };
        // SAFETY: the reservation is ours, and nothing can be using it.
        unsafe { libc::munmap(rest.base as *mut _, rest.length) };
    }
}
