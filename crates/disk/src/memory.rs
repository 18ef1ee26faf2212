//! Memory that reads write to: ranges of callers, and the arena of a directory.
//!
//! A read may write to memory until its completion is reaped, whatever becomes of the thread that
//! asked for it. So memory travels with the read: a [`LentRange`] or an [`ArenaSlot`] has one owner,
//! which alone may write to it, cannot be cloned, and comes back with the completion. Nothing outside
//! of this module makes references out of addresses, and only the ring tells addresses to the kernel.
#![allow(unsafe_code, reason = "the memory of callers arrives as addresses")]

use std::{
    fmt,
    marker::PhantomData,
    mem::ManuallyDrop,
    ptr::NonNull,
    slice,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread::{self, Thread},
    time::Duration,
};

use mooncake_base::sync::Mutex;

/// The most bytes that one read of the arena takes: a block of a payload and units around it, or a
/// packed record with the longest name.
pub(crate) const SLOT_BYTES: usize = 384 * 1024;

/// The alignment of slots: the largest unit of a directory.
const SLOT_ALIGNMENT: usize = 64 * 1024;

/// Memory of the caller that a read fills.
pub struct Destination<'a> {
    address: NonNull<u8>,
    length: usize,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: it stands for a `&mut [u8]`, which is `Send`; see `from_raw` for other memory.
unsafe impl Send for Destination<'_> {}

impl<'a> Destination<'a> {
    /// Names memory by its address, as that of a registered segment, which no slice may stand for
    /// because other processes or devices can see it.
    ///
    /// # Safety
    /// For `'a` the range is mapped and writable, no reference of Rust points into it, no other
    /// `Destination` overlaps it, and any thread may write to it.
    pub const unsafe fn from_raw(address: NonNull<u8>, length: usize) -> Self {
        Self { address, length, memory: PhantomData }
    }

    /// Returns the number of bytes.
    pub const fn len(&self) -> usize {
        self.length
    }

    /// Tells whether there is no byte.
    pub const fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Lends the memory again, for a shorter time.
    pub(crate) const fn reborrow(&mut self) -> Destination<'_> {
        Destination { address: self.address, length: self.length, memory: PhantomData }
    }
}

impl<'a> From<&'a mut [u8]> for Destination<'a> {
    fn from(bytes: &'a mut [u8]) -> Self {
        Self { length: bytes.len(), address: NonNull::from(bytes).cast(), memory: PhantomData }
    }
}

impl fmt::Debug for Destination<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:p}", self.length, self.address)
    }
}

/// Counts what is lent, and wakes the lender.
struct Loans {
    count: AtomicUsize,
    lender: Thread,
}

/// The scope of [`lend`].
pub(crate) struct Lender<'env> {
    loans: Arc<Loans>,
    /// Invariant, so that what is lent outlives the scope.
    env: PhantomData<fn(&'env ()) -> &'env ()>,
}

/// Calls `run`, which may lend memory to other threads; returns once all of it is back, also if
/// `run` panics.
pub(crate) fn lend<'env, R>(run: impl FnOnce(&Lender<'env>) -> R) -> R {
    struct WaitForAll(Arc<Loans>);
    impl Drop for WaitForAll {
        fn drop(&mut self) {
            while self.0.count.load(Ordering::Acquire) != 0 {
                thread::park_timeout(Duration::from_secs(1));
            }
        }
    }
    let loans = Arc::new(Loans { count: AtomicUsize::new(0), lender: thread::current() });
    let _wait = WaitForAll(loans.clone());
    run(&Lender { loans, env: PhantomData })
}

impl<'env> Lender<'env> {
    pub(crate) fn lend(&self, destination: Destination<'env>) -> LentRange {
        self.loans.count.fetch_add(1, Ordering::Relaxed);
        LentRange {
            address: destination.address,
            length: destination.length,
            loans: self.loans.clone(),
        }
    }
}

/// Memory of a caller, which waits in [`lend`] until this is dropped. The only way to its bytes.
pub(crate) struct LentRange {
    address: NonNull<u8>,
    length: usize,
    loans: Arc<Loans>,
}

// SAFETY: it alone names its bytes, and `Destination` says that any thread may write to them.
unsafe impl Send for LentRange {}
// SAFETY: a shared reference to it gives the address only.
unsafe impl Sync for LentRange {}

impl LentRange {
    /// Cuts the range in two.
    pub(crate) fn split_at(self, middle: usize) -> (Self, Self) {
        assert!(middle <= self.length, "the middle lies in the range");
        let whole = ManuallyDrop::new(self);
        // SAFETY: `whole` is not dropped, and the count is not read twice.
        let loans = unsafe { std::ptr::read(&raw const whole.loans) };
        loans.count.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the sum lies in the range, or at its end.
        let second = unsafe { whole.address.add(middle) };
        let first = Self { address: whole.address, length: middle, loans: loans.clone() };
        (first, Self { address: second, length: whole.length - middle, loans })
    }

    pub(crate) const fn len(&self) -> usize {
        self.length
    }

    /// Tells whether the first byte lies on a multiple of this power of two.
    pub(crate) fn is_aligned(&self, alignment: usize) -> bool {
        self.address.addr().get().is_multiple_of(alignment)
    }

    pub(crate) const fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the lender promised that the range is writable while it waits, and it waits for
        // this; nothing else names the range, and the reference borrows this.
        unsafe { slice::from_raw_parts_mut(self.address.as_ptr(), self.length) }
    }
}

