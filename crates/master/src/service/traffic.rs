//! Traffic counters: how many reads found their object, and how large the values are.

use mooncake_base::{
    counters,
    histogram::{BucketCounts, Buckets},
};

/// The upper bounds of the value size classes in bytes. One more class has no upper bound.
pub const SIZE_BOUNDS: [u64; 7] =
    [4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];

/// The number of size classes.
const CLASSES: usize = SIZE_BOUNDS.len() + 1;

counters! {
    /// The traffic counters.
    pub(super) struct Traffic;
    /// A snapshot of the traffic counters.
    #[derive(Copy)]
    pub struct TrafficCount {}
    LOOKUPS {
        /// Keys looked up in order to read them.
        gets = counter "lookups_total",
        /// Keys looked up for reading and found.
        hits = counter "lookup_hits_total",
        /// Keys found for reading that are on a disk only.
        disk_hits = counter "lookup_disk_hits_total",
        /// Bytes of these objects.
        disk_hit_bytes = counter "lookup_disk_hit_bytes_total",
        /// Bytes of the objects found for reading.
        hit_bytes = counter "lookup_hit_bytes_total",
        /// Values whose puts were started, by size class.
        sizes: Buckets<CLASSES> => BucketCounts<CLASSES>,
    }
}

impl Traffic {
    /// Counts keys looked up for reading.
    pub(super) fn looked_up(&self, gets: usize, hits: usize, hit_bytes: u64) {
        self.gets.add(gets as u64);
        if hits > 0 {
            self.hits.add(hits as u64);
            self.hit_bytes.add(hit_bytes);
        }
    }

    /// Counts those keys among them whose objects can be read from a disk only.
    pub(super) fn found_on_disk(&self, hits: u64, bytes: u64) {
        if hits > 0 {
            self.disk_hits.add(hits);
            self.disk_hit_bytes.add(bytes);
        }
    }

    /// Counts a value that space was allocated for.
    pub(super) fn put(&self, length: u64) {
        self.sizes.record(SIZE_BOUNDS.partition_point(|bound| *bound < length), length);
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
        let sizes = traffic.snapshot().sizes;
        assert_eq!(sizes.counts, [2, 1, 0, 0, 0, 0, 1, 1]);
        assert_eq!(sizes.sum, 1 + 4096 + 4097 + (128 << 20) + 1);
    }

    #[test]
    fn misses_count_as_gets_without_bytes() {
        let traffic = Traffic::default();
        traffic.looked_up(3, 2, 10);
        traffic.looked_up(1, 0, 0);
        let count = traffic.snapshot();
        assert_eq!((count.gets, count.hits, count.hit_bytes), (4, 2, 10));
    }
}
