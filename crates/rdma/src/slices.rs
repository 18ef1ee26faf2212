//! Cuts the entries of a transfer into slices, none of which crosses the border of a registration on
//! either side.

/// A transfer between a range of this process and one of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Address in this process.
    pub local: u64,
    /// Address in the peer's process.
    pub remote: u64,
    /// Length of both ranges.
    pub length: u64,
}

/// A part of an entry, for one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slice {
    /// Index of the entry.
    pub(crate) entry: u32,
    pub(crate) length: u32,
    pub(crate) local: u64,
    pub(crate) remote: u64,
    /// Index of the local registration.
    pub(crate) local_range: u32,
    /// Index of the peer's registration.
    pub(crate) remote_range: u32,
    /// How often the slice may be tried.
    pub(crate) tries: u32,
}

/// A registered range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryRange {
    pub(crate) address: u64,
    pub(crate) length: u64,
}

/// Registered ranges by address, none overlapping another.
#[derive(Debug, Clone, Default)]
pub(crate) struct MemoryRanges {
    sorted: Vec<(MemoryRange, u32)>,
}

/// How long slices are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SliceRule {
    pub(crate) bytes: u32,
    /// A last slice of at most this length is added to the one before.
    pub(crate) tail: u32,
    /// How often a slice is tried.
    pub(crate) tries: u32,
}

/// The side on which a range is not registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unregistered {
    Local,
    Remote,
}

impl MemoryRanges {
    /// Takes ranges with their indexes in the caller's list. An empty range is left out.
    pub(crate) fn new(ranges: impl IntoIterator<Item = MemoryRange>) -> Self {
        let indexed = ranges.into_iter().zip(0..).filter(|(range, _)| range.length > 0);
        let mut sorted: Vec<_> = indexed.collect();
        sorted.sort_by_key(|(range, _)| range.address);
        Self { sorted }
    }

    /// Returns the range that contains an address, its index, and the bytes from the address to its end.
    pub(crate) fn at(&self, address: u64) -> Option<(u32, u64)> {
        let after = self.sorted.partition_point(|(range, _)| range.address <= address);
        let (range, index) = self.sorted.get(after.checked_sub(1)?)?;
        let left = range.length.checked_sub(address - range.address)?;
        (left > 0).then_some((*index, left))
    }

    /// Returns whether each byte of the range is in a range.
    pub(crate) fn cover(&self, mut address: u64, mut length: u64) -> bool {
        while length > 0 {
            let Some((_, left)) = self.at(address) else { return false };
            let step = left.min(length);
            (address, length) = (address.wrapping_add(step), length - step);
        }
        true
    }
}

