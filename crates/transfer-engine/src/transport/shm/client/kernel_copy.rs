//! Copies between this process and the owner's by the kernel, many entries per system call.

use mooncake_base::{Error, ErrorCode, Result};

use crate::{
    copy::{self, Access},
    transfer_entry::{Opcode, TransferEntry},
    transport::shm::probe::{self, KernelCopyDirection},
};

/// The maximum number of entries that one system call moves.
const ENTRIES_PER_CALL: usize = 64;

/// The approximate number of bytes that one system call moves. Withdrawals are checked between
/// calls.
const BYTES_PER_CALL: usize = 4 << 20;

/// Moves entries that lie in one region of another process, many per system call.
///
/// The entries are sorted by their remote addresses, so that neighbours can be passed as one remote
/// range wherever their local bytes are. The kernel looks up and pins the pages of each remote
/// range separately, which costs about as much as copying a page.
pub(super) fn copy_by_kernel(
    opcode: Opcode,
    entries: &mut [TransferEntry],
    process: i32,
    gate: &dyn Fn() -> Result<()>,
) {
    let direction = match opcode {
        Opcode::Read => KernelCopyDirection::In,
        Opcode::Write => KernelCopyDirection::Out,
    };
    let order = sorted_by_remote(entries);
    let mut rest = &order[..];
    while !rest.is_empty() {
        let (mut local, mut remote) = (MergedRanges::default(), MergedRanges::default());
        let (mut count, mut bytes) = (0, 0);
        for index in rest.iter().take(ENTRIES_PER_CALL) {
            let entry = &entries[*index];
            // A long entry is copied alone, in parts.
            if bytes >= BYTES_PER_CALL || (count > 0 && entry.local.length() > BYTES_PER_CALL) {
                break;
            }
            let (here, there) = iovecs(entry, 0);
            local.push(here);
            remote.push(there);
            count += 1;
            bytes += entry.local.length();
        }
        let moved = match gate() {
            // A long entry is moved by `copy_remaining` below, from its beginning.
            Ok(()) if bytes > BYTES_PER_CALL && count == 1 => 0,
            Ok(()) => {
                probe::process_vm_copy(process, direction, local.as_slice(), remote.as_slice())
                    .unwrap_or_default()
            }
            Err(error) => {
                for index in rest {
                    entries[*index].outcome = Some(Err(error.clone()));
                }
                return;
            }
        };
        let end =
            |entry: &TransferEntry, done| copy_remaining(entry, done, process, direction, gate);
        rest = &rest[record_moved(entries, &rest[..count], moved, end)..];
    }
}

/// Returns the indexes of the unfinished entries, sorted by remote address.
fn sorted_by_remote(entries: &[TransferEntry]) -> Vec<usize> {
    let is_open = |index: &usize| entries[*index].outcome.is_none();
    let mut order: Vec<usize> = (0..entries.len()).filter(is_open).collect();
    order.sort_unstable_by_key(|index| entries[*index].remote);
    order
}

/// The ranges of one system call; adjacent ranges are merged.
struct MergedRanges {
    ranges: [libc::iovec; ENTRIES_PER_CALL],
    count: usize,
}

impl Default for MergedRanges {
    fn default() -> Self {
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Self { ranges: [empty; ENTRIES_PER_CALL], count: 0 }
    }
}

impl MergedRanges {
    fn push(&mut self, next: libc::iovec) {
        if let Some(last) = self.ranges[..self.count].last_mut()
            && last.iov_base as usize + last.iov_len == next.iov_base as usize
        {
            last.iov_len += next.iov_len;
            return;
        }
        self.ranges[self.count] = next;
        self.count += 1;
    }

    fn as_slice(&self) -> &[libc::iovec] {
        &self.ranges[..self.count]
    }
}

/// Records the outcomes of a system call that moved `moved` bytes. The entry at which the call
/// stopped is completed by `finish`. Returns the number of entries of the group that are done.
fn record_moved(
    entries: &mut [TransferEntry],
    group: &[usize],
    mut moved: usize,
    finish: impl FnOnce(&TransferEntry, usize) -> Result<()>,
) -> usize {
    for (place, index) in group.iter().enumerate() {
        let entry = &mut entries[*index];
        if moved < entry.local.length() {
            entry.outcome = Some(finish(entry, moved));
            return place + 1;
        }
        moved -= entry.local.length();
        entry.outcome = Some(Ok(()));
    }
    group.len()
}

/// Copies the rest of one entry, in parts.
fn copy_remaining(
    entry: &TransferEntry,
    mut done: usize,
    process: i32,
    direction: KernelCopyDirection,
    gate: &dyn Fn() -> Result<()>,
) -> Result<()> {
    while done < entry.local.length() {
        gate()?;
        let (local, remote) = iovecs(entry, done);
        match probe::process_vm_copy(process, direction, &[local], &[remote]) {
            Ok(moved) if moved > 0 => done += moved,
            answer => {
                let access = match direction {
                    KernelCopyDirection::In => Access::Write,
                    KernelCopyDirection::Out => Access::Read,
                };
                if !copy::is_accessible(entry.local, access) {
                    return Err(copy::inaccessible(entry.local, access));
                }
                let error =
                    Error::new(ErrorCode::TRANSFER_FAIL, "the owner's memory cannot be accessed")
                        .with("address", format_args!("{:#x}", entry.remote))
                        .with("length", entry.local.length());
                return Err(match answer {
                    Err(cause) => error.caused_by(cause),
                    Ok(_) => error,
                });
            }
        }
    }
    Ok(())
}

/// Returns the local and the remote range of the next part of an entry, from `done` on.
fn iovecs(entry: &TransferEntry, done: usize) -> (libc::iovec, libc::iovec) {
    let length = (entry.local.length() - done).min(BYTES_PER_CALL);
    let vector =
        |address: usize| libc::iovec { iov_base: (address + done) as *mut _, iov_len: length };
    (vector(entry.local.address()), vector(entry.remote as usize))
}
