//! Proving which ways lead to the memory of a peer, by using them.
//!
//! The owner offers two secrets, one in sealed shared memory and one in plain memory of its own;
//! the attaching side proves a way by repeating the secret, and for the second way also by writing.

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
    piece::LocalRange,
};

/// The ways that are proven.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct ProvenAccess {
    /// Descriptors arrive and can be mapped.
    pub(super) is_shared: bool,
    /// The kernel copies to and from the peer's memory.
    pub(super) is_process: bool,
}

/// How many bytes the shared secret's memory has.
const OFFER_BYTES: u64 = 4096;

/// How many bytes are copied to see how fast that is.
const SAMPLE_BYTES: usize = 128 << 10;

/// How often they are copied; the fastest counts.
const SAMPLE_ROUNDS: usize = 3;

/// What an owner lays out for one peer.
#[derive(Debug)]
pub(super) struct ProbeOffer {
    mapping: Mapping,
    shared: Secret,
    process: Secret,
    /// The second secret, and behind it where the peer writes. Atomic, because another process
    /// does.
    cells: Box<[AtomicU64; 4]>,
    /// Read by the peer to measure_process_vm the way.
    sample: Box<[u8]>,
}

impl ProbeOffer {
    pub(super) fn new() -> Result<Self> {
        let (shared, process) = (EngineId::random().to_bytes(), EngineId::random().to_bytes());
        let mapping = Mapping::create(OFFER_BYTES, None)?;
        let mut copy = shared;
        // SAFETY: the array outlives the call and nobody else uses it.
        let from = unsafe { LocalRange::held(copy.as_mut_ptr(), copy.len()) };
        mapping.write(0, from, &open_gate)?;
        let [first, second] = words(process);
        let cells = Box::new([first, second, 0, 0].map(AtomicU64::new));
        // Touched, since a page that is not there yet would be measured instead.
        let sample = vec![1; SAMPLE_BYTES].into_boxed_slice();
        Ok(Self { mapping, shared, process, cells, sample })
    }

    pub(super) const fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Where the second secret is.
    pub(super) fn address(&self) -> u64 {
        self.cells.as_ptr() as u64
    }

    /// Where the sample is, and its length.
    pub(super) fn sample(&self) -> (u64, u64) {
        (self.sample.as_ptr() as u64, self.sample.len() as u64)
    }

    /// Which ways these answers prove.
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
    // In memory order, which is the order of the cells.
    if cfg!(target_endian = "little") {
        [bits as u64, (bits >> 64) as u64]
    } else {
        [(bits >> 64) as u64, bits as u64]
    }
}

/// Reads the first secret out of what the peer sent.
pub(super) fn try_shared(file: Option<OwnedFd>) -> Option<Secret> {
    let mapping = Mapping::attach(file?, OFFER_BYTES, false).ok()?;
    let mut token = Secret::default();
    // SAFETY: the array outlives the call and nobody else uses it.
    let to = unsafe { LocalRange::held(token.as_mut_ptr(), token.len()) };
    mapping.read(0, to, &open_gate).ok()?;
    Some(token)
}

/// Reads the second secret out of the peer's memory and writes the answer behind it.
pub(super) fn try_process(process: i32, address: u64) -> Option<Secret> {
    if process <= 0 {
        return None;
    }
    let mut token = Secret::default();
    let own = libc::iovec { iov_base: token.as_mut_ptr().cast(), iov_len: token.len() };
    let remote = libc::iovec { iov_base: address as *mut _, iov_len: token.len() };
    process_vm_copy(process, Direction::In, &[own], &[remote])
        .ok()
        .filter(|moved| *moved == token.len())?;
    let mut answer = token.map(|byte| !byte);
    let own = libc::iovec { iov_base: answer.as_mut_ptr().cast(), iov_len: answer.len() };
    let behind = address.checked_add(token.len() as u64)?;
    let remote = libc::iovec { iov_base: behind as *mut _, iov_len: answer.len() };
    process_vm_copy(process, Direction::Out, &[own], &[remote])
        .ok()
        .filter(|moved| *moved == token.len())?;
    Some(token)
}

/// How many bytes a second the kernel copies from the peer's sample.
pub(super) fn measure_process_vm(process: i32, (address, length): (u64, u64)) -> Option<u64> {
    let length = usize::try_from(length).ok()?.min(SAMPLE_BYTES);
    let mut bytes = vec![0_u8; length];
    let mut fastest: Option<u128> = None;
    for _ in 0..SAMPLE_ROUNDS {
        let own = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: length };
        let remote = libc::iovec { iov_base: address as *mut _, iov_len: length };
        let begin = Instant::now();
        process_vm_copy(process, Direction::In, &[own], &[remote])
            .ok()
            .filter(|moved| *moved == length)?;
        let took = begin.elapsed().as_nanos().max(1);
        fastest = Some(fastest.map_or(took, |before| before.min(took)));
    }
    u64::try_from(length as u128 * 1_000_000_000 / fastest?).ok()
}

/// Which way the kernel copies, seen from here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    In,
    Out,
}

/// Has the kernel copy between this process and another; says how many bytes it moved before it
/// met one that is not mapped, an error if that was the first.
pub(super) fn process_vm_copy(
    process: i32,
    direction: Direction,
    own: &[libc::iovec],
    remote: &[libc::iovec],
) -> io::Result<usize> {
    let (own, local_count) = (own.as_ptr(), own.len() as libc::c_ulong);
    let (remote, remote_count) = (remote.as_ptr(), remote.len() as libc::c_ulong);
    loop {
        let moved = match direction {
            // SAFETY: both arrays are valid for the call; the kernel checks every address in them,
            // here and there, and answers with an error where it is not mapped. Nobody has a
            // reference to local bytes that are written, as the one who named them promised.
            Direction::In => unsafe {
                libc::process_vm_readv(process, own, local_count, remote, remote_count, 0)
            },
            // SAFETY: as above. What is written there lies in a range that the owner registered
            // for this, or is the cell of its offer.
            Direction::Out => unsafe {
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
    fn only_the_right_answers_prove_a_way() {
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
    fn the_sample_is_measured_and_a_bad_one_is_not() {
        let offer = ProbeOffer::new().unwrap();
        let own = std::process::id() as i32;
        assert!(measure_process_vm(own, offer.sample()).unwrap() > 1 << 20);
        assert_eq!(measure_process_vm(own, (8, 4096)), None);
    }
}
