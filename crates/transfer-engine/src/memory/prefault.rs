//! Makes the pages of new memory in the background, so that the first bytes written there do not
//! wait for them.
//!
//! A page that is made when it is first written costs three times what a page does that is there
//! (2.2 GB/s against 5.5 by `pwrite` where this was measured). One thread of low priority goes over
//! the beginning of each new piece of memory: first it has the system make the pages (9 GB/s), then
//! it asks for huge pages in their place (3 GB/s), which every process maps at almost no cost. It
//! takes no more than its share of the room there is, and stops when the engine closes. Where others
//! need the processors it rests: a step that is interrupted holds a lock of the kernel that whoever
//! writes to the memory, or maps any, then waits for, and its low priority makes that long. On request
//! it also asks for huge pages under memory that the user registers, where all of the small ones are
//! there.

use std::{
    cell::RefCell,
    collections::VecDeque,
    fs,
    sync::{Arc, Weak},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use mooncake_base::sync::{Condvar, Mutex};

use super::mapping::{self, CHUNK, Mapping};
use crate::{copy, fork, region::Regions, transfer_entry::RemoteRange};

/// Of the room that there is, one part in so many is taken in advance.
const MEMORY_FRACTION: u64 = 8;

/// How much the thread gives way to others, as `nice` counts.
const NICENESS: i32 = 15;

/// How long it rests where the processor was taken from it, at first and at most.
const BACKOFF_MIN: Duration = Duration::from_millis(20);
const BACKOFF_MAX: Duration = Duration::from_millis(200);

/// The thread of one engine, which exists while there is something to do.
#[derive(Debug)]
pub(crate) struct Prefaulter {
    shared: Arc<Shared>,
    /// The most bytes of one piece of memory.
    bytes_max: u64,
    generation: u64,
}

/// What the engine and the thread share.
#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// It closes.
    closing: Condvar,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Task>,
    thread: Option<JoinHandle<()>>,
    is_running: bool,
    is_closed: bool,
}

/// How the processors are shared with others, by how often one was taken from this thread.
#[derive(Debug, Default)]
struct CpuPressure {
    preemptions: Option<i64>,
    /// The last rest; none since a step that was not interrupted.
    rest: Option<Duration>,
}

#[derive(Debug)]
enum Task {
    /// New memory, and how much of it is made ready.
    New(Weak<Mapping>, u64),
    /// Memory of the user, by its first address, for as long as it is registered.
    Registered(Weak<Regions>, u64),
}

impl Prefaulter {
    /// One that prepares so many bytes of each piece of memory; none at all for 0.
    pub(crate) fn new(bytes_max: u64) -> Self {
        Self { shared: Arc::default(), bytes_max, generation: fork::generation() }
    }

    /// Has the pages of a piece of memory made.
    pub(crate) fn prefault(&self, mapping: &Arc<Mapping>) {
        let bytes = self.bytes_max.min(mapping.length());
        if bytes > 0 {
            self.enqueue(Task::New(Arc::downgrade(mapping), bytes));
        }
    }

    /// Has huge pages put under memory that the user has registered.
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
        let thread = thread::Builder::new().name("mooncake-pages".into());
        // Without a thread the pages are made as they are written.
        state.thread = thread.spawn(move || run(&shared)).ok();
        state.is_running = state.thread.is_some();
    }

    /// Stops the thread, within the time that one step takes, and waits for it.
    pub(crate) fn close(&self) {
        if fork::is_forked_since(self.generation) {
            return;
        }
        let mut state = self.shared.state.lock();
        state.is_closed = true;
        state.queue.clear();
        let thread = state.thread.take();
        drop(state);
        self.shared.closing.notify_all();
        let is_other = |thread: &JoinHandle<()>| thread.thread().id() != thread::current().id();
        if thread.filter(is_other).is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that makes pages panicked");
        }
    }

    /// Whether there is nothing left to do.
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

impl Shared {
    fn is_closed(&self) -> bool {
        self.state.lock().is_closed
    }

    /// Waits so long, or until it closes.
    fn sleep_or_closed(&self, time: Duration) {
        let until = Instant::now() + time;
        let mut state = self.state.lock();
        while !state.is_closed && !self.closing.wait_until(&mut state, until).timed_out() {}
    }
}

impl CpuPressure {
    /// How long to rest, told how often the thread has had to give way up to now.
    fn backoff(&mut self, preemptions: i64) -> Option<Duration> {
        let before = self.preemptions.replace(preemptions);
        let is_preempted = before.is_some_and(|before| before < preemptions);
        let longer = self.rest.map_or(BACKOFF_MIN, |rest| (rest * 2).min(BACKOFF_MAX));
        self.rest = is_preempted.then_some(longer);
        self.rest
    }
}

