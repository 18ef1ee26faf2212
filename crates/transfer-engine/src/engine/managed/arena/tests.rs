//! Checks the allocator against a plain map of allocations.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const SLAB: u64 = BLOCK_BYTES_MAX;

/// An arena that gets a slab whenever it needs one.
#[derive(Default)]
struct Grown {
    arena: Arena,
    slabs: BTreeSet<u64>,
    next: u64,
}

impl Grown {
    fn allocate(&mut self, length: u64) -> u64 {
        if let Some(address) = self.arena.allocate(length) {
            return address;
        }
        // Slabs with and without a gap between them, none aligned to its length.
        self.next += SLAB + (self.next % 3) * 4096 + 4096;
        self.slabs.insert(self.next);
        self.arena.add_slab(self.next).unwrap();
        self.arena.allocate(length).unwrap()
    }

    fn free(&mut self, address: u64, length: u64) -> Result<()> {
        if let Freed::Released(slab) = self.arena.free(address, length)? {
            assert!(self.slabs.remove(&slab), "{slab:#x} is no slab");
        }
        Ok(())
    }
}

#[test]
fn lengths_are_rounded_up_to_their_class() {
    let class_bytes = |length| class_of(length).map(bytes_of);
    assert_eq!(class_bytes(0), Some(8 << 10));
    assert_eq!(class_bytes(8 << 10), Some(8 << 10));
    assert_eq!(class_bytes((8 << 10) + 1), Some(16 << 10));
    assert_eq!(class_bytes(256 << 20), Some(256 << 20));
    assert_eq!(class_bytes((256 << 20) + 1), None);
}

#[test]
fn allocation_needs_a_slab() {
    assert_eq!(Arena::default().allocate(1), None);
}

#[test]
fn rejects_double_free_and_foreign_addresses_without_change() {
    let mut grown = Grown::default();
    let first = grown.allocate(100);
    let second = grown.allocate(100);
    let third = grown.allocate(40_000);
    for (address, length) in [
        (first + 1, 100),
        (0, 100),
        (u64::MAX, 100),
        (first, 9000),
        (first, SLAB + 1),
        (third, 100),
    ] {
        assert!(grown.free(address, length).is_err(), "{address:#x}+{length}");
    }
    grown.free(first, 100).unwrap();
    assert!(grown.free(first, 100).is_err());
    assert_eq!(grown.allocate(1), first);
    grown.free(second, 8192).unwrap();
    grown.free(third, 65536).unwrap();
}

#[test]
fn keeps_one_free_slab_and_releases_others() {
    let mut grown = Grown::default();
    let blocks: Vec<_> = (0..3).map(|_| grown.allocate(SLAB)).collect();
    assert_eq!(grown.slabs.len(), 3);
    for block in blocks {
        grown.free(block, SLAB).unwrap();
    }
    assert_eq!(grown.slabs.len(), 1);
    let again = grown.allocate(1);
    assert!(grown.slabs.contains(&again));
}

#[test]
fn dedicated_memory_is_released_when_freed() {
    let mut arena = Arena::default();
    arena.add_dedicated(4096, SLAB + 4096).unwrap();
    assert!(arena.free(4096, 100).is_err());
    assert!(arena.free(4096, SLAB + 4097).is_err());
    assert_eq!(arena.free(4096, SLAB + 1).unwrap(), Freed::Released(4096));
    assert!(arena.free(4096, SLAB + 1).is_err());
}

#[derive(Debug, Clone)]
enum Step {
    Allocate(u64),
    /// Frees the allocation at this index.
    Free(usize),
    FreeAgain(usize),
    FreeForeign(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let length = prop_oneof![0..100_000_u64, 0..(4_u64 << 20), 0..=SLAB];
    prop_oneof![
        4 => length.prop_map(Step::Allocate),
        3 => any::<usize>().prop_map(Step::Free),
        1 => any::<usize>().prop_map(Step::FreeAgain),
        1 => any::<u64>().prop_map(Step::FreeForeign),
    ]
}

proptest! {
    #[test]
    fn blocks_never_overlap_and_all_memory_comes_back(
        steps in proptest::collection::vec(step(), 1..200),
    ) {
        let mut grown = Grown::default();
        let mut allocated: BTreeMap<u64, u64> = BTreeMap::new();
        let mut freed: Vec<(u64, u64)> = Vec::new();
        for step in steps {
            match step {
                Step::Allocate(length) => {
                    let address = grown.allocate(length);
                    let end = address + length.max(1);
                    let before = allocated.range(..end).next_back();
                    prop_assert!(before.is_none_or(|(base, length)| base + (*length).max(1) <= address));
                    let slab = grown.slabs.range(..=address).next_back();
                    prop_assert!(slab.is_some_and(|slab| end <= slab + SLAB));
                    allocated.insert(address, length);
                }
                Step::Free(index) if !allocated.is_empty() => {
                    let (address, length) = allocated.iter().nth(index % allocated.len()).map(|(a, l)| (*a, *l)).unwrap();
                    allocated.remove(&address);
                    freed.push((address, length));
                    prop_assert!(grown.free(address, length).is_ok());
                }
                Step::FreeAgain(index) if !freed.is_empty() => {
                    let (address, length) = freed[index % freed.len()];
                    if !allocated.contains_key(&address) {
                        prop_assert!(grown.free(address, length).is_err());
                    }
                }
                Step::FreeForeign(address) if !allocated.contains_key(&address) => {
                    prop_assert!(grown.free(address, 1).is_err());
                }
                _ => {}
            }
        }
        for (address, length) in allocated {
            prop_assert!(grown.free(address, length).is_ok());
        }
        prop_assert!(grown.slabs.len() <= 1, "unused slabs are released");
        let whole = grown.slabs.iter().all(|slab| grown.arena.free[CLASS_LAST].contains(slab));
        prop_assert!(whole, "free halves are joined");
        prop_assert!(grown.arena.free[..CLASS_LAST].iter().all(BTreeSet::is_empty));
    }
}
