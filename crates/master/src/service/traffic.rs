//! Traffic counters: how many reads found their object, and how large the values are.

use std::sync::atomic::{AtomicU64, Ordering};

/// The upper bounds of the value size classes in bytes. One more class has no upper bound.
pub const SIZE_BOUNDS: [u64; 7] =
    [4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];

/// The traffic counters.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    gets: AtomicU64,
    hits: AtomicU64,
    hit_bytes: AtomicU64,
    disk_hits: AtomicU64,
    disk_hit_bytes: AtomicU64,
    sizes: [AtomicU64; SIZE_BOUNDS.len() + 1],
    size_sum: AtomicU64,
}

/// A snapshot of the traffic counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TrafficCount {
    /// Keys looked up in order to read them.
    pub gets: u64,
    /// Keys of `gets` that were found.
    pub hits: u64,
    /// Bytes of the found objects.
    pub hit_bytes: u64,
    /// Keys of `hits` whose objects could be read from a disk only.
    pub disk_hits: u64,
    /// Bytes of these objects.
    pub disk_hit_bytes: u64,
    /// Values whose puts were started, by size class. The counts are not cumulative.
    pub sizes: [u64; SIZE_BOUNDS.len() + 1],
    /// Total bytes of those values.
    pub size_sum: u64,
}

impl Traffic {
    /// Counts keys looked up for reading.
    pub(super) fn looked_up(&self, gets: usize, hits: usize, hit_bytes: u64) {
        self.gets.fetch_add(gets as u64, Ordering::Relaxed);
        if hits > 0 {
            self.hits.fetch_add(hits as u64, Ordering::Relaxed);
            self.hit_bytes.fetch_add(hit_bytes, Ordering::Relaxed);
        }
    }

    /// Counts those keys among them whose objects can be read from a disk only.
    pub(super) fn found_on_disk(&self, hits: u64, bytes: u64) {
        if hits > 0 {
            self.disk_hits.fetch_add(hits, Ordering::Relaxed);
            self.disk_hit_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Counts a value that space was allocated for.
    pub(super) fn put(&self, length: u64) {
        let class = SIZE_BOUNDS.partition_point(|bound| *bound < length);
        self.sizes[class].fetch_add(1, Ordering::Relaxed);
        self.size_sum.fetch_add(length, Ordering::Relaxed);
    }

    pub(super) fn count(&self) -> TrafficCount {
        let read = |value: &AtomicU64| value.load(Ordering::Relaxed);
        TrafficCount {
            gets: read(&self.gets),
            hits: read(&self.hits),
            hit_bytes: read(&self.hit_bytes),
            disk_hits: read(&self.disk_hits),
            disk_hit_bytes: read(&self.disk_hit_bytes),
            sizes: std::array::from_fn(|class| read(&self.sizes[class])),
            size_sum: read(&self.size_sum),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_at_bound_counts_in_lower_class() {
        let traffic = Traffic::default();
        for length in [1, 4096, 4097, 64 << 20, (64 << 20) + 1] {
            traffic.put(length);
        }
        let count = traffic.count();
        assert_eq!(count.sizes, [2, 1, 0, 0, 0, 0, 1, 1]);
        assert_eq!(count.size_sum, 1 + 4096 + 4097 + (128 << 20) + 1);
    }

    #[test]
    fn misses_count_as_gets_without_bytes() {
        let traffic = Traffic::default();
        traffic.looked_up(3, 2, 10);
        traffic.looked_up(1, 0, 0);
        let count = traffic.count();
        assert_eq!((count.gets, count.hits, count.hit_bytes), (4, 2, 10));
    }
}
