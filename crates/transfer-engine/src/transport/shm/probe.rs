//! Probing which access modes reach the memory of a peer.
//!
//! The owner offers two secrets, one in sealed shared memory and one in its private memory. The
//! attaching side proves an access mode by repeating the secret, and for the second mode also by
//! writing.

use std::{
    io,
    os::fd::OwnedFd,
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

use mooncake_base::{EngineId, Result};

use super::message::Secret;
use crate::{
    memory::mapping::{Mapping, open_gate},
    transfer_entry::LocalRange,
};

/// The access modes that were proven to work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct ProvenAccess {
    /// File descriptors arrive and can be mapped.
    pub(super) is_shared: bool,
    /// The kernel copies to and from the peer's memory.
    pub(super) is_process: bool,
}

/// The size of the shared memory that holds the secret.
const OFFER_BYTES: u64 = 4096;

/// The size of the sample whose copy is timed.
const SAMPLE_BYTES: usize = 128 << 10;

/// The number of timed copies; the fastest counts.
const SAMPLE_ROUNDS: usize = 3;

/// The probe memory that an owner prepares for one peer.
#[derive(Debug)]
pub(super) struct ProbeOffer {
    mapping: Mapping,
    shared: Secret,
    process: Secret,
    /// The second secret in two cells, followed by the two cells that the peer writes. Atomic,
    /// because another process writes them.
    cells: Box<[AtomicU64; 4]>,
    /// Memory that the peer reads to measure the speed of the kernel's copy.
    sample: Box<[u8]>,
}

impl ProbeOffer {
    pub(super) fn new() -> Result<Self> {
        let (shared, process) = (EngineId::random().to_bytes(), EngineId::random().to_bytes());
        let mapping = Mapping::create(OFFER_BYTES, None)?;
        let mut copy = shared;
        // SAFETY: the array outlives the call and no other reference to it exists.
        let from = unsafe { LocalRange::held(copy.as_mut_ptr(), copy.len()) };
        mapping.write(0, from, &open_gate)?;
        let [first, second] = words(process);
        let cells = Box::new([first, second, 0, 0].map(AtomicU64::new));
        // Written, so that the measurement does not include page faults.
        let sample = vec![1; SAMPLE_BYTES].into_boxed_slice();
        Ok(Self { mapping, shared, process, cells, sample })
    }

    pub(super) const fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Returns the address of the second secret.
    pub(super) fn address(&self) -> u64 {
        self.cells.as_ptr() as u64
    }

    /// Returns the address and the length of the sample.
    pub(super) fn sample(&self) -> (u64, u64) {
        (self.sample.as_ptr() as u64, self.sample.len() as u64)
    }

    /// Returns the access modes that these secrets prove.
    pub(super) fn verify(&self, shared: Secret, process: Secret) -> ProvenAccess {
        let written = [&self.cells[2], &self.cells[3]].map(|cell| cell.load(Ordering::SeqCst));
        ProvenAccess {
            is_shared: shared == self.shared,
            is_process: process == self.process && written == words(process).map(|word| !word),
        }
    }
}

fn words(token: Secret) -> [u64; 2] {
    let bits = u128::from_ne_bytes(token);
    // In memory order, like the cells.
    if cfg!(target_endian = "little") {
        [bits as u64, (bits >> 64) as u64]
    } else {
        [(bits >> 64) as u64, bits as u64]
    }
}

/// Reads the first secret from the shared memory that the peer sent.
pub(super) fn try_shared(file: Option<OwnedFd>) -> Option<Secret> {
    let mapping = Mapping::attach(file?, OFFER_BYTES, false).ok()?;
    let mut token = Secret::default();
    // SAFETY: the array outlives the call and no other reference to it exists.
    let to = unsafe { LocalRange::held(token.as_mut_ptr(), token.len()) };
    mapping.read(0, to, &open_gate).ok()?;
    Some(token)
}

