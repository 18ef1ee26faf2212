//! A file that the caller has mapped and that is shortened while its bytes are copied.

use std::{
    fs::{File, read_to_string},
    os::fd::AsRawFd,
    sync::atomic::{AtomicBool, Ordering},
};

use mooncake_transfer_engine::{LocalRange, Opcode};

use crate::pair::{Lent, Pair, move_one};

const LENGTH: usize = 8 << 20;

/// The first kernel that tells in what kind of mapping an address lies.
const KERNEL_MIN: (u32, u32) = (6, 11);

/// Returns why a mapped file cannot be recognized.
pub(crate) fn missing() -> Option<String> {
    let release = read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.trim().parse::<u32>().ok());
    let version = (numbers.next().unwrap(), numbers.next().unwrap());
    (version < KERNEL_MIN).then(|| "needs Linux 6.11, to recognize a mapped file".to_owned())
}

pub(crate) fn fails_copies_and_crashes_nothing() {
    let pair = Pair::over_memory();
    let lent = pair.lend(LENGTH);
    let file = tempfile::tempfile().unwrap();
    file.set_len(LENGTH as u64).unwrap();
    let mapped = MappedFile::new(&file);
    let copies = |lent: &Lent| {
        [Opcode::Read, Opcode::Write].map(|opcode| {
            // SAFETY: no reference to the mapped bytes exists.
            let local = unsafe { LocalRange::foreign(mapped.0, LENGTH) };
            move_one(&pair.near, &pair.peer, opcode, (local, lent.base()))
        })
    };
    for outcome in lent.iter().flat_map(copies) {
        outcome.unwrap();
    }
    let is_over = AtomicBool::new(false);
    let failed = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                file.set_len(0).unwrap();
                file.set_len(LENGTH as u64).unwrap();
            }
        });
        let outcomes = (0..100).flat_map(|_| lent.iter().flat_map(copies));
        let failed = outcomes.filter(Result::is_err).count();
        is_over.store(true, Ordering::SeqCst);
        failed
    });
    assert!(failed > 0, "the file was shortened during copies");
}

/// A mapping of a file, by its address.
struct MappedFile(usize);

impl MappedFile {
    fn new(file: &File) -> Self {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let (chosen, descriptor) = (std::ptr::null_mut(), file.as_raw_fd());
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe { libc::mmap(chosen, LENGTH, rights, libc::MAP_SHARED, descriptor, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        Self(base as usize)
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own.
        unsafe { libc::munmap(self.0 as *mut _, LENGTH) };
    }
}
