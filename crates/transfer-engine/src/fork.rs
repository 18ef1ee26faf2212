//! What a fork does to an engine: nothing in the parent, and in the child everything becomes
//! inert without being able to harm the parent.
//!
//! A forked child has none of the threads, shares the sockets, and would share the memory. So a
//! handler that runs in the child raises a generation number, which every handle compares with
//! the one it was made in, and goes through the list of [`guarded`](guard_memory) things: sockets
//! are closed there (or a peer would take the child for a living parent), and shared memory is
//! replaced by a private view of it, so that the child can still read what it holds and damages
//! nothing when it writes.

use std::{
    cell::UnsafeCell,
    os::fd::RawFd,
    sync::{
        Once,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// How many forks lie between the start of the program and this process.
pub fn generation() -> u64 {
    static HANDLERS: Once = Once::new();
    HANDLERS.call_once(|| {
        // SAFETY: the three are functions that live as long as the program and, in the child, make
        // system calls and touch atomics only.
        let failed = unsafe {
            libc::pthread_atfork(Some(before_fork), Some(after_in_parent), Some(after_in_child))
        };
        if failed != 0 {
            tracing::warn!(code = failed, "no memory for the fork handler");
        }
    });
    GENERATION.load(Ordering::Acquire)
}

/// Whether this process is a fork of the one in which `since` was taken.
pub fn is_forked_since(since: u64) -> bool {
    GENERATION.load(Ordering::Acquire) != since
}

/// Has the calling thread give way to others, as `nice` counts.
pub(crate) fn set_nice(niceness: i32) {
    // SAFETY: asks who the thread is; cannot fail.
    let thread = unsafe { libc::gettid() };
    // SAFETY: changes how the thread is scheduled. Where it may not be, it is as urgent as others.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, thread as libc::id_t, niceness) };
}

/// How often the system has taken the processor from the calling thread for others.
pub(crate) fn preemption_count() -> i64 {
    // SAFETY: plain numbers, for which zero is valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the call fills a live local; where it fails, which it cannot, the zeros stay.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    usage.ru_nivcsw
}

/// Has a child see a private copy of shared memory instead of the memory itself.
///
/// The address range must be a shared mapping of the beginning of `file`, and both must stay until
/// [`unguard`].
pub(crate) fn guard_memory(address: usize, length: usize, file: RawFd) {
    GUARDED.change(|list| list.push(Guarded::Memory { address, length, file }));
}

/// Has a child close its copy of a socket.
pub(crate) fn guard_socket(file: RawFd) {
    GUARDED.change(|list| list.push(Guarded::Socket { file }));
}

/// Forgets what was guarded under this descriptor. To be called before it is closed.
pub(crate) fn unguard(descriptor: RawFd) {
    GUARDED.change(|list| {
        list.retain(|guarded| match guarded {
            Guarded::Memory { file, .. } | Guarded::Socket { file } => *file != descriptor,
        });
    });
}

static GENERATION: AtomicU64 = AtomicU64::new(0);
static GUARDED: GuardedList =
    GuardedList { is_taken: AtomicBool::new(false), list: UnsafeCell::new(Vec::new()) };

#[derive(Debug, Clone, Copy)]
enum Guarded {
    Memory { address: usize, length: usize, file: RawFd },
    Socket { file: RawFd },
}

/// A list behind a spinning lock, because the lock is taken before a fork and released after it in
/// both processes, which no lock with a queue of sleepers allows. It is held for moments, by
/// things that are made and dropped rarely.
struct GuardedList {
    is_taken: AtomicBool,
    list: UnsafeCell<Vec<Guarded>>,
}

// SAFETY: `list` is touched only between `take` and `release`.
unsafe impl Sync for GuardedList {}

impl GuardedList {
    fn change(&self, change: impl FnOnce(&mut Vec<Guarded>)) {
        self.take();
        // SAFETY: the lock is ours until `release`.
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
    // SAFETY: the lock was taken by this very thread before the fork.
    let list = unsafe { &*GUARDED.list.get() };
    for guarded in list {
        match *guarded {
            Guarded::Memory { address, length, file } => {
                let rights = libc::PROT_READ | libc::PROT_WRITE;
                let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
                // SAFETY: the range is a mapping of ours (see `guard_memory`), replaced by one of
                // the same length; whatever points into it stays valid.
                unsafe { libc::mmap(address as *mut _, length, rights, flags, file, 0) };
            }
            Guarded::Socket { file } => {
                // SAFETY: the owner of this descriptor leaks it in a child, as it is told by the
                // generation, so that nobody closes the number a second time.
                unsafe { libc::close(file) };
            }
        }
    }
    GUARDED.release();
}
