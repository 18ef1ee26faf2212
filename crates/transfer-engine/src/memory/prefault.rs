//! Faults in the pages of new memory in the background, so that the first writes do not wait for
//! that.
//!
//! A page that is allocated at its first write costs three times as much as a write to a resident
//! page (2.2 GB/s against 5.5 by `pwrite`, as measured). One thread of low priority walks over the
//! beginning of each new mapping. It first allocates the pages (9 GB/s), then asks for huge pages
//! in their place (3 GB/s), which every process maps at almost no cost. It takes at most a fraction
//! of the available memory and stops when the engine closes.
//!
//! The thread backs off where other threads need the processors. A preempted step holds a kernel
//! lock. Threads that write to the memory or create a mapping wait for this lock, and the low
//! priority makes that wait long.
//!
//! On request the thread also asks for huge pages under user memory, where all of the small pages
//! are resident.

use std::{
    cell::RefCell,
    collections::VecDeque,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use mooncake_base::{
    Backoff,
    sync::{Condvar, Mutex},
};
use mooncake_os::{memory::available_memory, thread as os_thread, threads::Threads};

use super::mapping::{self, CHUNK, Mapping};
use crate::{copy, memory::region::Regions, transfer_entry::RemoteRange};

/// At most this fraction of the available memory is faulted in: one part in 8.
const MEMORY_FRACTION: u64 = 8;

/// Niceness of the thread.
const NICENESS: i32 = 15;

/// Sleeps after steps with a preemption.
const SLEEPS: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_millis(200));

/// The prefault thread of one engine, which exists while there is work.
#[derive(Debug)]
pub(crate) struct Prefaulter {
    shared: Arc<PrefaultShared>,
    /// Maximum number of bytes to fault in per mapping.
    bytes_max: u64,
    /// One has work; those before it are about to end.
    threads: Threads,
}

/// State shared by the engine and the thread.
#[derive(Debug, Default)]
struct PrefaultShared {
    state: Mutex<PrefaultQueue>,
    /// Notified when `is_closed` is set.
    closing: Condvar,
}

#[derive(Debug, Default)]
struct PrefaultQueue {
    queue: VecDeque<Task>,
    is_running: bool,
    is_closed: bool,
}

/// Tracks preemptions of this thread, which show that other threads need the processors.
#[derive(Debug, Default)]
struct CpuPressure {
    preemptions: Option<i64>,
    /// Sleeps since the last step without preemption.
    sleeps: u32,
}

#[derive(Debug)]
enum Task {
    /// New memory, with the number of bytes to fault in.
    New(Weak<Mapping>, u64),
    /// User memory by its first address, while it is registered.
    Registered(Weak<Regions>, u64),
}

impl Prefaulter {
    /// Creates a prefaulter for `bytes_max` bytes of each mapping; 0 turns it off.
    pub(crate) fn new(bytes_max: u64) -> Self {
        Self { shared: Arc::default(), bytes_max, threads: Threads::unbounded() }
    }

    /// Queues a mapping to be faulted in.
    pub(crate) fn prefault(&self, mapping: &Arc<Mapping>) {
        let bytes = self.bytes_max.min(mapping.length());
        if bytes > 0 {
            self.enqueue(Task::New(Arc::downgrade(mapping), bytes));
        }
    }

    /// Queues registered user memory to be collapsed into huge pages.
    pub(crate) fn collapse(&self, regions: &Arc<Regions>, base: u64) {
        self.enqueue(Task::Registered(Arc::downgrade(regions), base));
    }

    fn enqueue(&self, task: Task) {
        let mut state = self.shared.state.lock();
        if state.is_closed {
            return;
        }
        state.queue.push_back(task);
        if state.is_running {
            return;
        }
        let shared = Arc::clone(&self.shared);
        // Without a thread the pages are allocated as they are written.
        state.is_running = self.threads.spawn("mooncake-pages", move || run(&shared)).is_ok();
    }

