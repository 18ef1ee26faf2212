//! A record of which parts arrive: compares and checks them, and puts them in their place.

use super::operation::Completion;
use crate::{
    extent::Extent,
    format::{BLOCK_BYTES, Layout, RecordHead, index::Entry},
    memory::LentRange,
};

/// What became of a read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The checksums hold, and the bytes are in their place.
    Good {
        /// Whether all of them were read past the page cache and went there without a copy.
        is_in_place: bool,
    },
    /// Another record or a damaged one lies there.
    Mismatch,
    /// The system could not read it.
    Failed(String),
}

/// What an operation reads, and what is to be done with it.
#[derive(Debug)]
pub(super) struct Chunk {
    /// The number of the record in the batch.
    pub(super) record: usize,
    /// Where the head lies in the slot, if it is there.
    pub(super) head_at: Option<usize>,
    /// Where the payload lies in the slot, if it is there.
    pub(super) payload_at: usize,
    /// The number of the first block.
    pub(super) block: usize,
    /// The bytes of the blocks: in the slot, or in the memory of the caller if `is_in_place`.
    pub(super) bytes: usize,
    pub(super) is_in_place: bool,
    /// Where bytes of the slot go, if they go anywhere.
    pub(super) target: Option<LentRange>,
    /// The first byte of the blocks that goes there.
    pub(super) target_from: usize,
}

/// The head of a record, as far as it is known.
#[derive(Debug)]
enum Head {
    Pending,
    /// Compared, and kept for the chunks to come.
    Good(Vec<u8>),
    Mismatch,
}

/// A record of which chunks arrive.
#[derive(Debug)]
pub(super) struct PendingRecord<'a> {
    extent: &'a Extent,
    entry: Entry<'a>,
    head: Head,
    /// Chunks that arrived before the head.
    waiting: Vec<(Chunk, Completion)>,
    outstanding: usize,
    is_in_place: bool,
    failure: Option<String>,
}

impl<'a> PendingRecord<'a> {
    /// A record of which as many chunks will arrive.
    pub(super) const fn new(
        extent: &'a Extent,
        entry: Entry<'a>,
        outstanding: usize,
        is_in_place: bool,
    ) -> Self {
        Self {
            extent,
            entry,
            head: Head::Pending,
            waiting: Vec::new(),
            outstanding,
            is_in_place,
            failure: None,
        }
    }

    pub(super) fn accept(&mut self, chunk: Chunk, mut completion: Completion) {
        self.outstanding -= 1;
        if let Err(error) = &completion.result {
            self.failure.get_or_insert_with(|| error.to_string());
            if chunk.head_at.is_some() {
                self.head = Head::Mismatch;
                self.waiting.clear();
            }
            return;
        }
        let Some(head_at) = chunk.head_at else {
            if matches!(self.head, Head::Pending) {
                self.waiting.push((chunk, completion));
            } else {
                self.check(chunk, completion);
            }
            return;
        };
        let layout = Layout::of(self.entry.name, self.entry.length, self.extent.unit());
        let slot = completion.slot.as_mut().map(|slot| slot.bytes()).unwrap_or_default();
        let bytes = &slot[head_at..head_at + layout.head_bytes as usize];
        self.head = match self.extent.head_of(bytes, self.entry) {
            Some(_) => Head::Good(bytes.to_vec()),
            None => Head::Mismatch,
        };
        self.check(chunk, completion);
        for (chunk, completion) in std::mem::take(&mut self.waiting) {
            self.check(chunk, completion);
        }
    }

    /// Checks the blocks of a chunk, and copies those that are not in their place.
    fn check(&mut self, mut chunk: Chunk, mut completion: Completion) {
        let Head::Good(head) = &self.head else { return };
        let Some(head) = RecordHead::decode(head) else { return };
        let holds = |bytes: &[u8]| {
            bytes
                .chunks(BLOCK_BYTES)
                .enumerate()
                .all(|(number, block)| head.holds(chunk.block + number, block))
        };
        if chunk.is_in_place {
            let lent = completion.lent.as_mut().map(LentRange::bytes).unwrap_or_default();
            if !holds(lent) {
                self.head = Head::Mismatch;
            }
            return;
        }
        let slot = completion.slot.as_mut().map(|slot| slot.bytes()).unwrap_or_default();
        let bytes = &slot[chunk.payload_at..chunk.payload_at + chunk.bytes];
        if !holds(bytes) {
            self.head = Head::Mismatch;
            return;
        }
        self.is_in_place &= chunk.bytes == 0;
        if let Some(target) = &mut chunk.target {
            let target = target.bytes();
            target.copy_from_slice(&bytes[chunk.target_from..chunk.target_from + target.len()]);
        }
    }

    pub(super) fn verdict(self) -> Verdict {
        match (self.failure, self.head) {
            (Some(why), _) => Verdict::Failed(why),
            (None, Head::Good(_)) => Verdict::Good { is_in_place: self.is_in_place },
            (None, _) => Verdict::Mismatch,
        }
    }
}
