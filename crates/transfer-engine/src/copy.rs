//! The only place where bytes are copied between addresses of this process.
//!
//! Memory that an owner keeps mapped ([`Ownership::Held`]) is simply copied. A bare number
//! ([`Ownership::Foreign`]) may not be mapped. There the kernel checks the pages first, block by
//! block, or copies the bytes itself: always those of mapped files, whose pages may vanish after a
//! check. Either way a bad address is an error, where a plain copy would end the process.
//!
//! One [`Copier`] serves all entries of a transfer. It checks adjacent entries together
//! and uses non-temporal stores for large transfers.

mod page_check;

use std::{
    io,
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
};

use mooncake_base::{Error, ErrorCode, Result};
use mooncake_os::memory::{
    nontemporal::{self, copy_cached},
    page_size,
};

use crate::transfer_entry::{LocalRange, Ownership, TransferEntry};

pub(crate) use self::page_check::{are_resident, is_unmapped, node_of};

/// Up to this length, one system call that checks and copies is faster than a check followed by a
/// copy.
const KERNEL_COPY_MAX: usize = 32 << 10;

/// Bytes checked at once, right before they are copied. The block is small, so that another thread
/// has little time to unmap it in between and its bytes are still in the cache.
const BLOCK: usize = page_check::CHECK_BYTES_MAX;

/// Transfers of at least this many bytes, over all entries, use non-temporal stores. The bytes of
/// smaller ones are likely to be used again while a private cache of the processor still holds
/// them, and a call of 64 KiB was not faster with them.
const NONTEMPORAL_BYTES_MIN: usize = 256 << 10;

/// From this many bytes on, over all entries, also short entries are copied with non-temporal
/// stores: 64 MiB in ranges of 1 KiB take 4.7 ms instead of 11.9, as measured.
const SHORT_NONTEMPORAL_BYTES_MIN: usize = 4 << 20;

/// A shorter copy uses up as much of a check as this many bytes, so that little time passes between
/// a check and its last use.
const CHECK_COST_MIN: usize = 4 << 10;

/// Copies `from` to `to`, which are of the same length and may overlap.
///
/// # Errors
/// A foreign range is not mapped, not readable (`from`) or not writable (`to`). A part of the bytes
/// may have been copied.
pub fn copy(from: LocalRange, to: LocalRange) -> Result<()> {
    Copier::default().copy(from, to)
}

/// Copies the entries of one transfer and remembers which foreign memory was just checked. Drop it
/// with the transfer: the check is soon out of date, and only then do all other threads see the
/// bytes.
#[derive(Debug, Default)]
pub(crate) struct Copier {
    source: CheckedRange,
    target: CheckedRange,
    /// Copies of at least this length use non-temporal stores.
    nontemporal_min: Option<usize>,
    /// True if other threads may not see all copied bytes yet.
    has_stores_in_flight: bool,
}

/// A recently checked range of foreign memory on one side of a copy.
#[derive(Debug, Default)]
struct CheckedRange {
    /// Was readable and writable a moment ago.
    range: Range<usize>,
    /// Bytes that may still be copied before the next check.
    budget: usize,
    /// Block of the last entry that was outside `range`.
    last: usize,
}

impl Copier {
    /// Creates a copier for the open entries of a transfer.
    pub(crate) fn of(entries: &[TransferEntry]) -> Self {
        let lengths = entries.iter().filter(|entry| entry.outcome.is_none());
        let bytes = lengths.fold(0, |sum: usize, entry| sum.saturating_add(entry.local.length()));
        let nontemporal_min = match bytes {
            SHORT_NONTEMPORAL_BYTES_MIN.. => Some(nontemporal::SHORT_LENGTH_MIN),
            NONTEMPORAL_BYTES_MIN.. => Some(nontemporal::LENGTH_MIN),
            _ => None,
        };
        let mut copier = Self::default();
        copier.nontemporal_min = nontemporal_min;
        copier
    }