impl Drop for LentRange {
    fn drop(&mut self) {
        let lender = self.loans.lender.clone();
        // From here on the memory, and the frame of the lender, may be gone.
        if self.loans.count.fetch_sub(1, Ordering::Release) == 1 {
            lender.unpark();
        }
    }
}

impl fmt::Debug for LentRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} lent bytes at {:p}", self.length, self.address)
    }
}

/// Slots that nobody owns.
struct FreeSlots {
    /// The slot that was used last is used next, as it is in the caches.
    numbers: Vec<u32>,
    is_wanted: bool,
}

/// Memory of a directory for reads that cannot go to the memory of the caller. Pages are taken when
/// they are first read into.
pub(crate) struct Arena {
    start: NonNull<u8>,
    slots: usize,
    free: Mutex<FreeSlots>,
    /// Called when a slot is free again after [`Arena::take`] found none.
    on_free: Box<dyn Fn() + Send + Sync>,
    /// What `start` points into; never touched by this name again.
    _memory: Vec<u8>,
}

// SAFETY: bytes are reached through slots only, and each slot is owned by one thread at a time.
unsafe impl Send for Arena {}
// SAFETY: the same, and the list of free slots has a lock.
unsafe impl Sync for Arena {}

impl Arena {
    /// Reserves memory of this size, of two slots at least. Calls `on_free` when a slot is free again
    /// after none was.
    pub(crate) fn new(bytes: usize, on_free: impl Fn() + Send + Sync + 'static) -> Arc<Self> {
        let slots = (bytes / SLOT_BYTES).clamp(2, 1 << 16);
        // Zeroed memory of this size comes from the kernel, which gives pages when they are touched.
        let mut memory = vec![0_u8; slots * SLOT_BYTES + SLOT_ALIGNMENT];
        let first = NonNull::from(memory.as_mut_slice()).cast::<u8>();
        let skipped = first.align_offset(SLOT_ALIGNMENT);
        // SAFETY: the memory is longer than its slots by the alignment.
        let start = unsafe { first.add(skipped) };
        let numbers = (0..slots as u32).rev().collect();
        let free = Mutex::new(FreeSlots { numbers, is_wanted: false });
        Arc::new(Self { start, slots, free, on_free: Box::new(on_free), _memory: memory })
    }

    /// Takes a slot, if one is free.
    pub(crate) fn take(self: &Arc<Self>) -> Option<ArenaSlot> {
        let mut free = self.free.lock();
        let Some(number) = free.numbers.pop() else {
            free.is_wanted = true;
            return None;
        };
        drop(free);
        Some(ArenaSlot { arena: self.clone(), number })
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arena of {} slots", self.slots)
    }
}

/// A part of the arena. The only way to its bytes.
pub(crate) struct ArenaSlot {
    arena: Arc<Arena>,
    number: u32,
}

impl ArenaSlot {
    /// Returns the bytes, of [`SLOT_BYTES`]: those of an earlier read, until one is complete.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        let at = self.number as usize * SLOT_BYTES;
        // SAFETY: slots of this number lie in the memory of the arena.
        let address = unsafe { self.arena.start.add(at) };
        // SAFETY: the number was taken off the list of free slots, so nothing else names these bytes
        // until this is dropped, and the reference borrows this. They were zeroed once.
        unsafe { slice::from_raw_parts_mut(address.as_ptr(), SLOT_BYTES) }
    }
}

impl Drop for ArenaSlot {
    fn drop(&mut self) {
        let mut free = self.arena.free.lock();
        free.numbers.push(self.number);
        let is_wanted = std::mem::take(&mut free.is_wanted);
        drop(free);
        if is_wanted {
            (self.arena.on_free)();
        }
    }
}

impl fmt::Debug for ArenaSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slot {}", self.number)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn lender_waits_until_all_ranges_are_back() {
        let mut bytes = [0; 10];
        let (send, receive) = mpsc::sync_channel::<LentRange>(2);
        let writer = thread::spawn(move || {
            for (number, mut range) in receive.iter().enumerate() {
                range.bytes().fill(number as u8 + 1);
            }
        });
        lend(|lender| {
            let (first, second) = lender.lend(bytes.as_mut_slice().into()).split_at(3);
            assert_eq!((first.len(), second.len()), (3, 7));
            send.send(first).unwrap();
            send.send(second).unwrap();
        });
        assert_eq!(bytes, [1, 1, 1, 2, 2, 2, 2, 2, 2, 2]);
        drop(send);
        writer.join().unwrap();
    }

    #[test]
    fn slots_are_aligned_and_none_is_given_twice() {
        let freed = Arc::new(AtomicUsize::new(0));
        let count = freed.clone();
        let arena = Arena::new(2 * SLOT_BYTES, move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        let (mut first, mut second) = (arena.take().unwrap(), arena.take().unwrap());
        assert!(arena.take().is_none());
        first.bytes().fill(1);
        second.bytes().fill(2);
        assert!(first.bytes().iter().all(|byte| *byte == 1));
        assert_eq!(first.bytes().as_ptr().align_offset(SLOT_ALIGNMENT), 0);
        assert_eq!(first.bytes().len(), SLOT_BYTES);
        drop(first);
        drop(second);
        assert_eq!(freed.load(Ordering::Relaxed), 1, "one call for one that found none");
        assert!(arena.take().is_some());
    }
}
