//! The threads of an owner: named, bounded in number, and joined at its end.

use std::{
    io,
    thread::{self, JoinHandle},
};

use mooncake_base::sync::Mutex;

/// Threads that somebody owns.
#[derive(Debug)]
pub struct Threads {
    max: usize,
    running: Mutex<Vec<JoinHandle<()>>>,
}

impl Threads {
    /// No threads yet, and never more than `max` at a time.
    pub const fn new(max: usize) -> Self {
        Self { max, running: Mutex::new(Vec::new()) }
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
        running.push(thread::Builder::new().name(name.to_owned()).spawn(run)?);
        Ok(())
    }

    /// Waits for all threads but the calling one, also for those that others start meanwhile.
    pub fn join(&self) {
        loop {
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
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    };

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
        drop(gates);
        threads.join();
        assert_eq!(ended.load(Ordering::SeqCst), 2);
        threads.spawn("test", || {}).unwrap();
        threads.join();
    }
}
