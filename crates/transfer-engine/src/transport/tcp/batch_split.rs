//! Splitting a batch into frames and merging the outcomes of the parts.

use mooncake_base::{Endpoint, Error, ErrorCode, Result};

use super::{data_frame::ENTRIES_MAX, vectored_io::Span};
use crate::transfer_entry::{RemoteRange, TransferEntry};

/// A part of an entry that fits into one frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    /// The index of the entry in the batch.
    pub(super) entry: usize,
    /// The local address.
    pub(super) address: usize,
    /// The peer's range.
    pub(super) remote: RemoteRange,
    /// True for the last part of the entry.
    pub(super) is_last: bool,
}

/// The maximum payload of a native frame that this side sends. It is below the limit of a request,
/// so that the bytes in flight stay in the CPU cache, which made large transfers over loopback
/// faster than full-size frames. A writer also checks its deadline before each frame.
pub(super) const FRAME_BYTES: usize = 4 << 20;

/// The limits of one frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FrameLimits {
    pub(super) parts: usize,
    pub(super) bytes: usize,
}

/// Splits a batch into frames; holds the position in the batch.
#[derive(Debug)]
pub(super) struct Framer {
    limits: FrameLimits,
    entry: usize,
    offset: usize,
}

impl FrameLimits {
    /// Limits of native frames.
    pub(super) const NATIVE: Self = Self { parts: ENTRIES_MAX, bytes: FRAME_BYTES };
    /// Limits of upstream's frames: one range of any length.
    pub(super) const COMPAT: Self = Self { parts: 1, bytes: usize::MAX };
}

impl Framer {
    /// Creates a framer for the open entries. Entries that need no transfer get their outcome at
    /// once.
    pub(super) fn new(entries: &mut [TransferEntry], limits: FrameLimits) -> Self {
        for entry in entries.iter_mut().filter(|entry| entry.outcome.is_none()) {
            let range = entry.remote_range();
            if range.length == 0 {
                entry.outcome = Some(Ok(()));
            } else if range.address.checked_add(range.length).is_none() {
                let error = Error::invalid("the range of the peer wraps around the address space")
                    .with("address", format_args!("{:#x}", range.address))
                    .with("length", range.length);
                entry.outcome = Some(Err(error));
            }
        }
        Self { limits, entry: 0, offset: 0 }
    }

    /// Puts the parts of the next frame into `parts`, which stays empty at the end of the batch.
    pub(super) fn next_frame(&mut self, entries: &[TransferEntry], parts: &mut Vec<Part>) {
        parts.clear();
        let mut budget = self.limits.bytes;
        while let Some(entry) = entries.get(self.entry) {
            if entry.outcome.is_some() {
                (self.entry, self.offset) = (self.entry + 1, 0);
                continue;
            }
            if budget == 0 || parts.len() == self.limits.parts {
                break;
            }
            let left = entry.local.length() - self.offset;
            let length = left.min(budget);
            let address = entry.remote + self.offset as u64;
            parts.push(Part {
                entry: self.entry,
                address: entry.local.address() + self.offset,
                remote: RemoteRange { address, length: length as u64 },
                is_last: length == left,
            });
            budget -= length;
            self.offset += length;
            if length == left {
                (self.entry, self.offset) = (self.entry + 1, 0);
            }
        }
    }
}

impl Part {
    pub(super) fn length(&self) -> usize {
        self.remote.length as usize
    }

    /// Returns the local memory of the part.
    pub(super) fn span(&self) -> Span {
        // SAFETY: the creator of the entry's `LocalRange` promised that no references exist to
        // bytes that the transfer writes, and that a held range stays mapped until it ends.
        unsafe { Span::new(self.address, self.length()) }
    }

    /// Returns the error for a part that the peer at this endpoint refused.
    pub(super) fn refused(&self, code: ErrorCode, endpoint: &Endpoint) -> Error {
        Error::new(code, "the peer refused the address, it is not in a registered range")
            .with("peer", endpoint)
            .with("address", format_args!("{:#x}", self.remote.address))
            .with("length", self.remote.length)
    }

    /// Records the outcome of the part. The first failure of an entry is kept.
    pub(super) fn complete(&self, entries: &mut [TransferEntry], outcome: Result<()>) {
        let entry = &mut entries[self.entry];
        if entry.outcome.is_none() && (self.is_last || outcome.is_err()) {
            entry.outcome = Some(outcome);
        }
    }
}

/// Fails every entry that has no outcome yet.
pub(super) fn fail_unfinished(entries: &mut [TransferEntry], error: &Error) {
    for entry in entries.iter_mut().filter(|entry| entry.outcome.is_none()) {
        entry.outcome = Some(Err(error.clone()));
    }
}

const _: () = assert!(FRAME_BYTES as u64 <= super::data_frame::PAYLOAD_BYTES_MAX);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::transfer_entry::LocalRange;

    fn entry(address: usize, length: usize, remote: u64) -> TransferEntry {
        // SAFETY: the entry is never transferred.
        TransferEntry::new(unsafe { LocalRange::foreign(address, length) }, remote)
    }

    #[test]
    fn empty_and_invalid_entries_need_no_transfer() {
        let mut entries = [entry(1, 0, 5), entry(1, 2, u64::MAX)];
        let mut parts = Vec::new();
        Framer::new(&mut entries, FrameLimits::NATIVE).next_frame(&entries, &mut parts);
        assert_eq!(parts, []);
        assert!(matches!(entries[0].outcome, Some(Ok(()))));
        assert!(matches!(entries[1].outcome, Some(Err(_))));
    }

    #[test]
    fn skips_the_rest_of_a_failed_entry() {
        let mut entries = [entry(1, 3 * FRAME_BYTES, 5), entry(9, 1, 9)];
        let mut parts = Vec::new();
        let mut framer = Framer::new(&mut entries, FrameLimits::NATIVE);
        framer.next_frame(&entries, &mut parts);
        parts[0].complete(&mut entries, Err(Error::internal("test")));
        framer.next_frame(&entries, &mut parts);
        assert_eq!(parts.iter().map(|part| part.entry).collect::<Vec<_>>(), [1]);
    }

    proptest! {
        #[test]
        fn every_byte_is_in_exactly_one_part(
            lengths in proptest::collection::vec(prop_oneof![0..5_usize, 0..40_000_000_usize], 0..20),
        ) {
            let mut entries: Vec<_> =
                lengths.iter().map(|&length| entry(1000, length, 5000)).collect();
            let mut framer = Framer::new(&mut entries, FrameLimits::NATIVE);
            let (mut parts, mut moved) = (Vec::new(), vec![0; lengths.len()]);
            loop {
                framer.next_frame(&entries, &mut parts);
                if parts.is_empty() {
                    break;
                }
                let bytes: usize = parts.iter().map(Part::length).sum();
                prop_assert!(bytes <= FRAME_BYTES && parts.len() <= ENTRIES_MAX);
                for part in &parts {
                    prop_assert_eq!(part.address, 1000 + moved[part.entry]);
                    prop_assert_eq!(part.remote.address, 5000 + moved[part.entry] as u64);
                    moved[part.entry] += part.length();
                    part.complete(&mut entries, Ok(()));
                    let is_done = moved[part.entry] == lengths[part.entry];
                    prop_assert_eq!(entries[part.entry].outcome.is_some(), is_done);
                }
            }
            prop_assert_eq!(moved, lengths);
            prop_assert!(entries.iter().all(|entry| matches!(entry.outcome, Some(Ok(())))));
        }
    }
}
