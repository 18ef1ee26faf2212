//! Running means of measurements, kept per class of size.

/// Returns a running mean with one more sample, which counts for an eighth. The first sample is the
/// mean, which is 0 before.
pub const fn updated_mean(mean: u64, sample: u64) -> u64 {
    if mean == 0 { sample } else { mean - mean / 8 + sample / 8 }
}

/// Returns the class of a size, given the inclusive upper bounds of all classes but the last.
pub fn size_class(ends: &[u64], bytes: u64) -> usize {
    ends.iter().filter(|end| bytes > **end).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_approaches_a_new_level() {
        let mean = (0..40).fold(1_000_000, |mean, _| updated_mean(mean, 8_000));
        assert!((8_000..15_000).contains(&mean), "{mean}");
        assert_eq!(updated_mean(0, 8_000), 8_000);
        assert!(updated_mean(u64::MAX / 2, u64::MAX / 2) <= u64::MAX / 2);
    }

    #[test]
    fn bounds_belong_to_the_lower_class() {
        let class = |bytes| size_class(&[16, 256], bytes);
        assert_eq!([0, 16, 17, 256, 257].map(class), [0, 0, 1, 1, 2]);
    }
}
