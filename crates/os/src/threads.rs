//! The threads of an owner: named, bounded in number, told to end and joined.
//!
//! All threads of the product start here. Most belong to an owner, which [stops](Threads::stop) them. A thread
//! that [has none](start_detached) ends by itself.

use std::{
    io,
    sync::atomic::{AtomicBool, Ordering},
    thread::{self, JoinHandle, Scope, ScopedJoinHandle},
};

use mooncake_base::sync::Mutex;

use crate::fork;

/// Threads that somebody owns.
#[derive(Debug)]
pub struct Threads {
    max: usize,
    stack_bytes: Option<usize>,
    /// A forked child has none of the threads.
    generation: u64,
    is_stopped: AtomicBool,
    running: Mutex<Vec<JoinHandle<()>>>,
}

/// Starts a thread that ends by itself and that nobody waits for. What it runs is dropped if it cannot be
/// started.
///
/// # Errors
/// The error of the system.
pub fn start_detached(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name(name.to_owned()).spawn(run).map(drop)
}

/// Starts a thread that may borrow what its scope may. What it runs is dropped if it cannot be started.
///
/// # Errors
/// The error of the system.
pub fn start_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    run: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, run)
}

impl Threads {
    /// No threads yet, and never more than `max` at a time.
    pub fn new(max: usize) -> Self {
        Self {
            max,
            stack_bytes: None,
            generation: fork::generation(),
            is_stopped: AtomicBool::new(false),
            running: Mutex::default(),
        }
    }

    /// No threads yet; something else bounds their number.
    pub fn unbounded() -> Self {
        Self::new(usize::MAX)
    }

    /// Sets the size of the stacks.
    pub const fn with_stack_bytes(mut self, stack_bytes: usize) -> Self {
        self.stack_bytes = Some(stack_bytes);
        self
    }

    /// Starts a thread. What it runs is dropped if it cannot be started.
    ///
    /// # Errors
    /// `WouldBlock`: as many threads run as may; or the error of the system.
    pub fn spawn(&self, name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let mut running = self.running.lock();
        running.retain(|thread| !thread.is_finished());
        if running.len() >= self.max {
            let text = format!("{} threads run already, which is the limit", running.len());
            return Err(io::Error::new(io::ErrorKind::WouldBlock, text));
        }
        let mut builder = thread::Builder::new().name(name.to_owned());
        if let Some(stack_bytes) = self.stack_bytes {
            builder = builder.stack_size(stack_bytes);
        }
        running.push(builder.spawn(run)?);
        Ok(())
    }

    /// Makes the threads end by `end`, and waits for them. Returns `false` if they were stopped before, or if
    /// this process is a forked child, whose copies of the state and of the sockets belong to the parent.
    pub fn stop(&self, end: impl FnOnce()) -> bool {
        let is_first = !self.is_forked() && !self.is_stopped.swap(true, Ordering::AcqRel);
        if is_first {
            end();
        }
        self.join();
        is_first
    }

    /// Waits for all threads but the calling one, also for those that others start meanwhile. There are none
    /// in a forked child.
    pub fn join(&self) {
        // The lock of a forked child may be held by a thread that only the parent has.
        while !self.is_forked() {
            let threads = std::mem::take(&mut *self.running.lock());
            if threads.is_empty() {
                return;
            }
            for thread in threads {
                if thread.thread().id() != thread::current().id() {
                    // A panic has been reported by its hook.
                    let _ = thread.join();
                }
            }
        }
    }

    /// Returns whether this process is a fork of the one that owns the threads.
    pub fn is_forked(&self) -> bool {
        fork::is_forked_since(self.generation)
    }

    /// Returns whether the calling thread is one of them.
    pub fn has_current(&self) -> bool {
        let current = thread::current().id();
        self.running.lock().iter().any(|thread| thread.thread().id() == current)
    }

    /// Returns how many threads run; one that panicked does not.
    pub fn count(&self) -> usize {
        self.running.lock().iter().filter(|thread| !thread.is_finished()).count()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if self.is_forked() {
            // Dropping the handles would touch threads of the parent.
            std::mem::forget(std::mem::take(self.running.get_mut()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, atomic::AtomicUsize, mpsc};

    use super::*;

    #[test]
    fn number_is_bounded_and_all_are_joined() {
        let threads = Threads::new(2);
        let ended = Arc::new(AtomicUsize::new(0));
        let gates: Vec<mpsc::SyncSender<()>> = (0..2)
            .map(|_| {
                let (gate, opened) = mpsc::sync_channel(1);
                let ended = Arc::clone(&ended);
                let run = move || {
                    let _ = opened.recv();
                    ended.fetch_add(1, Ordering::SeqCst);
                };
                threads.spawn("test", run).unwrap();
                gate
            })
            .collect();
        let error = threads.spawn("test", || {}).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert_eq!(threads.count(), 2);
        assert!(threads.stop(|| drop(gates)));
        assert_eq!(ended.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn threads_are_told_to_end_once() {
        let threads = Threads::unbounded();
        let (gate, opened) = mpsc::sync_channel::<()>(1);
        let run = move || {
            let _ = opened.recv();
        };
        threads.spawn("test", run).unwrap();
        assert!(threads.stop(|| drop(gate)));
        assert!(!threads.stop(|| panic!("they have ended")));
    }

    #[test]
    fn forked_child_neither_ends_nor_joins_threads() {
        let mut threads = Threads::new(1);
        threads.generation += 1;
        let (_gate, opened) = mpsc::sync_channel::<()>(1);
        let run = move || {
            let _ = opened.recv();
        };
        threads.spawn("test", run).unwrap();
        assert!(!threads.stop(|| panic!("the threads are those of the parent")));
    }
}