impl SliceRule {
    /// Appends the slices of an entry.
    ///
    /// # Errors
    /// A byte is not registered on one side. Nothing was appended then.
    pub(crate) fn cut(
        self,
        index: u32,
        entry: Entry,
        local: impl Fn(u64) -> Option<(u32, u64)>,
        remote: &MemoryRanges,
        slices: &mut Vec<Slice>,
    ) -> Result<(), Unregistered> {
        let before = slices.len();
        let mut done = 0;
        while done < entry.length {
            let at = (entry.local.wrapping_add(done), entry.remote.wrapping_add(done));
            let found = match (local(at.0), remote.at(at.1)) {
                (None, _) => Err(Unregistered::Local),
                (_, None) => Err(Unregistered::Remote),
                (Some(local), Some(remote)) => Ok((local, remote)),
            };
            let ((local_range, local_left), (remote_range, remote_left)) = match found {
                Ok(found) => found,
                Err(side) => {
                    slices.truncate(before);
                    return Err(side);
                }
            };
            let left = (entry.length - done).min(local_left).min(remote_left);
            let whole = u64::from(self.bytes);
            let length = if left <= whole + u64::from(self.tail) { left } else { whole };
            slices.push(Slice {
                entry: index,
                length: u32::try_from(length).expect("a slice is at most twice the slice length"),
                local: at.0,
                remote: at.1,
                local_range,
                remote_range,
                tries: self.tries,
            });
            done += length;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RULE: SliceRule = SliceRule { bytes: 100, tail: 25, tries: 1 };

    fn ranges(ranges: &[(u64, u64)]) -> MemoryRanges {
        MemoryRanges::new(
            ranges
                .iter()
                .map(|(address, length)| MemoryRange { address: *address, length: *length }),
        )
    }

    fn lengths(local: &[(u64, u64)], remote: &[(u64, u64)], length: u64) -> Vec<u32> {
        let entry = Entry { local: 1000, remote: 5000, length };
        let mut slices = Vec::new();
        let local = ranges(local);
        RULE.cut(0, entry, |at| local.at(at), &ranges(remote), &mut slices).unwrap();
        slices.iter().map(|slice| slice.length).collect()
    }

    #[test]
    fn last_slice_takes_a_short_rest() {
        let (local, remote) = ([(1000, 1000)], [(5000, 1000)]);
        assert_eq!(lengths(&local, &remote, 100), [100]);
        assert_eq!(lengths(&local, &remote, 125), [125]);
        assert_eq!(lengths(&local, &remote, 126), [100, 26]);
        assert_eq!(lengths(&local, &remote, 325), [100, 100, 125]);
        assert_eq!(lengths(&local, &remote, 0), [0; 0]);
    }

    #[test]
    fn slices_end_at_borders_of_either_side() {
        let local = [(1000, 30), (1030, 500)];
        let remote = [(5050, 500), (4000, 1050)];
        assert_eq!(lengths(&local, &remote, 200), [30, 20, 100, 50]);
    }

    #[test]
    fn gap_is_reported_by_side() {
        let mut slices = Vec::new();
        let entry = Entry { local: 1000, remote: 5000, length: 200 };
        let whole = ranges(&[(1000, 1000), (5000, 1000)]);
        let gap = ranges(&[(1000, 50), (1060, 1000), (5000, 50), (5060, 1000)]);
        let cut = |local: &MemoryRanges, remote: &MemoryRanges, slices: &mut Vec<Slice>| {
            RULE.cut(0, entry, |at| local.at(at), remote, slices)
        };
        assert_eq!(cut(&gap, &whole, &mut slices), Err(Unregistered::Local));
        assert_eq!(cut(&whole, &gap, &mut slices), Err(Unregistered::Remote));
        assert_eq!(cut(&whole, &ranges(&[]), &mut slices), Err(Unregistered::Remote));
        assert!(slices.is_empty());
        assert!(whole.cover(1000, 1000) && !gap.cover(1000, 60) && gap.cover(1060, 1));
        assert!(!whole.cover(u64::MAX, 2));
    }

    proptest! {
        #[test]
        fn slices_are_the_entry_without_gap_or_overlap(
            cuts in proptest::collection::vec(1_u64..300, 1..20),
            length in 1_u64..2000,
            (bytes, tail) in (1_u32..400, 0_u32..100),
        ) {
            let mut local = Vec::new();
            let mut at = 1000;
            for cut in cuts.iter().cycle().take(2000) {
                local.push(MemoryRange { address: at, length: *cut });
                at += cut;
            }
            let remote = ranges(&[(5000, length / 2), (5000 + length / 2, length)]);
            let entry = Entry { local: 1000, remote: 5000, length };
            let mut slices = Vec::new();
            let rule = SliceRule { bytes, tail, tries: 1 };
            let here = MemoryRanges::new(local.clone());
            rule.cut(7, entry, |at| here.at(at), &remote, &mut slices).unwrap();
            let mut done = 0;
            for slice in &slices {
                prop_assert_eq!((slice.entry, slice.local, slice.remote), (7, 1000 + done, 5000 + done));
                let range = local[slice.local_range as usize];
                prop_assert!(slice.local + u64::from(slice.length) <= range.address + range.length);
                prop_assert!(slice.length <= bytes + tail && slice.length > 0);
                done += u64::from(slice.length);
            }
            prop_assert_eq!(done, length);
        }
    }
}