    /// Copies as [`copy`] does.
    pub(crate) fn copy(&mut self, from: LocalRange, to: LocalRange) -> Result<()> {
        debug_assert_eq!(from.length(), to.length(), "both sides of a copy are of one length");
        let length = from.length().min(to.length());
        if from.ownership() == Ownership::Held && to.ownership() == Ownership::Held {
            self.move_bytes(from.address(), to.address(), length);
            return Ok(());
        }
        let mut done = 0;
        while done < length {
            let part = BLOCK.min(length - done);
            let (source, target) = (from.address() + done, to.address() + done);
            let readable = match from.ownership() {
                Ownership::Held => PageState::Mapped,
                Ownership::Foreign => self.source.check(source, part, Access::Read),
                Ownership::Volatile => PageState::Unknown,
            };
            let writable = match to.ownership() {
                Ownership::Held => PageState::Mapped,
                Ownership::Foreign => self.target.check(target, part, Access::Write),
                Ownership::Volatile => PageState::Unknown,
            };
            match (readable, writable) {
                (PageState::Mapped, PageState::Mapped) => self.move_bytes(source, target, part),
                (PageState::Bad, _) => return Err(unreadable(from.address(), length)),
                (_, PageState::Bad) => return Err(unwritable(to.address(), length)),
                _ => copy_by_kernel(source, target, part)?,
            }
            done += part;
        }
        Ok(())
    }

    fn move_bytes(&mut self, source: usize, target: usize, length: usize) {
        let is_nontemporal = self.nontemporal_min.is_some_and(|least| length >= least);
        self.has_stores_in_flight |= is_nontemporal;
        let move_bytes = if is_nontemporal { nontemporal::copy } else { copy_cached };
        // SAFETY: both ranges are held by an owner until the transfer returns, or were found mapped
        // with these rights a moment ago. They may overlap, which both functions allow. Other
        // processes and threads may write to shared memory meanwhile; then bytes are mixed, as with
        // any one-sided transfer, and nothing here depends on their values.
        unsafe { move_bytes(source, target, length) };
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        if self.has_stores_in_flight {
            nontemporal::fence();
        }
    }
}

impl CheckedRange {
    /// Checks whether foreign memory of at most one block can be accessed now. `Unknown` means that
    /// the kernel has to copy it.
    fn check(&mut self, address: usize, length: usize, access: Access) -> PageState {
        let Some(end) = address.checked_add(length) else { return PageState::Bad };
        let cost = length.max(CHECK_COST_MIN);
        if self.range.start <= address && end <= self.range.end && self.budget >= cost {
            self.budget -= cost;
            return PageState::Mapped;
        }
        let window = address & !(BLOCK - 1);
        let is_alone = std::mem::replace(&mut self.last, window) != window;
        if is_alone && length <= KERNEL_COPY_MAX {
            return PageState::Unknown;
        }
        let window_end = window.saturating_add(BLOCK);
        let wanted = if end <= window_end && !is_alone { window..window_end } else { address..end };
        match page_check::accessible_part(address, &wanted) {
            Some(found) if found.end >= end => {
                self.range = found;
                self.budget = BLOCK.saturating_sub(cost);
                PageState::Mapped
            }
            _ if length <= KERNEL_COPY_MAX => PageState::Unknown,
            _ => match populate(address, length, access) {
                // A mapped file may be shortened right after the check. The kernel copies its bytes
                // at two thirds of the speed, and reports a page that is gone.
                PageState::Mapped if page_check::may_vanish(address..end) => PageState::Unknown,
                state => state,
            },
        }
    }
}

/// Copies memory into a slice of the same length.
///
/// # Errors
/// The range is foreign and not mapped or not readable.
pub fn read(from: LocalRange, into: &mut [u8]) -> Result<()> {
    // SAFETY: the slice is borrowed exclusively until the copy has returned.
    copy(from, unsafe { LocalRange::held(into.as_mut_ptr(), into.len()) })
}

/// Copies memory into a short block again and again, from its beginning to its end, and hands out
/// each copy. Other threads may write to the memory meanwhile; the copy does not change.
///
/// # Errors
/// The range is foreign and not mapped or not readable.
///
/// # Panics
/// The block is empty.
pub fn read_by_block(
    from: LocalRange,
    block: &mut [u8],
    mut visit: impl FnMut(&[u8]),
) -> Result<()> {
    let mut copier = Copier::default();
    for at in (0..from.length()).step_by(block.len()) {
        let length = block.len().min(from.length() - at);
        let copied = &mut block[..length];
        // SAFETY: the slice is borrowed exclusively until the copy has returned.
        let into = unsafe { LocalRange::held(copied.as_mut_ptr(), length) };
        copier.copy(from.part(at, length), into)?;
        visit(copied);
    }
    Ok(())
}

