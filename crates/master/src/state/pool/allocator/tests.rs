//! The allocator against a model, and its packing density.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

impl Allocator {
    /// Walks the whole segment and checks the metadata.
    fn check(&self) {
        let mut at = self.first();
        let (mut end, mut used, mut was_free) = (0, 0, false);
        while let Some(block) = at {
            assert_eq!(self.offset_of(block), end, "no gap and no overlap");
            assert!(self.size_of(block) > 0);
            assert!(!(was_free && self.is_free(block)), "free neighbours are joined");
            was_free = self.is_free(block);
            if was_free {
                let bin = bin_of(self.size_of(block));
                assert!(self.bin(bin).any(|other| other == block), "a free block is in its bin");
            } else {
                used += self.size_of(block);
            }
            end = self.end_of(block);
            let after = self.blocks[block as usize].after;
            at = (after != NONE).then_some(after);
        }
        assert_eq!((end, used), (self.length, self.used));
    }
}

fn fill(allocator: &mut Allocator, mut length: impl FnMut() -> u64) -> Vec<(BlockId, u64)> {
    let mut held = Vec::new();
    loop {
        let length = length();
        match allocator.allocate(length) {
            Some(block) => held.push((block, length)),
            None => return held,
        }
    }
}

/// Returns the mean utilization while the oldest blocks are freed until the newest one fits, as in
/// a pool that evicts.
fn mean_under_churn(
    allocator: &mut Allocator,
    held: Vec<(BlockId, u64)>,
    mut length: impl FnMut() -> u64,
    rounds: u32,
) -> f64 {
    let mut held = VecDeque::from(held);
    let mut sum = 0.0;
    for _ in 0..rounds {
        let length = length();
        let block = loop {
            if let Some(block) = allocator.allocate(length) {
                break block;
            }
            let (oldest, _) = held.pop_front().expect("an empty segment has room");
            allocator.free(oldest);
        };
        held.push_back((block, length));
        sum += allocator.used() as f64 / allocator.length() as f64;
    }
    allocator.check();
    sum / f64::from(rounds)
}

fn density(allocator: &Allocator, held: &[(BlockId, u64)]) -> f64 {
    held.iter().map(|(_, length)| length).sum::<u64>() as f64 / allocator.length() as f64
}

