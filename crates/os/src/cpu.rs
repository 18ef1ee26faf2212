//! The number of CPUs that this process may use.

use std::sync::OnceLock;

/// Returns how many CPUs this process may use, as its affinity and its control group limit it.
pub fn cpu_count() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}
