//! Reading memory of another process of this host, which lends it for the time of an operation.
//!
//! The lender names the memory and a *cell*: a number in its memory that changes when the loan ends.
//! The reader looks at the cell after the bytes. If it is unchanged, the bytes were lent all the
//! time, and the process is still the one that lent them.
#![allow(unsafe_code, reason = "process_vm_readv, which no crate of ours offers")]

use std::{
    io,
    path::Path,
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering, fence},
    },
};

use mooncake_base::{
    sync::Mutex,
    token::{Nonce, nonce},
};

use crate::staging::StagedPlace;

/// From this size on, a part of a collective is lent, not sent.
pub(crate) const LENT_BYTES_MIN: usize = 32 << 10;
const PTRACE_SCOPE: &str = "/proc/sys/kernel/yama/ptrace_scope";

/// A number in memory that changes when a loan ends.
#[derive(Debug)]
pub(crate) struct LoanToken(AtomicU64);

impl Default for LoanToken {
    fn default() -> Self {
        // No other process has the same number at the same place by accident: each begins at a random
        // one, and takes steps that are far apart.
        static FIRST: LazyLock<u64> = LazyLock::new(|| {
            let [a, b, c, d, e, f, g, h, ..] = nonce();
            u64::from_le_bytes([a, b, c, d, e, f, g, h])
        });
        static COUNT: AtomicU64 = AtomicU64::new(0);
        const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        Self(AtomicU64::new(FIRST.wrapping_add(count.wrapping_mul(STEP))))
    }
}

impl LoanToken {
    /// Lends bytes until the next call of `end`. The cell must stay where it is.
    pub(crate) fn lend(&self, bytes: &[u8]) -> Loan {
        Loan {
            address: bytes.as_ptr() as u64,
            length: bytes.len() as u64,
            cell: (&raw const self.0) as u64,
            value: self.0.load(Ordering::SeqCst),
            copy: None,
        }
    }

    /// Ends the loans, before their memory changes.
    pub(crate) fn end(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }
}

/// Memory that another process lends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Loan {
    pub(crate) address: u64,
    pub(crate) length: u64,
    pub(crate) cell: u64,
    pub(crate) value: u64,
    /// A copy of the memory that may be mapped.
    pub(crate) copy: Option<StagedPlace>,
}

impl Loan {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut words = vec![self.address, self.length, self.cell, self.value];
        if let Some(copy) = self.copy {
            words.extend([copy.buffer, copy.descriptor, copy.oldest]);
        }
        words.into_iter().flat_map(u64::to_le_bytes).collect()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (words, rest) = bytes.as_chunks::<8>();
        let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let (address, length, cell, value, copy) = match (words.as_slice(), rest) {
            ([address, length, cell, value], []) => (*address, *length, *cell, *value, None),
            ([address, length, cell, value, buffer, descriptor, oldest], []) => {
                let copy =
                    StagedPlace { buffer: *buffer, descriptor: *descriptor, oldest: *oldest };
                (*address, *length, *cell, *value, Some(copy))
            }
            _ => return None,
        };
        Some(Self { address, length, cell, value, copy })
    }

    /// Reads part of the memory, from `offset` on.
    pub(crate) fn read(&self, process: u32, offset: usize, target: &mut [u8]) -> io::Result<()> {
        let address = self.address.checked_add(offset as u64);
        read(process, address.ok_or(io::ErrorKind::InvalidInput)?, target)
    }

    /// Returns whether the memory is still lent.
    ///
    /// # Errors
    /// The process cannot be read any more.
    pub(crate) fn is_current(&self, process: u32) -> io::Result<bool> {
        fence(Ordering::SeqCst);
        let mut value = [0; 8];
        read(process, self.cell, &mut value)?;
        Ok(u64::from_ne_bytes(value) == self.value)
    }
}

/// Reads memory of a process.
pub(crate) fn read(process: u32, address: u64, target: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < target.len() {
        let rest = &mut target[done..];
        let own = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
        let address = usize::try_from(address).ok().and_then(|it| it.checked_add(done));
        let address = address.ok_or(io::ErrorKind::InvalidInput)?;
        let remote = libc::iovec { iov_base: address as *mut _, iov_len: rest.len() };
        let process = i32::try_from(process).map_err(io::Error::other)?;
        // SAFETY: `own` is a slice that this function borrows; the kernel checks the address in
        // the other process.
        let read =
            unsafe { libc::process_vm_readv(process, &raw const own, 1, &raw const remote, 1, 0) };
        match usize::try_from(read) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => done += read,
            Err(_) => return Err(io::Error::last_os_error()),
        }
    }
    Ok(())
}

