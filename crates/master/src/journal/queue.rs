//! The queue of effects to be written: already in frames, so that writing costs no copy.

use super::{
    NewFile,
    log_frame::{FRAME_BYTES, PAYLOAD_TARGET},
};
use crate::state::Effect;

/// A queue buffer that grew beyond this size is freed once it is empty.
const KEPT_BYTES_MAX: usize = 4 << 20;

/// Effects in the order in which they happened.
#[derive(Debug)]
pub(super) struct Queue {
    batch: Batch,
    /// The log position behind the last effect: the total bytes of all effects so far.
    end: u64,
}

/// What is written at a time.
#[derive(Debug)]
pub(super) struct Batch {
    /// Frames, each with space for its head.
    bytes: Vec<u8>,
    /// Where the frames but the first begin.
    cuts: Vec<usize>,
    pub(super) records: u64,
    /// The file in which the frames from an index on belong.
    pub(super) next_file: Option<(usize, NewFile)>,
    /// The log position behind the last effect.
    pub(super) end: u64,
}

impl Default for Queue {
    fn default() -> Self {
        Self { batch: Batch::empty(Vec::new()), end: 0 }
    }
}

impl Queue {
    /// Appends the effects that `take` appends to a buffer, and whose number it returns. Returns the
    /// position behind them.
    pub(super) fn append(&mut self, take: impl FnOnce(&mut Vec<u8>) -> u64) -> u64 {
        let batch = &mut self.batch;
        if batch.last_frame().len() >= PAYLOAD_TARGET {
            batch.cut();
        }
        let before = batch.bytes.len();
        batch.records += take(&mut batch.bytes);
        let taken = batch.bytes.len() - before;
        if taken > PAYLOAD_TARGET {
            let effects = batch.bytes.split_off(before);
            for part in Effect::split(&effects, PAYLOAD_TARGET) {
                batch.bytes.extend_from_slice(part);
                batch.cut();
            }
        }
        self.end += taken as u64;
        self.end
    }

    /// Continues in another file from the next effect on.
    pub(super) fn continue_in(&mut self, file: NewFile) {
        if self.batch.last_frame().len() > FRAME_BYTES {
            self.batch.cut();
        }
        self.batch.next_file = Some((self.batch.cuts.len(), file));
    }

    /// Returns the position behind the last effect.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// Returns the bytes that wait to be written.
    pub(super) fn backlog(&self) -> usize {
        self.batch.bytes.len()
    }

    /// Takes what is queued; `spare` is the buffer of an earlier batch.
    pub(super) fn take(&mut self, spare: Vec<u8>) -> Batch {
        let mut batch = std::mem::replace(&mut self.batch, Batch::empty(spare));
        batch.end = self.end;
        batch
    }
}

impl Batch {
    fn empty(mut bytes: Vec<u8>) -> Self {
        if bytes.capacity() > KEPT_BYTES_MAX {
            bytes = Vec::new();
        }
        bytes.clear();
        bytes.resize(FRAME_BYTES, 0);
        Self { bytes, cuts: Vec::new(), records: 0, next_file: None, end: 0 }
    }

    /// Begins another frame.
    fn cut(&mut self) {
        self.cuts.push(self.bytes.len());
        self.bytes.resize(self.bytes.len() + FRAME_BYTES, 0);
    }

    fn last_frame(&self) -> &[u8] {
        &self.bytes[self.cuts.last().copied().unwrap_or(0)..]
    }

    /// Hands each frame that has a payload to `seal`, and returns the bytes of the frames from the
    /// `first` on and before the `end`, if there is one.
    pub(super) fn frames(
        &mut self,
        first: usize,
        end: Option<usize>,
        mut seal: impl FnMut(&mut [u8]),
    ) -> &[u8] {
        let start_of = |index: usize| match index {
            0 => 0,
            _ => self.cuts.get(index - 1).copied().unwrap_or(self.bytes.len()),
        };
        let range = start_of(first)..end.map_or(self.bytes.len(), start_of);
        let mut start = range.start;
        let last = end.unwrap_or(self.cuts.len() + 1);
        let ends: Vec<usize> = (first + 1..=last).map(start_of).collect();
        let mut kept = range.end;
        for end in ends {
            if end - start > FRAME_BYTES {
                seal(&mut self.bytes[start..end]);
            } else {
                // Only the last frame is ever without a payload.
                kept = start.min(kept);
            }
            start = end;
        }
        &self.bytes[range.start..kept]
    }

    /// Returns the buffer for the next batch.
    pub(super) fn into_spare(self) -> Vec<u8> {
        self.bytes
    }
}
