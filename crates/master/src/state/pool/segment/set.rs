//! A set of segments, asked for each candidate of a put: a bit per slot.

use crate::state::ids::{SegmentSlot, Slot};

/// A set of segments, valid until a segment leaves the pool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::state) struct SegmentSet(Vec<u64>);

impl SegmentSet {
    pub(in crate::state) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(in crate::state) fn contains(&self, segment: SegmentSlot) -> bool {
        let (word, bit) = place(segment);
        self.0.get(word).is_some_and(|bits| bits & bit != 0)
    }

    pub(super) fn insert(&mut self, segment: SegmentSlot) {
        let (word, bit) = place(segment);
        if word >= self.0.len() {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= bit;
    }
}

impl FromIterator<SegmentSlot> for SegmentSet {
    fn from_iter<I: IntoIterator<Item = SegmentSlot>>(slots: I) -> Self {
        let mut set = Self::default();
        slots.into_iter().for_each(|slot| set.insert(slot));
        set
    }
}

fn place(segment: SegmentSlot) -> (usize, u64) {
    let index = segment.index();
    (index / u64::BITS as usize, 1 << (index % u64::BITS as usize))
}