/// A random number in memory: a peer that can tell it can read this process.
#[derive(Debug)]
pub(crate) struct Secret(Box<Nonce>);

impl Default for Secret {
    fn default() -> Self {
        Self(Box::new(nonce()))
    }
}

impl Secret {
    pub(crate) fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    pub(crate) fn bytes(&self) -> &Nonce {
        &self.0
    }
}

/// Lets a peer read this process where the kernel allows it only to parents. The kernel takes one process,
/// with its descendants, or all of this user: with a second peer on this host, all may read. An ancestor of
/// the peers would be narrower, but once it ends, the kernel forgets it, and reads fail.
pub(crate) fn allow_reading(peer: u32) {
    static PEERS: Mutex<Vec<u32>> = Mutex::new(Vec::new());
    static IS_RESTRICTED: LazyLock<bool> = LazyLock::new(|| {
        std::fs::read_to_string(PTRACE_SCOPE).is_ok_and(|scope| scope.trim() == "1")
    });
    if !*IS_RESTRICTED {
        return;
    }
    let mut peers = PEERS.lock();
    let is_alive = |peer: u32| Path::new(&format!("/proc/{peer}")).exists();
    let set = |reader: libc::c_ulong| {
        // SAFETY: the call changes a property of this process and takes no pointer.
        unsafe { libc::prctl(libc::PR_SET_PTRACER, reader) }
    };
    let reader = reader_of(&mut peers, peer, is_alive);
    let failed = match reader {
        Some(process) if set(libc::c_ulong::from(process)) == 0 => 0,
        // The number may be that of another namespace.
        _ => set(libc::PR_SET_PTRACER_ANY),
    };
    tracing::debug!(peer, ?reader, failed, "a peer of this host was allowed to read this process");
}

/// Adds a peer, and returns the only one that lives; `None` if there are several.
fn reader_of(peers: &mut Vec<u32>, peer: u32, is_alive: impl Fn(u32) -> bool) -> Option<u32> {
    peers.retain(|&other| other != peer && is_alive(other));
    peers.push(peer);
    (peers.len() == 1).then_some(peer)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test panics where a step fails")]
mod tests {
    use super::*;

    #[test]
    fn loan_is_current_until_it_ends() {
        let bytes: Vec<u8> = (0..100).collect();
        let cell = LoanToken::default();
        let loan = cell.lend(&bytes);
        assert_eq!(Loan::decode(&loan.encode()), Some(loan));
        assert_eq!(Loan::decode(&loan.encode()[1..]), None);
        let copy = Some(StagedPlace { buffer: 7, descriptor: 8, oldest: 9 });
        let copied = Loan { copy, ..loan };
        assert_eq!(Loan::decode(&copied.encode()), Some(copied));
        assert_eq!(Loan::decode(&copied.encode()[..48]), None);
        let mut part = [0; 10];
        loan.read(std::process::id(), 20, &mut part).unwrap();
        assert_eq!(part, bytes[20..30]);
        assert!(loan.is_current(std::process::id()).unwrap());
        cell.end();
        assert!(!loan.is_current(std::process::id()).unwrap());
    }

    #[test]
    fn only_peer_is_the_only_reader() {
        let mut peers = Vec::new();
        assert_eq!(reader_of(&mut peers, 7, |_| true), Some(7));
        assert_eq!(reader_of(&mut peers, 7, |_| true), Some(7), "connected again");
        assert_eq!(reader_of(&mut peers, 8, |_| true), None);
        assert_eq!(reader_of(&mut peers, 9, |other| other == 8), None, "7 has ended");
        assert_eq!(reader_of(&mut peers, 10, |_| false), Some(10), "all others have ended");
    }

    #[test]
    fn memory_that_does_not_exist_is_an_error() {
        assert!(read(std::process::id(), 8, &mut [0; 8]).is_err());
        assert!(read(std::process::id(), u64::MAX - 3, &mut [0; 8]).is_err());
        assert!(read(u32::MAX, 8, &mut [0; 8]).is_err());
    }
}
