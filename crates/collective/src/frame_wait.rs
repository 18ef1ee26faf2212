//! How a thread waits for frames: it polls the rings for a short time, then sleeps until a peer or
//! another thread wakes it.

use std::{
    io,
    sync::Arc,
    task::Waker,
    thread,
    time::{Duration, Instant},
};

use mooncake_base::sync::Mutex;
use mooncake_os::spin_wait::{ANSWER_SPIN_TIME, SpinWait};

use crate::{
    completion::{Completion, Driver, RECHECK},
    inbox::{Inbox, messages::Outgoing},
    mesh::{
        Mesh,
        waiting::{Attention, Polling},
    },
    thread_waker::ThreadWaker,
};

/// How often a thread polls before it offers its processor to others each time: some microseconds.
const LOOKS_BEFORE_YIELD: u32 = 100;

/// The waits of one group.
#[derive(Debug)]
pub(crate) struct FrameWait {
    mesh: Arc<Mesh>,
    inbox: Arc<Inbox>,
    spin_wait: Mutex<SpinWait>,
}

impl FrameWait {
    pub(crate) fn new(mesh: Arc<Mesh>, inbox: Arc<Inbox>) -> Arc<Self> {
        let spin_wait = Mutex::new(SpinWait::new(ANSWER_SPIN_TIME));
        Arc::new(Self { mesh, inbox, spin_wait })
    }

    /// Delivers the frames in all rings.
    pub(crate) fn poll_all(&self) {
        self.mesh.poll_all();
    }

    /// Looks once for the end of an operation, and returns whether it is done. Peers that have not read
    /// our frames are woken if it is not.
    pub(crate) fn look(&self, completion: &Completion) -> bool {
        self.poll_all();
        if !completion.is_done() {
            drop(self.prepare_sleep());
        }
        completion.is_done()
    }

    /// Waits at most `time` for the end of an operation, and returns whether it is done. Calls `step` at
    /// the begin and each time that its waker was woken.
    pub(crate) fn wait_with(
        &self,
        completion: &Completion,
        time: Duration,
        mut step: impl FnMut(&Waker),
    ) -> bool {
        let thread = ThreadWaker::of_this_thread();
        let waker = Waker::from(Arc::clone(&thread));
        completion.add_waker(waker.clone());
        let begun = Instant::now();
        loop {
            let polling = self.mesh.begin_polling();
            step(&waker);
            if completion.is_done() {
                return true;
            }
            if let Some(polling) = &polling {
                self.spin(polling, || thread.is_woken());
            }
            let left = time.saturating_sub(begun.elapsed());
            if left.is_zero() {
                completion.remove_waker(&waker);
                return false;
            }
            if !thread.park(Duration::ZERO) {
                self.sleep(&thread, polling, left.min(RECHECK));
            }
        }
    }

    /// Lets this thread sleep until it is woken, at most `time`, and ends its polling.
    /// Peers wake this process for their frames meanwhile, and those that have not read ours are
    /// woken. Returns whether the thread was woken.
    pub(crate) fn sleep(
        &self,
        thread: &ThreadWaker,
        polling: Option<Polling<'_>>,
        time: Duration,
    ) -> bool {
        let sleep = self.mesh.begin_sleep();
        self.wake_readers();
        drop(polling);
        sleep.until_woken(thread, time)
    }

    /// Lets peers wake this process for their frames until the operation is done.
    pub(crate) fn attend(&self, completion: &Completion) {
        completion.keep(self.prepare_sleep());
    }

    /// Lets a thread sleep: as long as the result lives, peers wake this process for their frames. Those
    /// that have not read ours are woken.
    fn prepare_sleep(&self) -> Attention {
        let attention = self.mesh.pay_attention();
        self.wake_readers();
        attention
    }

    fn wake_readers(&self) {
        for link in self.mesh.wake_readers() {
            self.inbox.push_outgoing(Outgoing::Rest(link));
        }
    }

    /// Polls the rings for a short time, until there is something to do.
    fn spin(&self, polling: &Polling<'_>, is_over: impl Fn() -> bool) {
        let Some(mut spin_wait) = self.spin_wait.try_lock() else { return };
        let mut looks = 0_u32;
        spin_wait.poll(|| {
            polling.poll();
            looks += 1;
            if looks > LOOKS_BEFORE_YIELD {
                // The thread that this one waits for may be queued for the same processor.
                thread::yield_now();
            }
            if is_over() { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
        });
    }
}

/// Messages end when their frames come.
impl Driver for FrameWait {
    fn wait(&self, completion: &Completion, time: Duration) -> bool {
        if time.is_zero() {
            self.look(completion)
        } else {
            self.wait_with(completion, time, |_| {})
        }
    }

    fn detach(&self, completion: &Completion) {
        self.attend(completion);
    }
}
