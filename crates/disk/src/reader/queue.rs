//! Operations that wait for their turn, for a place in the ring or a thread, and for a slot.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Weak},
    time::Duration,
};

use mooncake_base::sync::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};

use super::operation::Operation;
use crate::memory::Arena;

/// The operations of all calls. Calls take turns, so that a short one does not wait for a long one.
#[derive(Debug)]
pub(crate) struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
    /// Written to when the ring should look again.
    event: Option<OwnedFd>,
    arena: Arc<Arena>,
}

#[derive(Debug, Default)]
struct QueueState {
    calls: VecDeque<VecDeque<Operation>>,
    is_closed: bool,
    /// Whether the ring found nothing to start, and was not told of anything since.
    is_ring_idle: bool,
}

/// What the queue has for a taker.
#[derive(Debug)]
pub(crate) enum Next {
    /// An operation to start.
    Operation(Operation),
    /// Nothing at the moment: the taker is told when that changes.
    Nothing,
    /// The directory is closed, and nothing is left.
    Closed,
}

impl Queue {
    /// Creates an empty queue; with a descriptor that becomes readable for a ring.
    ///
    /// # Errors
    /// If the process has no descriptor left.
    pub(crate) fn new(arena_bytes: usize, for_ring: bool) -> io::Result<Arc<Self>> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let event = if for_ring { Some(eventfd(0, flags)?) } else { None };
        Ok(Arc::new_cyclic(|queue: &Weak<Self>| {
            let queue = queue.clone();
            let on_free = move || {
                if let Some(queue) = queue.upgrade() {
                    let is_ring_idle = queue.state.lock().wake_ring();
                    queue.tell(is_ring_idle, usize::MAX);
                }
            };
            Self {
                state: Mutex::default(),
                changed: Condvar::new(),
                event,
                arena: Arena::new(arena_bytes, on_free),
            }
        }))
    }

    /// Adds the operations of a call. They start in this order.
    pub(crate) fn push(&self, operations: VecDeque<Operation>) {
        let count = operations.len();
        if count == 0 {
            return;
        }
        let mut state = self.state.lock();
        state.calls.push_back(operations);
        let is_ring_idle = state.wake_ring();
        drop(state);
        self.tell(is_ring_idle, count);
    }

    /// Lets takers end once nothing is left.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        let is_ring_idle = state.wake_ring();
        drop(state);
        self.tell(is_ring_idle, usize::MAX);
    }

    fn tell(&self, is_ring_idle: bool, operations: usize) {
        match &self.event {
            Some(event) if is_ring_idle => {
                // A counter that is full has been told often enough.
                let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
            }
            Some(_) => {}
            None if operations == 1 => self.changed.notify_one(),
            None => self.changed.notify_all(),
        }
    }

    /// Takes the next operation; the ring is told through its event if there is none.
    pub(crate) fn take(&self) -> Next {
        let mut state = self.state.lock();
        let next = state.next(&self.arena);
        state.is_ring_idle = matches!(next, Next::Nothing);
        next
    }

    /// Waits for the next operation; `None` if the directory is closed.
    pub(crate) fn wait(&self) -> Option<Operation> {
        let mut state = self.state.lock();
        loop {
            match state.next(&self.arena) {
                Next::Operation(operation) => return Some(operation),
                Next::Closed => return None,
                // Told by `push`, `close` and the arena, all of which need the lock before.
                Next::Nothing => self.changed.wait_for(&mut state, Duration::from_secs(60)),
            };
        }
    }

    /// Returns what becomes readable when the ring should take again.
    pub(crate) fn event(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.event.as_ref().map(AsFd::as_fd)
    }
}

impl QueueState {
    fn wake_ring(&mut self) -> bool {
        std::mem::take(&mut self.is_ring_idle)
    }

    /// Takes an operation of the call whose turn it is. An operation without a slot holds up all
    /// others: those that wait in memory for an earlier one of their call would else take the slot
    /// that the earlier one needs.
    fn next(&mut self, arena: &Arc<Arena>) -> Next {
        let Some(mut call) = self.calls.pop_front() else {
            return if self.is_closed { Next::Closed } else { Next::Nothing };
        };
        let Some(mut operation) = call.pop_front() else { return Next::Nothing };
        if operation.slot_bytes > 0 {
            operation.slot = arena.take();
            if operation.slot.is_none() {
                call.push_front(operation);
                self.calls.push_front(call);
                return Next::Nothing;
            }
        }
        if !call.is_empty() {
            self.calls.push_back(call);
        }
        Next::Operation(operation)
    }
}
