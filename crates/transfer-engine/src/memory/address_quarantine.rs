//! Address quarantine: exported memory is freed at once, but its addresses are not reused for a
//! while.
//!
//! Peers address bytes by their address. A peer that learned an address shortly before the memory
//! was freed must be refused, and must not reach new memory at the same address. Therefore the
//! addresses stay reserved, without memory behind them, for longer than any peer may rely on a
//! replica location.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use mooncake_base::sync::Mutex;

/// How long addresses stay reserved: longer than any fence and any write window.
const QUARANTINE_TIME: Duration = Duration::from_secs(120);

static QUARANTINED: Mutex<VecDeque<QuarantinedRange>> = Mutex::new(VecDeque::new());

struct QuarantinedRange {
    since: Instant,
    base: usize,
    length: usize,
}

/// Frees the memory of a mapping and quarantines its addresses.
///
/// # Safety
/// `base..base + length` is a mapping of the caller that nothing uses any more.
pub(super) unsafe fn quarantine(base: usize, length: usize) {
    release_expired();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: replaces only the mapping that the caller gives up, by an inaccessible one.
    let kept = unsafe { libc::mmap(base as *mut _, length, libc::PROT_NONE, flags, -1, 0) };
    if kept == libc::MAP_FAILED {
        // The limit of mappings is reached: freeing the memory matters more than the quarantine.
        // SAFETY: the caller gives the range up.
        unsafe { libc::munmap(base as *mut _, length) };
        return;
    }
    QUARANTINED.lock().push_back(QuarantinedRange { since: Instant::now(), base, length });
}

/// Releases the addresses whose quarantine has ended.
fn release_expired() {
    let mut quarantined = QUARANTINED.lock();
    while quarantined.front().is_some_and(|range| range.since.elapsed() >= QUARANTINE_TIME) {
        let Some(range) = quarantined.pop_front() else { return };
        // SAFETY: this module owns the reservation, and nothing can be using it.
        unsafe { libc::munmap(range.base as *mut _, range.length) };
    }
}