fn run(shared: &Shared) {
    fork::set_nice(NICENESS);
    let pressure = RefCell::<CpuPressure>::default();
    loop {
        let mut state = shared.state.lock();
        let Some(task) = state.queue.pop_front() else {
            state.is_running = false;
            return;
        };
        drop(state);
        let should_continue = || {
            let rest = pressure.borrow_mut().backoff(fork::preemption_count());
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
        // Huge pages only where all pages are there already: the two together must not take more
        // room than was counted.
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
    // Should the range be taken back in between, the advice changes no byte of what comes there.
    let is_still_there = || find().is_some_and(|now| Arc::ptr_eq(&now, &region));
    while at + block <= end && should_continue() && is_still_there() {
        if copy::are_resident(at as usize, CHUNK) && !mapping::collapse(at as usize, CHUNK) {
            return;
        }
        at += block;
    }
}

/// Does something to every whole chunk of the beginning, until it fails or nobody wants it.
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

/// How many bytes this process may still take: of the machine, and of its control group.
fn available_memory() -> u64 {
    let number = |text: String| text.trim().parse::<u64>().ok();
    let available = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    });
    let of_group = || {
        let most = fs::read_to_string("/sys/fs/cgroup/memory.max").ok().and_then(number)?;
        let used = fs::read_to_string("/sys/fs/cgroup/memory.current").ok().and_then(number)?;
        Some(most.saturating_sub(used))
    };
    let of_machine = available.map_or(0, |kib| kib.saturating_mul(1024));
    of_group().map_or(of_machine, |group| group.min(of_machine))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait_until(what: &str, is_so: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_so() {
            assert!(Instant::now() < deadline, "{what}");
            thread::yield_now();
        }
    }

    #[test]
    fn the_pages_of_the_beginning_are_made_and_no_others() {
        let prefaulter = Prefaulter::new(6 << 20);
        let mapping = Arc::new(Mapping::create(16 << 20, None).unwrap());
        prefaulter.prefault(&mapping);
        wait_until("the thread ends", || prefaulter.is_done());
        let present: Vec<bool> = (0..8).map(|index| mapping.is_chunk_resident(index)).collect();
        assert_eq!(present, [true, true, true, false, false, false, false, false]);
        // And what is written to both kinds is read back.
        let bytes: Vec<u8> = (0..16 << 20).map(|i| (i % 251) as u8).collect();
        let mut copy = bytes.clone();
        // SAFETY: the vector outlives the call and nobody else uses it.
        let from = unsafe { crate::LocalRange::held(copy.as_mut_ptr(), copy.len()) };
        mapping.write(0, from, &mapping::open_gate).unwrap();
        copy.fill(0);
        mapping.read(0, from, &mapping::open_gate).unwrap();
        assert!(copy == bytes);
    }

    #[test]
    fn closing_ends_it_and_memory_that_went_is_passed_over() {
        let prefaulter = Prefaulter::new(1 << 30);
        for _ in 0..4 {
            prefaulter.prefault(&Arc::new(Mapping::create(64 << 20, None).unwrap()));
        }
        let kept = Arc::new(Mapping::create(256 << 20, None).unwrap());
        prefaulter.prefault(&kept);
        prefaulter.close();
        prefaulter.prefault(&kept);
        assert_eq!(Arc::strong_count(&kept), 1, "nobody uses it after the end");
        let off = Prefaulter::new(0);
        off.prefault(&kept);
        assert!(off.is_done());
    }

    #[test]
    fn memory_of_the_user_keeps_its_bytes_and_what_was_not_touched_stays_away() {
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
        regions.register(base, bytes.len() as u64, "*", crate::region::Backing::User).unwrap();
        prefaulter.collapse(&regions, base);
        wait_until("the thread ends", || prefaulter.is_done());
        assert!(!copy::are_resident(base as usize + touched, CHUNK));
        assert!(bytes[..touched].iter().enumerate().all(|(i, byte)| *byte == (i % 251) as u8));
    }

    #[test]
    fn who_was_interrupted_rests_longer_and_longer_until_a_step_goes_through() {
        let mut pressure = CpuPressure::default();
        // How often the thread gave way before its first step says nothing.
        assert_eq!([5, 5].map(|preemptions| pressure.backoff(preemptions)), [None; 2]);
        assert_eq!(pressure.backoff(6), Some(BACKOFF_MIN));
        assert_eq!(pressure.backoff(9), Some(BACKOFF_MIN * 2));
        assert_eq!(
            (10..20).filter_map(|preemptions| pressure.backoff(preemptions)).last(),
            Some(BACKOFF_MAX)
        );
        assert_eq!(pressure.backoff(19), None);
        assert_eq!(pressure.backoff(20), Some(BACKOFF_MIN));
    }

    #[test]
    fn closing_ends_a_rest() {
        let shared = Arc::<Shared>::default();
        let resting = Arc::clone(&shared);
        let thread = thread::spawn(move || resting.sleep_or_closed(Duration::from_secs(3600)));
        shared.state.lock().is_closed = true;
        shared.closing.notify_all();
        thread.join().unwrap();
    }

    #[test]
    fn there_is_some_room() {
        assert!(available_memory() > 1 << 20);
    }
}
