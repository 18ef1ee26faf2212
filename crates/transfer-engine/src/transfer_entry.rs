//! The unit of work: one transfer between a local range and a range of a peer.

use mooncake_base::Result;

/// Direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Opcode {
    /// From the peer into local memory.
    Read,
    /// From local memory to the peer.
    Write,
}

/// How far a local address can be relied on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ownership {
    /// Kept mapped by an owner that outlives the transfer: a buffer view, an engine mapping, a
    /// registered region.
    Held,
    /// Kept mapped, but its pages may vanish at any moment, as those of a mapped file that somebody
    /// shortens: only accessed by system calls, which report that as an error.
    Volatile,
    /// A bare number from a caller, only accessed in ways that report a bad address as an error.
    Foreign,
}

/// Local memory of one entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalRange {
    address: usize,
    length: usize,
    ownership: Ownership,
}

// A range is an address plus a promise made at its creation, so it may go to another thread.
impl LocalRange {
    /// Describes a range that stays mapped until its transfer has returned.
    ///
    /// # Safety
    /// `address..address + length` is mapped, readable (and writable, for [`Opcode::Read`]), and
    /// stays so until the transfer has returned. No Rust reference exists to bytes that the
    /// transfer writes.
    pub unsafe fn held(address: *mut u8, length: usize) -> Self {
        Self { address: address as usize, length, ownership: Ownership::Held }
    }

    /// Describes a range given by a number. If the range is not mapped, the entry fails and nothing
    /// crashes. The range may be memory of a CUDA device.
    ///
    /// # Safety
    /// No Rust reference exists to bytes that the transfer writes.
    pub const unsafe fn foreign(address: usize, length: usize) -> Self {
        Self { address, length, ownership: Ownership::Foreign }
    }

    /// Describes a part of a mapped file, which the transfer accesses only by system calls.
    ///
    /// # Safety
    /// The range stays mapped until the transfer has returned, and no Rust reference exists to it.
    pub(crate) const unsafe fn volatile(address: usize, length: usize) -> Self {
        Self { address, length, ownership: Ownership::Volatile }
    }

    /// Returns `length` bytes of the range, starting `from` bytes after its beginning.
    ///
    /// # Panics
    /// If the part is not inside the range.
    pub const fn part(&self, from: usize, length: usize) -> Self {
        assert!(from <= self.length && length <= self.length - from);
        Self { address: self.address.wrapping_add(from), length, ownership: self.ownership }
    }

    /// Joins this range with one that starts where it ends; `None` if they are not adjacent.
    pub(crate) fn joined(&self, next: Self) -> Option<Self> {
        let is_next = self.ownership == next.ownership
            && self.address.checked_add(self.length) == Some(next.address);
        if !is_next {
            return None;
        }
        self.length.checked_add(next.length).map(|length| Self { length, ..*self })
    }

    /// First address.
    pub const fn address(&self) -> usize {
        self.address
    }

    /// Length in bytes.
    pub const fn length(&self) -> usize {
        self.length
    }

    /// How far the address can be relied on.
    pub const fn ownership(&self) -> Ownership {
        self.ownership
    }
}

/// Memory of a peer, by its address in the peer's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteRange {
    /// First address.
    pub address: u64,
    /// Length in bytes.
    pub length: u64,
}

/// One entry of a batch and, in the end, its outcome.
#[derive(Debug)]
pub struct TransferEntry {
    /// The local side. Its length is the length of the entry.
    pub local: LocalRange,
    /// The address on the peer's side.
    pub remote: u64,
    /// `None` until the entry is done.
    pub outcome: Option<Result<()>>,
    /// Whether bytes of a write may still arrive at the peer after the entry is done: an attempt was
    /// given up on one connection or path, and another one was made. The memory must not be given to
    /// others before such bytes are out of date.
    pub may_arrive_late: bool,
}

impl TransferEntry {
    /// Creates an entry that is still to be done.
    pub const fn new(local: LocalRange, remote: u64) -> Self {
        Self { local, remote, outcome: None, may_arrive_late: false }
    }

    /// Returns how many of the first entries are open and contiguous on both sides, and the local
    /// range that they cover together.
    ///
    /// # Panics
    /// If there is no entry.
    pub(crate) fn contiguous_run(entries: &[Self]) -> (usize, LocalRange) {
        let mut whole = entries[0].local;
        let mut count = 1;
        for next in &entries[1..] {
            let end = entries[0].remote.checked_add(whole.length as u64);
            let is_next = next.outcome.is_none() && end == Some(next.remote);
            let (true, Some(longer)) = (is_next, whole.joined(next.local)) else { break };
            whole = longer;
            count += 1;
        }
        (count, whole)
    }

    /// Records that a write of the open entries was given up and will be tried again.
    pub(crate) fn mark_given_up(opcode: Opcode, entries: &mut [Self]) {
        if opcode == Opcode::Write {
            let open = entries.iter_mut().filter(|entry| entry.outcome.is_none());
            open.for_each(|entry| entry.may_arrive_late = true);
        }
    }

    /// The range on the peer's side.
    pub const fn remote_range(&self) -> RemoteRange {
        RemoteRange { address: self.remote, length: self.local.length as u64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(address: usize, length: usize, remote: u64) -> TransferEntry {
        // SAFETY: nothing is transferred.
        TransferEntry::new(unsafe { LocalRange::foreign(address, length) }, remote)
    }

    #[test]
    fn entries_are_contiguous_only_where_both_sides_are() {
        let first = || entry(4096, 100, 7000);
        let count = |next: TransferEntry| {
            TransferEntry::contiguous_run(&[first(), next, entry(4296, 9, 7200)])
        };
        let (entries, whole) = count(entry(4196, 100, 7100));
        assert_eq!((entries, whole.address(), whole.length()), (3, 4096, 209));
        assert_eq!(count(entry(4197, 100, 7100)).0, 1, "a gap here");
        assert_eq!(count(entry(4196, 100, 7101)).0, 1, "a gap there");
        assert_eq!(count(entry(4196, 99, 7100)).0, 2);
        let mut done = entry(4196, 100, 7100);
        done.outcome = Some(Ok(()));
        assert_eq!(count(done).0, 1);
        // SAFETY: nothing is transferred.
        let held = unsafe { LocalRange::held(4196 as *mut u8, 100) };
        assert_eq!(count(TransferEntry::new(held, 7100)).0, 1, "another ownership");
        let last = TransferEntry::contiguous_run(&[entry(usize::MAX, 1, 1), entry(0, 1, 2)]);
        assert_eq!(last.0, 1);
    }
}
