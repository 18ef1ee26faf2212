//! How handles survive a fork: nothing changes in the parent, and in the child every handle becomes
//! inert and cannot harm the parent.
//!
//! A forked child has none of the threads, shares the sockets, and would share the memory. A
//! handler that runs in the child increments a generation number, which every handle compares with
//! the number it was created under. The handler then walks the list of [guarded](guard_memory)
//! resources. It closes sockets, or a peer would take the child for the living parent, and locked files,
//! or the child would hold their locks when the parent is dead. It replaces
//! shared memory by a private copy-on-write view: the child can still read it, and writes of the
//! child damage nothing.

use std::{
    cell::UnsafeCell,
    os::fd::RawFd,
    sync::{
        Once,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// Number of forks between the start of the program and this process.
pub fn generation() -> u64 {
    static HANDLERS: Once = Once::new();
    HANDLERS.call_once(|| {
        // SAFETY: the three are functions that live as long as the program and, in the child, only
        // make system calls and touch atomics.
        let failed = unsafe {
            libc::pthread_atfork(Some(before_fork), Some(after_in_parent), Some(after_in_child))
        };
        if failed != 0 {
            tracing::warn!(code = failed, "the fork handler cannot be registered");
        }
    });
    GENERATION.load(Ordering::Acquire)
}

/// Returns whether this process is a fork of the one in which `since` was taken.
pub fn is_forked_since(since: u64) -> bool {
    GENERATION.load(Ordering::Acquire) != since
}

/// Makes a forked child see a private copy of shared memory instead of the memory itself.
///
/// The address range must be a shared mapping of the beginning of `file`, and both must stay until
/// [`unguard`].
pub fn guard_memory(address: usize, length: usize, file: RawFd) {
    GUARDED.change(|list| list.push(Guarded::Memory { address, length, file }));
}

/// Makes a forked child close its copy of a descriptor: of a socket, or of a file that is locked, since the
/// lock ends with the last copy.
pub fn guard_descriptor(file: RawFd) {
    GUARDED.change(|list| list.push(Guarded::Descriptor { file }));
}

/// Removes the guard of a descriptor. Call this before the descriptor is closed.
pub fn unguard(descriptor: RawFd) {
    GUARDED.change(|list| {
        list.retain(|guarded| match guarded {
            Guarded::Memory { file, .. } | Guarded::Descriptor { file } => *file != descriptor,
        });
    });
}

static GENERATION: AtomicU64 = AtomicU64::new(0);
static GUARDED: GuardedList =
    GuardedList { is_taken: AtomicBool::new(false), list: UnsafeCell::new(Vec::new()) };

#[derive(Debug, Clone, Copy)]
enum Guarded {
    Memory { address: usize, length: usize, file: RawFd },
    Descriptor { file: RawFd },
}

/// A list behind a spin lock. The lock is taken before a fork and released after it in both
/// processes, which a lock with a queue of sleeping threads does not support. It is held for
/// moments, since guarded resources are created and dropped rarely.
struct GuardedList {
    is_taken: AtomicBool,
    list: UnsafeCell<Vec<Guarded>>,
}

// SAFETY: `list` is touched only between `take` and `release`.
unsafe impl Sync for GuardedList {}

impl GuardedList {
    fn change(&self, change: impl FnOnce(&mut Vec<Guarded>)) {
        self.take();
        // SAFETY: this thread holds the lock until `release`.
        change(unsafe { &mut *self.list.get() });
        self.release();
    }

    fn take(&self) {
        while self.is_taken.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
    }

    fn release(&self) {
        self.is_taken.store(false, Ordering::Release);
    }
}

extern "C" fn before_fork() {
    GUARDED.take();
}

extern "C" fn after_in_parent() {
    GUARDED.release();
}

extern "C" fn after_in_child() {
    GENERATION.fetch_add(1, Ordering::AcqRel);
    // SAFETY: this very thread took the lock before the fork.
    let list = unsafe { &*GUARDED.list.get() };
    for guarded in list {
        match *guarded {
            Guarded::Memory { address, length, file } => {
                let rights = libc::PROT_READ | libc::PROT_WRITE;
                let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
                // SAFETY: the range is a mapping of this process (see `guard_memory`), replaced by
                // one of the same length; pointers into it stay valid.
                unsafe { libc::mmap(address as *mut _, length, rights, flags, file, 0) };
            }
            Guarded::Descriptor { file } => {
                // SAFETY: the owner of this descriptor sees the new generation in a child and leaks
                // the descriptor, so the number is not closed a second time.
                unsafe { libc::close(file) };
            }
        }
    }
    GUARDED.release();
}
