//! The memory that clients lend, word by word, and who still has it.

use std::collections::HashMap;

use mooncake_base::SegmentId;

/// All memory of all processes.
#[derive(Debug, Default)]
pub(crate) struct Memories(HashMap<SegmentId, Lent>);

#[derive(Debug)]
struct Lent {
    owner: u64,
    words: Vec<u64>,
}

impl Memories {
    /// The process lends new memory.
    pub(crate) fn lend(&mut self, owner: u64, id: SegmentId, words: u64) {
        self.0.insert(id, Lent { owner, words: vec![0; words as usize] });
    }

    /// The owner takes it back: whoever touches it from now on is refused.
    pub(crate) fn withdraw(&mut self, id: SegmentId) {
        self.0.remove(&id);
    }

    /// The process is dead, and its memory with it.
    pub(crate) fn withdraw_all(&mut self, owner: u64) {
        self.0.retain(|_, lent| lent.owner != owner);
    }

    pub(crate) fn is_lent(&self, id: SegmentId) -> bool {
        self.0.contains_key(&id)
    }

    /// Writes one word; whether it is there.
    pub(crate) fn write(&mut self, id: SegmentId, word: u64, content: u64) -> bool {
        let found = self.0.get_mut(&id).and_then(|lent| lent.words.get_mut(word as usize));
        found.map(|word| *word = content).is_some()
    }

    /// Reads one word, if it is there.
    pub(crate) fn read(&self, id: SegmentId, word: u64) -> Option<u64> {
        self.0.get(&id)?.words.get(word as usize).copied()
    }
}
