//! The memory of all segments, word by word.

use std::collections::HashMap;

use mooncake_base::SegmentId;

/// The segments of all processes.
#[derive(Debug, Default)]
pub(crate) struct Memories(HashMap<SegmentId, Segment>);

#[derive(Debug)]
struct Segment {
    owner: u64,
    words: Vec<u64>,
}

impl Memories {
    /// Adds a zeroed segment of a process.
    pub(crate) fn add(&mut self, owner: u64, id: SegmentId, words: u64) {
        self.0.insert(id, Segment { owner, words: vec![0; words as usize] });
    }

    /// Removes a segment. Later accesses fail.
    pub(crate) fn remove(&mut self, id: SegmentId) {
        self.0.remove(&id);
    }

    /// Removes all segments of a dead process.
    pub(crate) fn remove_all(&mut self, owner: u64) {
        self.0.retain(|_, segment| segment.owner != owner);
    }

    pub(crate) fn exists(&self, id: SegmentId) -> bool {
        self.0.contains_key(&id)
    }

    /// Writes one word. Returns false if the memory is gone.
    pub(crate) fn write(&mut self, id: SegmentId, word: u64, content: u64) -> bool {
        let found = self.0.get_mut(&id).and_then(|segment| segment.words.get_mut(word as usize));
        found.map(|word| *word = content).is_some()
    }

    /// Reads one word. Returns `None` if the memory is gone.
    pub(crate) fn read(&self, id: SegmentId, word: u64) -> Option<u64> {
        self.0.get(&id)?.words.get(word as usize).copied()
    }
}
