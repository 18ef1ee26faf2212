//! Threads that wait for frames in the rings: one that polls, one that sleeps on the futex of the
//! process, and others that sleep while peers wake a reader over its socket.

use std::{net::Shutdown, sync::Arc, time::Duration};

use mooncake_base::sync::MutexGuard;
use mooncake_os::cpu::cpu_count;

use super::Mesh;
use crate::{
    link::{Link, SendProgress},
    shared_futex::SharedFutex,
    thread_waker::ThreadWaker,
};

impl Mesh {
    /// Announces to the peers that this thread polls, if the ranks of this host have a CPU each.
    pub(crate) fn begin_polling(&self) -> Option<Polling<'_>> {
        let ranks = 1 + self.state.lock().polled.len();
        (ranks > 1 && ranks <= cpu_count()).then(|| self.announce_polling())
    }

    /// Announces to the peers that this process waits for their frames, whether a thread polls or not.
    pub(crate) fn pay_attention(self: &Arc<Self>) -> Attention {
        let mut state = self.state.lock();
        state.attentions += 1;
        if state.attentions == 1 {
            state.want_wakes();
            let links = Arc::clone(&state.polled);
            drop(state);
            self.poll(&links);
        }
        Attention(Arc::clone(self))
    }

    /// Lets this thread sleep, once it calls [`Sleep::until_woken`]. From now on, peers wake this process for
    /// their frames, for as long as the result lives.
    pub(crate) fn begin_sleep(self: &Arc<Self>) -> Sleep<'_> {
        let sleeper = self.futex.as_ref().and_then(|futex| Some((futex, self.sleeper.try_lock()?)));
        let Some((futex, guard)) = sleeper else {
            return Sleep::Parked { _attention: self.pay_attention() };
        };
        let mut state = self.state.lock();
        state.has_sleeper = true;
        state.want_wakes();
        drop(state);
        Sleep::OnFutex(Sleeper { mesh: self, futex, _guard: guard })
    }

    /// Delivers the frames in all rings.
    pub(crate) fn poll_all(&self) {
        let links = Arc::clone(&self.state.lock().polled);
        self.poll(&links);
    }

    /// Wakes peers that have not read all frames in their rings. Returns links whose frame was sent in
    /// part.
    pub(crate) fn wake_readers(&self) -> Vec<Arc<Link>> {
        let links = Arc::clone(&self.state.lock().polled);
        let begun = |link: &&Arc<Link>| link.wake_reader() == SendProgress::Begun;
        links.iter().filter(begun).map(Arc::clone).collect()
    }

    fn poll(&self, links: &[Arc<Link>]) {
        for link in links.iter().filter(|link| link.has_record()) {
            if let Err(error) = self.deliver(link, None) {
                tracing::warn!(rank = link.rank, %error, "the connection to a rank ends");
                // Its reader reports the loss.
                let _ = link.stream.shutdown(Shutdown::Both);
            }
        }
    }

    pub(super) fn announce_polling(&self) -> Polling<'_> {
        let links = Arc::clone(&self.state.lock().polled);
        for rings in links.iter().filter_map(|link| link.rings.as_ref()) {
            rings.begin_polling();
        }
        Polling { mesh: self, links }
    }
}

/// A thread that polls the rings.
pub(crate) struct Polling<'a> {
    mesh: &'a Mesh,
    links: Arc<[Arc<Link>]>,
}

impl Polling<'_> {
    /// Delivers the frames in the rings.
    pub(crate) fn poll(&self) {
        self.mesh.poll(&self.links);
    }
}

impl Drop for Polling<'_> {
    fn drop(&mut self) {
        for rings in self.links.iter().filter_map(|link| link.rings.as_ref()) {
            rings.end_polling();
        }
        self.poll();
    }
}

/// A reason why peers wake this process for their frames.
#[derive(Debug)]
pub(crate) struct Attention(Arc<Mesh>);

impl Drop for Attention {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.attentions -= 1;
        if state.attentions == 0 {
            state.want_wakes();
        }
    }
}

/// A thread that sleeps, or is about to.
pub(crate) enum Sleep<'a> {
    /// It delivers the frames in the rings when it is woken.
    OnFutex(Sleeper<'a>),
    /// Another thread sleeps on the futex, or a reader of a socket delivers frames.
    Parked { _attention: Attention },
}

/// The thread of this process that peers wake over the futex.
pub(crate) struct Sleeper<'a> {
    mesh: &'a Mesh,
    futex: &'a Arc<SharedFutex>,
    _guard: MutexGuard<'a, ()>,
}

impl Sleep<'_> {
    /// Waits at most `time`. Returns whether this thread was woken through its waker.
    pub(crate) fn until_woken(&self, thread: &ThreadWaker, time: Duration) -> bool {
        match self {
            Self::OnFutex(sleeper) => {
                thread.sleep_on(sleeper.futex, time, || sleeper.mesh.poll_all())
            }
            Self::Parked { .. } => thread.park(time),
        }
    }
}

impl Drop for Sleeper<'_> {
    fn drop(&mut self) {
        let mut state = self.mesh.state.lock();
        state.has_sleeper = false;
        state.want_wakes();
        drop(state);
        // A frame that came before the peers saw that.
        self.mesh.poll_all();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test panics where a step fails")]
mod tests {
    use std::{
        sync::atomic::{AtomicU64, Ordering},
        task::Waker,
        thread,
    };

    use super::*;
    use crate::{
        link::tests::{connected, header, link_of},
        rank_frame::{Header, Kind},
        ring::Rings,
    };

    /// A frame that wakes nobody would end the test by its limit, and so would a thread of the process
    /// that cannot be woken while it sleeps for frames.
    #[test]
    fn sleeping_thread_wakes_for_frames_and_its_own_process() {
        const COUNT: u64 = 5_000;
        const LONG: Duration = Duration::from_secs(60);
        let (sender, peer) = connected();
        let rings = Rings::create().unwrap();
        let own = std::process::id();
        let opened = Rings::open(own, rings.descriptor()).unwrap();
        let receiver = link_of(peer, Some(rings));
        let mesh = Mesh::new(1, 1, None, None);
        mesh.state.lock().polled = Arc::new([Arc::clone(&receiver)]);
        let futex = SharedFutex::open(own, mesh.futex.as_ref().unwrap().descriptor()).unwrap();
        let sender =
            Link { rings: Some(opened), futex: Some(futex), ..Arc::into_inner(sender).unwrap() };
        let inbox = mesh.inbox(0).unwrap();
        let waker = ThreadWaker::of_this_thread();
        let next = AtomicU64::new(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                for number in 0..COUNT {
                    while next.load(Ordering::SeqCst) <= number {
                        thread::yield_now();
                    }
                    if number % 3 == 0 {
                        Waker::from(Arc::clone(&waker)).wake();
                    } else {
                        let header = Header { kind: Kind::Collective, ..header(number, 0) };
                        assert_eq!(sender.try_send(&header, &[]).unwrap(), SendProgress::Whole);
                    }
                }
            });
            for number in 0..COUNT {
                {
                    let mut state = inbox.state.lock();
                    state.awaited = Some((0, number, 0, 0));
                    state.waker = Some(Waker::from(Arc::clone(&waker)));
                }
                next.store(number + 1, Ordering::SeqCst);
                if number % 5 == 0 {
                    thread::yield_now();
                }
                assert!(mesh.begin_sleep().until_woken(&waker, LONG), "number={number}");
            }
        });
        assert_eq!(inbox.state.lock().parts.len() as u64, COUNT - COUNT.div_ceil(3));
    }
}