    /// Stops the thread after its current step and joins it.
    pub(crate) fn close(&self) {
        if self.threads.is_forked() {
            return;
        }
        let mut state = self.shared.state.lock();
        state.is_closed = true;
        state.queue.clear();
        drop(state);
        self.shared.closing.notify_all();
        self.threads.join();
    }

    /// Returns whether no work is left.
    #[cfg(test)]
    pub(crate) fn is_done(&self) -> bool {
        !self.shared.state.lock().is_running
    }
}

impl Drop for Prefaulter {
    fn drop(&mut self) {
        self.close();
    }
}

impl PrefaultShared {
    fn is_closed(&self) -> bool {
        self.state.lock().is_closed
    }

    /// Sleeps for `time`, or until the prefaulter is closed.
    fn sleep_or_closed(&self, time: Duration) {
        let until = Instant::now() + time;
        let mut state = self.state.lock();
        while !state.is_closed && !self.closing.wait_until(&mut state, until).timed_out() {}
    }
}

impl CpuPressure {
    /// Returns how long to sleep, given the number of preemptions up to now.
    fn backoff(&mut self, preemptions: i64) -> Option<Duration> {
        let before = self.preemptions.replace(preemptions);
        let is_preempted = before.is_some_and(|before| before < preemptions);
        let sleep = is_preempted.then(|| SLEEPS.pause(self.sleeps));
        self.sleeps = if is_preempted { self.sleeps.saturating_add(1) } else { 0 };
        sleep
    }
}

fn run(shared: &PrefaultShared) {
    os_thread::set_niceness(NICENESS);
    let pressure = RefCell::<CpuPressure>::default();
    loop {
        let mut state = shared.state.lock();
        let Some(task) = state.queue.pop_front() else {
            state.is_running = false;
            return;
        };
        drop(state);
        let should_continue = || {
            let rest = pressure.borrow_mut().backoff(os_thread::preemption_count());
            rest.into_iter().for_each(|time| shared.sleep_or_closed(time));
            !shared.is_closed()
        };
        let (mapping, bytes) = match task {
            Task::New(mapping, bytes) => (mapping, bytes.min(available_memory() / MEMORY_FRACTION)),
            Task::Registered(regions, base) => {
                collapse_registered(&regions, base, &should_continue);
                continue;
            }
        };
        // Collapse only where all pages are resident already: both steps together must not take
        // more memory than was accounted for.
        if each_chunk(&mapping, bytes, &should_continue, Mapping::try_allocate_chunk) {
            each_chunk(&mapping, bytes, &should_continue, Mapping::collapse_chunk);
        }
    }
}

/// Asks for huge pages under a registered range, block by block, while it is registered.
fn collapse_registered(regions: &Weak<Regions>, base: u64, should_continue: &dyn Fn() -> bool) {
    let first = RemoteRange { address: base, length: 1 };
    let find = || regions.upgrade().and_then(|regions| regions.find(first));
    let Some(region) = find() else { return };
    let (block, end) = (CHUNK as u64, region.base + region.length);
    let mut at = region.base.next_multiple_of(block);
    // If the range is unregistered in between, the advice changes no byte of a later mapping there.
    let is_still_there = || find().is_some_and(|now| Arc::ptr_eq(&now, &region));
    while at + block <= end && should_continue() && is_still_there() {
        if copy::are_resident(at as usize, CHUNK) && !mapping::collapse(at as usize, CHUNK) {
            return;
        }
        at += block;
    }
}

