//! Frames between two processes of one host in shared memory.
//!
//! A ring has one writer and one reader. As long as no thread of the reader sleeps that waits for
//! frames, a frame needs no system call. Otherwise the writer wakes it: over the futex of the reader's
//! process if a thread sleeps on that, else by a frame without content over the socket. The reader
//! announces in the ring whether it sleeps, and where, and looks for frames after each announcement;
//! the writer looks at the announcement after each frame. One of the two sees the other, since both
//! write before they read. A thread of the writer that goes to sleep wakes readers that have not read
//! its frames: what it waits for may depend on them.
#![allow(unsafe_code, reason = "memory that two processes share")]

use std::{
    io,
    sync::atomic::{AtomicU32, AtomicU64, Ordering, fence},
};

use crate::shared_memory::{SharedMemory, Use};

/// Bytes of a ring. Counts of bytes are taken modulo this power of two.
const RING_BYTES: usize = 64 << 10;
/// Largest record; larger ones go over the socket.
pub(crate) const RECORD_BYTES_MAX: usize = 16 << 10;
/// The length in front of a record, which takes a multiple of these bytes.
const LENGTH_BYTES: usize = 8;

/// A ring in shared memory. Each field has a cache line of its own. All of it is atomic, so that a
/// peer that breaks the rules can do no worse than to write wrong bytes.
#[repr(C, align(64))]
struct SharedRing {
    /// Bytes that were written in all.
    written: CacheLine<AtomicU64>,
    /// Bytes that were read in all.
    read: CacheLine<AtomicU64>,
    /// Threads of the reader that poll.
    pollers: CacheLine<AtomicU32>,
    /// How the reader is woken for frames: the number of a [`Wake`].
    wake: CacheLine<AtomicU32>,
    words: [AtomicU64; RING_BYTES / LENGTH_BYTES],
}

#[repr(C, align(64))]
struct CacheLine<T>(T);

/// The rings of a pair of processes.
#[derive(Debug)]
pub(crate) struct Rings {
    memory: SharedMemory,
    /// The ring that this process writes: 0 for the one that made them, 1 for the other.
    own: usize,
}

/// How a process is woken for frames in its rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Wake {
    /// Not at all: it waits for none, or looks by itself.
    None = 0,
    /// Over the socket.
    Socket = 1,
    /// Over the futex of the process.
    Futex = 2,
}

/// What became of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Written {
    /// It is not in the ring.
    No,
    /// It is in the ring; the reader must be woken so.
    Yes(Wake),
}

impl Rings {
    /// Makes rings.
    pub(crate) fn create() -> io::Result<Self> {
        Ok(Self { memory: SharedMemory::create(size_of::<[SharedRing; 2]>())?, own: 0 })
    }

    /// The descriptor that a peer opens.
    pub(crate) fn descriptor(&self) -> i32 {
        self.memory.descriptor()
    }

    /// Opens the rings that another process has made.
    pub(crate) fn open(process: u32, descriptor: i32) -> io::Result<Self> {
        let memory = SharedMemory::open(process, descriptor, Use::ReadAndWrite)?;
        if memory.length() != size_of::<[SharedRing; 2]>() {
            return Err(io::Error::other("the file of the peer holds no rings"));
        }
        Ok(Self { memory, own: 1 })
    }

    /// Returns the ring that this process writes.
    fn outgoing(&self) -> &SharedRing {
        &self.shared()[self.own]
    }

    /// Returns the ring that this process reads.
    fn incoming(&self) -> &SharedRing {
        &self.shared()[1 - self.own]
    }

    fn shared(&self) -> &[SharedRing; 2] {
        // SAFETY: the memory is mapped as long as `self`, starts at a page and has this size; zeros
        // are valid, and all access is atomic.
        unsafe { self.memory.memory().cast().as_ref() }
    }