/// Reads the second secret from the peer's memory and writes its complement after it.
pub(super) fn try_process(process: i32, address: u64) -> Option<Secret> {
    if process <= 0 {
        return None;
    }
    let mut token = Secret::default();
    let own = libc::iovec { iov_base: token.as_mut_ptr().cast(), iov_len: token.len() };
    let remote = libc::iovec { iov_base: address as *mut _, iov_len: token.len() };
    process_vm_copy(process, KernelCopyDirection::In, &[own], &[remote])
        .ok()
        .filter(|moved| *moved == token.len())?;
    let mut answer = token.map(|byte| !byte);
    let own = libc::iovec { iov_base: answer.as_mut_ptr().cast(), iov_len: answer.len() };
    let behind = address.checked_add(token.len() as u64)?;
    let remote = libc::iovec { iov_base: behind as *mut _, iov_len: answer.len() };
    process_vm_copy(process, KernelCopyDirection::Out, &[own], &[remote])
        .ok()
        .filter(|moved| *moved == token.len())?;
    Some(token)
}

/// Returns the speed in bytes per second at which the kernel copies the peer's sample.
pub(super) fn measure_process_vm(process: i32, (address, length): (u64, u64)) -> Option<u64> {
    let length = usize::try_from(length).ok()?.min(SAMPLE_BYTES);
    let mut bytes = vec![0_u8; length];
    let mut fastest: Option<u128> = None;
    for _ in 0..SAMPLE_ROUNDS {
        let own = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: length };
        let remote = libc::iovec { iov_base: address as *mut _, iov_len: length };
        let begin = Instant::now();
        process_vm_copy(process, KernelCopyDirection::In, &[own], &[remote])
            .ok()
            .filter(|moved| *moved == length)?;
        let took = begin.elapsed().as_nanos().max(1);
        fastest = Some(fastest.map_or(took, |before| before.min(took)));
    }
    u64::try_from(length as u128 * 1_000_000_000 / fastest?).ok()
}

/// The direction of a kernel copy, seen from this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KernelCopyDirection {
    In,
    Out,
}

/// Copies between this process and another through the kernel. Returns the number of bytes moved
/// before the first unmapped byte.
///
/// # Errors
/// No byte could be moved.
pub(super) fn process_vm_copy(
    process: i32,
    direction: KernelCopyDirection,
    own: &[libc::iovec],
    remote: &[libc::iovec],
) -> io::Result<usize> {
    let (own, local_count) = (own.as_ptr(), own.len() as libc::c_ulong);
    let (remote, remote_count) = (remote.as_ptr(), remote.len() as libc::c_ulong);
    loop {
        let moved = match direction {
            // SAFETY: both arrays are valid for the call; the kernel checks every address in them,
            // local and remote, and fails where an address is not mapped. No reference to the
            // written local bytes exists, as the creator of the local range promised.
            KernelCopyDirection::In => unsafe {
                libc::process_vm_readv(process, own, local_count, remote, remote_count, 0)
            },
            // SAFETY: as above. The remote bytes that are written lie in a range that the owner
            // registered for transfers, or are the cells of its probe offer.
            KernelCopyDirection::Out => unsafe {
                libc::process_vm_writev(process, own, local_count, remote, remote_count, 0)
            },
        };
        match usize::try_from(moved) {
            Ok(moved) => return Ok(moved),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_correct_secrets_prove_access() {
        let offer = ProbeOffer::new().unwrap();
        let file = || offer.mapping().file().try_clone_to_owned().ok();
        let shared = try_shared(file()).unwrap();
        assert_eq!(
            offer.verify(shared, [0; 16]),
            ProvenAccess { is_shared: true, is_process: false }
        );
        let own = std::process::id() as i32;
        assert!(!offer.verify([0; 16], offer.process).is_process, "read but not written");
        let process = try_process(own, offer.address()).unwrap();
        let both = offer.verify(shared, process);
        assert_eq!(both, ProvenAccess { is_shared: true, is_process: true });
        let swapped = offer.verify(process, shared);
        assert_eq!(swapped, ProvenAccess::default());
        assert_eq!(try_shared(None), None);
        assert_eq!(try_process(own, 8), None);
        assert_eq!(try_process(0, offer.address()), None);
    }

    #[test]
    fn measures_mapped_samples_only() {
        let offer = ProbeOffer::new().unwrap();
        let own = std::process::id() as i32;
        assert!(measure_process_vm(own, offer.sample()).unwrap() > 1 << 20);
        assert_eq!(measure_process_vm(own, (8, 4096)), None);
    }
}