/// Applies a step to every whole chunk of the beginning, until a step fails or work should stop.
fn each_chunk(
    mapping: &Weak<Mapping>,
    bytes: u64,
    should_continue: &dyn Fn() -> bool,
    step: fn(&Mapping, usize) -> bool,
) -> bool {
    let count = usize::try_from(bytes).unwrap_or(usize::MAX) / CHUNK;
    (0..count).all(|index| {
        should_continue() && mapping.upgrade().is_some_and(|mapping| step(&mapping, index))
    })
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn wait_until(what: &str, is_so: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_so() {
            assert!(Instant::now() < deadline, "{what}");
            thread::yield_now();
        }
    }

    #[test]
    fn only_the_first_pages_are_faulted_in() {
        let prefaulter = Prefaulter::new(6 << 20);
        let mapping = Arc::new(Mapping::create(16 << 20, None).unwrap());
        prefaulter.prefault(&mapping);
        wait_until("the thread ends", || prefaulter.is_done());
        let present: Vec<bool> = (0..8).map(|index| mapping.is_chunk_resident(index)).collect();
        assert_eq!(present, [true, true, true, false, false, false, false, false]);
        // Bytes written to both kinds of pages are read back.
        let bytes: Vec<u8> = (0..16 << 20).map(|i| (i % 251) as u8).collect();
        let mut copy = bytes.clone();
        // SAFETY: the vector outlives the call and nothing else uses it.
        let from = unsafe { crate::LocalRange::held(copy.as_mut_ptr(), copy.len()) };
        mapping.write(0, from, &mapping::open_gate).unwrap();
        copy.fill(0);
        mapping.read(0, from, &mapping::open_gate).unwrap();
        assert!(copy == bytes);
    }

    #[test]
    fn close_stops_the_thread_and_dropped_memory_is_skipped() {
        let prefaulter = Prefaulter::new(1 << 30);
        for _ in 0..4 {
            prefaulter.prefault(&Arc::new(Mapping::create(64 << 20, None).unwrap()));
        }
        let kept = Arc::new(Mapping::create(256 << 20, None).unwrap());
        prefaulter.prefault(&kept);
        prefaulter.close();
        prefaulter.prefault(&kept);
        assert_eq!(Arc::strong_count(&kept), 1, "no user is left after close");
        let off = Prefaulter::new(0);
        off.prefault(&kept);
        assert!(off.is_done());
    }

    #[test]
    fn collapse_keeps_bytes_and_skips_untouched_pages() {
        const BLOCKS: usize = 4;
        let prefaulter = Prefaulter::new(0);
        let mut bytes = vec![0_u8; (BLOCKS + 1) * CHUNK];
        let base = bytes.as_ptr() as u64;
        let first = base.next_multiple_of(CHUNK as u64) - base;
        let touched = first as usize + (BLOCKS - 1) * CHUNK;
        for (i, byte) in bytes[..touched].iter_mut().enumerate() {
            *byte = (i % 251) as u8;
        }
        let regions = Arc::<Regions>::default();
        regions
            .register(base, bytes.len() as u64, "*", crate::memory::region::Backing::User)
            .unwrap();
        prefaulter.collapse(&regions, base);
        wait_until("the thread ends", || prefaulter.is_done());
        assert!(!copy::are_resident(base as usize + touched, CHUNK));
        assert!(bytes[..touched].iter().enumerate().all(|(i, byte)| *byte == (i % 251) as u8));
    }

    #[test]
    fn backoff_doubles_while_preempted_then_resets() {
        let mut pressure = CpuPressure::default();
        // Preemptions before the first step do not count.
        assert_eq!([5, 5].map(|preemptions| pressure.backoff(preemptions)), [None; 2]);
        assert_eq!(pressure.backoff(6), Some(Duration::from_millis(20)));
        assert_eq!(pressure.backoff(9), Some(Duration::from_millis(40)));
        assert_eq!(
            (10..20).filter_map(|preemptions| pressure.backoff(preemptions)).last(),
            Some(Duration::from_millis(200))
        );
        assert_eq!(pressure.backoff(19), None);
        assert_eq!(pressure.backoff(20), Some(Duration::from_millis(20)));
    }

    #[test]
    fn close_ends_a_sleep() {
        let shared = Arc::<PrefaultShared>::default();
        let resting = Arc::clone(&shared);
        let thread = thread::spawn(move || resting.sleep_or_closed(Duration::from_secs(3600)));
        shared.state.lock().is_closed = true;
        shared.closing.notify_all();
        thread.join().unwrap();
    }
}