/// Kind of memory access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// Returns whether the range permits this access now, without touching it. Used for error messages.
pub(crate) fn is_accessible(range: LocalRange, access: Access) -> bool {
    range.ownership() == Ownership::Held
        || populate(range.address(), range.length(), access) == PageState::Mapped
}

/// Finds out about many ranges, in the order of their addresses, whether they can be written and stay so
/// unless their owner unmaps them: nobody can take their pages away, as those of a file that is shortened.
#[derive(Debug, Default)]
pub(crate) struct LastingCheck {
    /// Addresses of mappings whose pages nobody can take away.
    lasting: Range<usize>,
}

impl LastingCheck {
    pub(crate) fn is_lasting(&mut self, range: Range<usize>) -> bool {
        if populate(range.start, range.len(), Access::Write) != PageState::Mapped {
            return false;
        }
        if self.lasting.start > range.start || self.lasting.end < range.end {
            self.lasting = range.start..page_check::lasting_end(range.clone());
        }
        self.lasting.end >= range.end
    }
}

/// Returns the error for local memory that cannot be read or written.
pub(crate) fn inaccessible(range: LocalRange, access: Access) -> Error {
    match access {
        Access::Read => unreadable(range.address(), range.length()),
        Access::Write => unwritable(range.address(), range.length()),
    }
}

fn unreadable(address: usize, length: usize) -> Error {
    Error::invalid("the memory is not mapped or cannot be read")
        .with("address", format_args!("{address:#x}"))
        .with("length", length)
}

fn unwritable(address: usize, length: usize) -> Error {
    Error::invalid("the memory is not mapped or cannot be written")
        .with("address", format_args!("{address:#x}"))
        .with("length", length)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PageState {
    Mapped,
    Bad,
    /// No verdict from the kernel (an old kernel, protected memory, device memory), or one that may
    /// be out of date before the copy (a mapped file).
    Unknown,
}

/// Asks the kernel to populate the pages with these rights, which changes no byte.
fn populate(address: usize, length: usize, access: Access) -> PageState {
    static IS_UNSUPPORTED: AtomicBool = AtomicBool::new(false);
    if IS_UNSUPPORTED.load(Ordering::Relaxed) {
        return PageState::Unknown;
    }
    let first = address & !(page_size() - 1);
    // A range that ends within a page of the last address would wrap around in the kernel, too.
    if address.checked_add(length).is_none_or(|end| end.checked_add(page_size()).is_none()) {
        return PageState::Bad;
    }
    let span = address + length - first;
    let advice = match access {
        Access::Read => libc::MADV_POPULATE_READ,
        Access::Write => libc::MADV_POPULATE_WRITE,
    };
    // SAFETY: this advice changes no byte and no mapping; a range that is not mapped is refused.
    if unsafe { libc::madvise(first as *mut _, span, advice) } == 0 {
        return PageState::Mapped;
    }
    match io::Error::last_os_error().raw_os_error() {
        // An unknown advice, or memory that is protected or belongs to a device. Only the first is
        // permanent.
        Some(libc::EINVAL) => {
            let own = 0_u8;
            let page = (&raw const own) as usize & !(page_size() - 1);
            // SAFETY: as above; the page belongs to this thread's stack.
            let failed =
                unsafe { libc::madvise(page as *mut _, page_size(), libc::MADV_POPULATE_READ) };
            IS_UNSUPPORTED.store(failed != 0, Ordering::Relaxed);
            PageState::Unknown
        }
        Some(libc::EAGAIN | libc::EINTR | libc::EBUSY) => PageState::Unknown,
        _ => PageState::Bad,
    }
}

/// Lets the kernel copy from this process to this process.
fn copy_by_kernel(source: usize, target: usize, length: usize) -> Result<()> {
    let mut done = 0;
    while done < length {
        let from = libc::iovec { iov_base: (source + done) as *mut _, iov_len: length - done };
        let to = libc::iovec { iov_base: (target + done) as *mut _, iov_len: length - done };
        let own = std::process::id() as libc::pid_t;
        // SAFETY: the kernel checks both ranges and returns an error where they are not mapped; the
        // two descriptions live during the call.
        let moved = unsafe { libc::process_vm_readv(own, &raw const to, 1, &raw const from, 1, 0) };
        match usize::try_from(moved) {
            Ok(0) => return Err(refused(source, target, length)),
            Ok(moved) => done += moved,
            Err(_) => {
                let error = io::Error::last_os_error();
                match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    Some(libc::EFAULT) => return Err(refused(source, target, length)),
                    _ => {
                        let text = "unchecked memory cannot be copied without process_vm_readv";
                        return Err(Error::new(ErrorCode::TRANSFER_FAIL, text).caused_by(error));
                    }
                }
            }
        }
    }
    Ok(())
}