/// Returns a pseudo-random number; the seed is not 0.
fn random(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

#[test]
fn blocks_of_one_size_fill_the_segment() {
    let mut seed = 7;
    for round in 0..200 {
        let length = 8192 + random(&mut seed) % if round % 2 == 0 { 60_000 } else { 2_000_000 };
        let mut allocator = Allocator::new(length * 300 + random(&mut seed) % length);
        let mut held = fill(&mut allocator, || length);
        assert!(density(&allocator, &held) >= 0.99, "length={length}");
        // And again, after half of it was freed in random order.
        for _ in 0..held.len() / 2 {
            let index = random(&mut seed) as usize % held.len();
            allocator.free(held.swap_remove(index).0);
        }
        held.extend(fill(&mut allocator, || length));
        assert!(density(&allocator, &held) >= 0.99, "length={length}");
        allocator.check();
    }
}

#[test]
fn small_sizes_waste_little() {
    let mut seed = 3;
    for _ in 0..100 {
        let length = 160 + random(&mut seed) % 8032;
        let mut allocator = Allocator::new(4 << 20);
        let held = fill(&mut allocator, || length);
        assert!(density(&allocator, &held) >= 0.95, "length={length}");
    }
}

#[test]
fn two_mixed_sizes_stay_dense_under_churn() {
    let mut seed = 11;
    let mut allocator = Allocator::new(4 << 30);
    let mut pick = || if random(&mut seed).is_multiple_of(2) { 3_274_752 } else { 658_432 };
    let held = fill(&mut allocator, &mut pick);
    let filled = density(&allocator, &held);
    let mean = mean_under_churn(&mut allocator, held, pick, 20_000);
    println!("filled={filled} mean={mean}");
    assert!(filled >= 0.96 && mean >= 0.96, "filled={filled} mean={mean}");
}

#[test]
fn one_size_stays_dense_in_any_order_of_frees() {
    const LENGTH: u64 = 3_274_752;
    let mut seed = 13;
    let mut allocator = Allocator::new(4 << 30);
    let mut held = fill(&mut allocator, || LENGTH);
    let filled = held.len();
    assert_eq!(filled as u64, (4 << 30) / LENGTH, "nothing is lost between blocks");
    for round in 0..20_000 {
        // A few blocks anywhere are freed, and as many are allocated.
        let gone = 1 + random(&mut seed) as usize % 8;
        for _ in 0..gone {
            let (block, _) = held.swap_remove(random(&mut seed) as usize % held.len());
            allocator.free(block);
        }
        for _ in 0..gone {
            let block = allocator.allocate(LENGTH);
            held.push((block.unwrap_or_else(|| panic!("no room in round {round}")), LENGTH));
        }
    }
    assert_eq!(allocator.allocate(LENGTH), None, "it was full all the time");
    allocator.check();
}

#[test]
fn large_blocks_start_on_a_cache_line() {
    let mut allocator = Allocator::new(1 << 20);
    let small: Vec<_> = (0..100).map(|_| allocator.allocate(24).unwrap()).collect();
    for block in small.iter().step_by(2) {
        allocator.free(*block);
    }
    for _ in 0..50 {
        let block = allocator.allocate(5000).unwrap();
        assert_eq!(allocator.offset(block) % 64, 0);
        allocator.allocate(40).unwrap();
    }
    allocator.check();
}

#[test]
fn rejects_zero_and_oversized_lengths() {
    let mut allocator = Allocator::new(1000);
    assert_eq!(allocator.allocate(0), None);
    assert_eq!(allocator.allocate(1001), None);
    assert_eq!(allocator.allocate(u64::MAX), None);
    assert!(allocator.allocate(1000).is_some());
    assert_eq!(Allocator::new(7).allocate(1), None);
    assert_eq!(Allocator::new(u64::MAX).length(), LENGTH_MAX);
    assert!(Allocator::new(u64::MAX).allocate(LENGTH_MAX).is_some());
}

#[test]
fn powers_of_two_stay_dense_under_churn() {
    let mut seed = 5;
    let mut allocator = Allocator::new(1 << 30);
    let mut pick = || {
        let power = 13 + random(&mut seed) % 8;
        (1 << power) + random(&mut seed) % 35 - 17
    };
    let held = fill(&mut allocator, &mut pick);
    let mean = mean_under_churn(&mut allocator, held, pick, 50_000);
    println!("mean={mean}");
    assert!(mean >= 0.96, "mean={mean}");
}

#[test]
fn allocate_at_restores_blocks_in_any_order() {
    let mut seed = 9;
    let mut original = Allocator::new(8 << 20);
    let mut held = fill(&mut original, || 1 + random(&mut seed) % 20_000);
    for _ in 0..held.len() / 2 {
        let index = random(&mut seed) as usize % held.len();
        original.free(held.swap_remove(index).0);
    }
    let mut again = Allocator::new(8 << 20);
    for (block, length) in held {
        let offset = original.offset(block);
        let found = again.allocate_at(offset, length).unwrap();
        assert_eq!((again.offset(found), again.size(found)), (offset, original.size(block)));
        assert_eq!(again.allocate_at(offset, 1), None, "it is given out once");
    }
    again.check();
    assert_eq!(again.used(), original.used());
    again.allocate(100).unwrap();
    assert_eq!(again.allocate_at(4, 100), None, "no block begins there");
    assert_eq!(again.allocate_at(u64::MAX - 7, 100), None);
    assert_eq!(again.allocate_at((8 << 20) - 64, 5000), None);
    again.check();
}

proptest! {
    #[test]
    fn blocks_never_overlap_and_everything_joins_again(
        length in 1_u64..200_000,
        steps in prop::collection::vec(
            (any::<bool>(), 1_u64..9000, any::<prop::sample::Index>(), prop::option::of(0_u64..3000)),
            1..200,
        ),
    ) {
        let mut allocator = Allocator::new(length);
        let mut held: Vec<(BlockId, u64)> = Vec::new();
        for (is_freeing, length, index, at) in steps {
            if is_freeing && !held.is_empty() {
                let (block, length) = held.swap_remove(index.index(held.len()));
                prop_assert!(allocator.size(block) >= length);
                allocator.free(block);
            } else if let Some(block) = match at {
                Some(at) => allocator.allocate_at(at * LARGE_GRANULE_BYTES, length),
                None => allocator.allocate(length),
            } {
                held.push((block, length));
            }
            allocator.check();
            let sum: u64 = held.iter().map(|(block, _)| allocator.size(*block)).sum();
            prop_assert_eq!(sum, allocator.used());
        }
        for (block, _) in held {
            allocator.free(block);
        }
        allocator.check();
        let usable = length / LARGE_GRANULE_BYTES * LARGE_GRANULE_BYTES;
        prop_assert!(usable == 0 || allocator.allocate(usable).is_some());
    }
}

#[test]
fn free_parts_of_a_range_are_allocated() {
    let mut allocator = Allocator::new(1 << 16);
    let all = |allocator: &mut Allocator, range: std::ops::Range<u64>| {
        let blocks = allocator.allocate_free_in(range.start, range.end - range.start);
        let place = |&block: &BlockId| (allocator.offset(block), allocator.size(block));
        blocks.iter().map(place).collect::<Vec<_>>()
    };
    let held = allocator.allocate_at(8192, 4096).unwrap();
    assert_eq!(all(&mut allocator, 8192..8192 + 4096), []);
    assert_eq!(all(&mut allocator, 4104..20_008), [(4104, 8192 - 4104), (12_288, 20_008 - 12_288)]);
    assert_eq!(all(&mut allocator, 0..16_384), [(0, 4104)]);
    assert_eq!(all(&mut allocator, 65_000..1 << 20), [(65_000, 536)]);
    allocator.free(held);
    assert_eq!(all(&mut allocator, 0..1 << 16), [(8192, 4096), (20_008, 65_000 - 20_008)]);
    assert_eq!(allocator.used(), 1 << 16);
}