    /// Writes a record of several parts, if there is room. One thread at a time calls this.
    pub(crate) fn write(&self, parts: &[&[u8]]) -> Written {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        let ring = self.outgoing();
        let begin = ring.written.0.load(Ordering::Relaxed);
        let used = begin.wrapping_sub(ring.read.0.load(Ordering::Acquire));
        let taken = LENGTH_BYTES + length.next_multiple_of(LENGTH_BYTES);
        let has_room = usize::try_from(used).is_ok_and(|used| used + taken <= RING_BYTES);
        if length > RECORD_BYTES_MAX || !has_room {
            return Written::No;
        }
        let mut record = Vec::with_capacity(taken);
        record.extend_from_slice(&(length as u64).to_ne_bytes());
        parts.iter().for_each(|part| record.extend_from_slice(part));
        record.resize(taken, 0);
        ring.write(begin, &record);
        ring.written.0.store(begin.wrapping_add(taken as u64), Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let is_polled = ring.pollers.0.load(Ordering::SeqCst) > 0;
        Written::Yes(if is_polled { Wake::None } else { self.reader_wake() })
    }

    /// Returns how the peer is woken.
    pub(crate) fn reader_wake(&self) -> Wake {
        match self.outgoing().wake.0.load(Ordering::SeqCst) {
            0 => Wake::None,
            2 => Wake::Futex,
            _ => Wake::Socket,
        }
    }

    /// Returns whether the peer has not read all records.
    pub(crate) fn has_unread(&self) -> bool {
        let ring = self.outgoing();
        ring.written.0.load(Ordering::Relaxed) != ring.read.0.load(Ordering::Acquire)
    }

    /// Returns whether there is a record.
    pub(crate) fn has_record(&self) -> bool {
        let ring = self.incoming();
        ring.written.0.load(Ordering::Acquire) != ring.read.0.load(Ordering::Relaxed)
    }

    /// Lets `take` look at the next record; it is removed if `take` returns something. One thread at a
    /// time calls this.
    ///
    /// # Errors
    /// The peer has written what it must not.
    pub(crate) fn read<T>(&self, take: impl FnOnce(&[u8]) -> Option<T>) -> io::Result<Option<T>> {
        let ring = self.incoming();
        let begin = ring.read.0.load(Ordering::Relaxed);
        let found = ring.written.0.load(Ordering::SeqCst).wrapping_sub(begin);
        if found == 0 {
            return Ok(None);
        }
        let mut length = [0; LENGTH_BYTES];
        ring.read(begin, &mut length);
        let wrong = || io::Error::other("the peer has written no record");
        let length = usize::try_from(u64::from_ne_bytes(length)).map_err(|_| wrong())?;
        let taken = LENGTH_BYTES + length.min(RING_BYTES).next_multiple_of(LENGTH_BYTES);
        if length > RECORD_BYTES_MAX || found < taken as u64 || found > RING_BYTES as u64 {
            return Err(wrong());
        }
        let mut record = vec![0; length];
        ring.read(begin.wrapping_add(LENGTH_BYTES as u64), &mut record);
        let answer = take(&record);
        if answer.is_some() {
            ring.read.0.store(begin.wrapping_add(taken as u64), Ordering::Release);
        }
        Ok(answer)
    }

    /// Announces that a thread of this process polls, until [`Self::end_polling`].
    pub(crate) fn begin_polling(&self) {
        self.incoming().pollers.0.fetch_add(1, Ordering::SeqCst);
    }

    /// Takes the announcement back. The caller looks for records once more.
    pub(crate) fn end_polling(&self) {
        self.incoming().pollers.0.fetch_sub(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Announces how this process is woken for records. The caller then looks for some.
    pub(crate) fn want_wake(&self, wake: Wake) {
        self.incoming().wake.0.store(wake as u32, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }
}

impl SharedRing {
    /// Returns the words from a count of bytes on.
    fn words(&self, at: u64) -> impl Iterator<Item = &AtomicU64> {
        let first = at / LENGTH_BYTES as u64 % self.words.len() as u64;
        let (before, from) = self.words.split_at(usize::try_from(first).unwrap_or(0));
        from.iter().chain(before)
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        for (word, bytes) in self.words(at).zip(bytes.as_chunks().0) {
            word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
        }
    }

    fn read(&self, at: u64, bytes: &mut [u8]) {
        for (word, bytes) in self.words(at).zip(bytes.chunks_mut(LENGTH_BYTES)) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes()[..bytes.len()]);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test panics where a step fails")]
mod tests {
    use std::thread;

    use super::*;

    fn pair() -> (Rings, Rings) {
        let made = Rings::create().unwrap();
        let opened = Rings::open(std::process::id(), made.descriptor()).unwrap();
        (made, opened)
    }

    #[test]
    fn records_arrive_in_order_both_ways() {
        const COUNT: usize = 50_000;
        let (first, second) = pair();
        let length = |at: usize| (at * 131) % 4_000;
        thread::scope(|scope| {
            for (from, to) in [(&first, &second), (&second, &first)] {
                scope.spawn(move || {
                    for at in 0..COUNT {
                        let (head, rest) = (at.to_le_bytes(), vec![1; length(at)]);
                        while from.write(&[&head, &rest]) == Written::No {
                            thread::yield_now();
                        }
                    }
                });
                scope.spawn(move || {
                    for at in 0..COUNT {
                        let record = loop {
                            match to.read(|record| Some(record.to_vec())).unwrap() {
                                Some(record) => break record,
                                None => thread::yield_now(),
                            }
                        };
                        assert_eq!(record[..8], at.to_le_bytes());
                        assert_eq!(record.len(), 8 + length(at));
                    }
                });
            }
        });
        assert!(!first.has_record() && !second.has_record());
    }

    #[test]
    fn full_ring_and_long_records_are_refused() {
        let (first, second) = pair();
        assert_eq!(first.write(&[&[0; RECORD_BYTES_MAX + 1]]), Written::No);
        let record = [7; RECORD_BYTES_MAX - LENGTH_BYTES];
        second.want_wake(Wake::Socket);
        assert!((0..4).all(|_| first.write(&[&record]) == Written::Yes(Wake::Socket)));
        assert_eq!(first.write(&[]), Written::No);
        assert_eq!(second.read(|_| None::<()>).unwrap(), None);
        assert!(second.read(|found| (found == record).then_some(())).unwrap().is_some());
        second.begin_polling();
        assert_eq!(first.write(&[&[1]]), Written::Yes(Wake::None));
        second.end_polling();
        second.want_wake(Wake::Futex);
        assert_eq!(first.write(&[&[2]]), Written::Yes(Wake::Futex));
        second.want_wake(Wake::None);
        assert_eq!(first.write(&[&[3]]), Written::Yes(Wake::None));
    }

    #[test]
    fn wrong_lengths_of_a_peer_are_errors() {
        for (length, written) in [(u64::MAX, 64), (1 << 20, 64), (64, 8), (8, 1 << 40)] {
            let (first, second) = pair();
            first.outgoing().write(0, &u64::to_ne_bytes(length));
            first.outgoing().written.0.store(written, Ordering::SeqCst);
            second.read(|_| Some(())).unwrap_err();
        }
    }

    #[test]
    fn memory_of_another_size_is_no_ring() {
        let memory = SharedMemory::create(4096).unwrap();
        Rings::open(std::process::id(), memory.descriptor()).unwrap_err();
    }
}