/// Finds out afterwards which side of a copy was at fault.
fn refused(source: usize, target: usize, length: usize) -> Error {
    // Protected memory is "unknown" like device memory, so only `Mapped` is conclusive.
    match populate(target, length, Access::Write) {
        PageState::Mapped => unreadable(source, length),
        _ => unwritable(target, length),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(bytes: &mut [u8]) -> LocalRange {
        // SAFETY: the slice outlives the copy of the test.
        unsafe { LocalRange::held(bytes.as_mut_ptr(), bytes.len()) }
    }

    fn foreign(address: usize, length: usize) -> LocalRange {
        // SAFETY: the test holds no reference while it copies.
        unsafe { LocalRange::foreign(address, length) }
    }

    #[test]
    fn memory_is_read_block_by_block() {
        let bytes: Vec<u8> = (0..10_000_u32).map(|at| (at % 251) as u8).collect();
        for (length, block) in [(0, 16), (1, 16), (4096, 4096), (10_000, 4096)] {
            let mut seen = Vec::new();
            let from = foreign(bytes.as_ptr() as usize, length);
            read_by_block(from, &mut vec![0; block], |part| seen.extend_from_slice(part)).unwrap();
            assert_eq!(seen, bytes[..length]);
        }
        let unmapped = foreign(4096, 10_000);
        assert!(read_by_block(unmapped, &mut [0; 64], |_| panic!("nothing is read")).is_err());
    }

    /// Pages with these rights, unmapped on drop.
    struct Pages(usize, usize);

    impl Pages {
        fn new(length: usize, rights: i32) -> Self {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: a new mapping at an address that the kernel chooses.
            let base = unsafe { libc::mmap(std::ptr::null_mut(), length, rights, flags, -1, 0) };
            assert_ne!(base, libc::MAP_FAILED);
            Self(base as usize, length)
        }
    }

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: the mapping is this test's own.
            unsafe { libc::munmap(self.0 as *mut _, self.1) };
        }
    }

    #[test]
    fn copies_exactly_the_range_for_every_length_and_ownership() {
        for length in [0, 1, 7, 4095, 4097, KERNEL_COPY_MAX, KERNEL_COPY_MAX + 1, BLOCK + 3] {
            let mut from: Vec<u8> = (0..length + 2).map(|i| (i % 251) as u8).collect();
            let wanted = from.clone();
            for (source_foreign, target_foreign) in
                [(false, false), (true, false), (false, true), (true, true)]
            {
                let mut to = vec![0; length + 2];
                let select = |range: LocalRange, is_foreign: bool| {
                    if is_foreign { foreign(range.address(), range.length()) } else { range }
                };
                let source = select(held(&mut from[1..=length]), source_foreign);
                let target = select(held(&mut to[1..=length]), target_foreign);
                for nontemporal_min in [None, Some(1)] {
                    to.fill(0);
                    let mut copier = Copier::default();
                    copier.nontemporal_min = nontemporal_min;
                    copier.copy(source, target).unwrap();
                    assert!(to[1..=length] == wanted[1..=length], "{length}");
                    assert_eq!((to[0], to[length + 1]), (0, 0), "{length}");
                }
            }
        }
    }

    #[test]
    fn large_transfers_use_nontemporal_stores() {
        let shortest = |lengths: &[usize]| {
            let entries: Vec<_> = lengths
                .iter()
                .map(|length| TransferEntry::new(foreign(4096, *length), 0))
                .collect();
            Copier::of(&entries).nontemporal_min
        };
        assert_eq!(shortest(&[NONTEMPORAL_BYTES_MIN - 1]), None);
        assert_eq!(shortest(&[NONTEMPORAL_BYTES_MIN]), Some(nontemporal::LENGTH_MIN));
        assert_eq!(shortest(&[NONTEMPORAL_BYTES_MIN / 2; 2]), Some(nontemporal::LENGTH_MIN));
        let many = [1024; SHORT_NONTEMPORAL_BYTES_MIN / 1024];
        assert_eq!(shortest(&many), Some(nontemporal::SHORT_LENGTH_MIN));
    }

    #[test]
    fn error_names_unmapped_or_protected_memory() {
        let mut good = vec![7; 4 << 20];
        let none = Pages::new(4 << 20, libc::PROT_NONE);
        let constant = Pages::new(4 << 20, libc::PROT_READ);
        for length in [1, 4096, KERNEL_COPY_MAX + 1, 4 << 20] {
            for address in [0, 8, none.0, usize::MAX - length] {
                let bad = foreign(address, length);
                for (from, to) in
                    [(bad, held(&mut good[..length])), (held(&mut good[..length]), bad)]
                {
                    let error = copy(from, to).unwrap_err();
                    assert_eq!(error.code(), ErrorCode::INVALID_PARAMS);
                    assert!(error.to_string().contains(&format!("{address:#x}")), "{error}");
                }
            }
            let bad = foreign(constant.0, length);
            copy(bad, held(&mut good[..length])).unwrap();
            let error = copy(held(&mut good[..length]), bad).unwrap_err();
            assert!(error.to_string().contains("cannot be written"), "{error}");
        }
    }

    #[test]
    fn rejects_range_with_unmapped_end() {
        let pages = Pages::new(3 << 20, libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: makes the last page of the test's own mapping inaccessible.
        let failed = unsafe {
            libc::mprotect((pages.0 + (3 << 20) - 4096) as *mut _, 4096, libc::PROT_NONE)
        };
        assert_eq!(failed, 0);
        let mut good = vec![7; 3 << 20];
        assert!(copy(foreign(pages.0, 3 << 20), held(&mut good)).is_err());
        assert!(copy(held(&mut good), foreign(pages.0, 3 << 20)).is_err());
        assert!(copy(held(&mut good[4096..]), foreign(pages.0, (3 << 20) - 4096)).is_ok());
    }

    #[test]
    fn adjacent_entries_are_copied_completely() {
        const ENTRY_BYTES: usize = 5000;
        let from: Vec<u8> = (0..8 << 20).map(|i| (i % 251) as u8).collect();
        let mut to = vec![0; from.len()];
        let mut copier = Copier::default();
        for start in (0..from.len()).step_by(ENTRY_BYTES) {
            let length = ENTRY_BYTES.min(from.len() - start);
            let source = foreign(from.as_ptr() as usize + start, length);
            copier.copy(source, foreign(to.as_mut_ptr() as usize + start, length)).unwrap();
        }
        assert!(from == to);
    }

    #[test]
    fn rejects_memory_that_changed_since_the_last_transfer() {
        const GUARD: i32 = 102;
        const LENGTH: usize = 4 << 20;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let mut good = vec![7; LENGTH];
        for length in [4096, 100_000, LENGTH] {
            let pages = Pages::new(LENGTH, rights);
            // Adjacent checks, so that the fast path is taken.
            let pass = |good: &mut [u8]| {
                let mut copier = Copier::default();
                (0..LENGTH / length).try_for_each(|at| {
                    copier
                        .copy(foreign(pages.0 + at * length, length), held(&mut good[..length]))?;
                    copier.copy(held(&mut good[..length]), foreign(pages.0 + at * length, length))
                })
            };
            pass(&mut good).unwrap();
            pass(&mut good).unwrap();
            for (advice, other) in [(None, 0), (None, libc::PROT_READ), (Some(GUARD), rights)] {
                // SAFETY: changes the rights of a page of the test's own mapping.
                let failed = unsafe { libc::mprotect((pages.0 + 8192) as *mut _, 4096, other) };
                assert_eq!(failed, 0);
                let is_refused = advice.is_some_and(|advice| {
                    // SAFETY: as above; a kernel without this advice returns an error.
                    unsafe { libc::madvise((pages.0 + 8192) as *mut _, 4096, advice) != 0 }
                });
                assert!(is_refused || pass(&mut good).is_err(), "{length} {advice:?} {other}");
            }
        }
    }
}
