//! The memory of all processes, word by word. As in the product, a peer names an endpoint and an
//! address, and the holder does not know for which object the words are.

use std::collections::{BTreeMap, HashMap};

use mooncake_base::SegmentId;

use crate::plan::WORD_BYTES;

/// The registered memory of all processes.
#[derive(Debug, Default)]
pub(crate) struct Memories {
    /// Ranges by the endpoint of their process and their first address.
    ranges: BTreeMap<(u64, u64), Vec<u64>>,
    /// Where each segment lies.
    by_id: HashMap<SegmentId, (u64, u64)>,
}

impl Memories {
    /// Adds a zeroed segment of a process at an address.
    pub(crate) fn add(&mut self, owner: u64, id: SegmentId, base: u64, words: u64) {
        self.by_id.insert(id, (owner, base));
        self.ranges.insert((owner, base), vec![0; words as usize]);
    }

    /// Removes a segment. Later accesses fail.
    pub(crate) fn remove(&mut self, id: SegmentId) {
        if let Some(range) = self.by_id.remove(&id) {
            self.ranges.remove(&range);
        }
    }

    /// Removes all segments of a dead process.
    pub(crate) fn remove_all(&mut self, owner: u64) {
        self.by_id.retain(|_, (process, _)| *process != owner);
        self.ranges.retain(|(process, _), _| *process != owner);
    }

    pub(crate) fn exists(&self, id: SegmentId) -> bool {
        self.by_id.contains_key(&id)
    }

    /// Writes one word at an address of a process. Returns false if the memory is gone.
    pub(crate) fn write(&mut self, owner: u64, address: u64, content: u64) -> bool {
        let found = self.ranges.range_mut((owner, 0)..=(owner, address)).next_back();
        let word = found
            .and_then(|((_, base), words)| words.get_mut(((address - base) / WORD_BYTES) as usize));
        word.map(|word| *word = content).is_some()
    }

    /// Reads one word at an address of a process. Returns `None` if the memory is gone.
    pub(crate) fn read(&self, owner: u64, address: u64) -> Option<u64> {
        let ((_, base), words) = self.ranges.range((owner, 0)..=(owner, address)).next_back()?;
        words.get(((address - base) / WORD_BYTES) as usize).copied()
    }
}
