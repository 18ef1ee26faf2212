//! Bounded connection pool; the most recently used connection is taken first.

use std::sync::{Arc, Weak};

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_base::{Error, ErrorCode, Moment, Result};
use mooncake_os::call_limit;
use socket2::Socket;

use super::connection::Connection;

/// The connections of one link.
#[derive(Debug)]
pub(super) struct Pool {
    limit: usize,
    state: Mutex<PoolState>,
    returned: Condvar,
}

#[derive(Debug, Default)]
struct PoolState {
    idle: Vec<Connection>,
    /// Slots in use, with or without a connection.
    taken: usize,
    /// Callers waiting for a slot.
    waiting: usize,
    /// All open connections, so that closing wakes the callers that wait on them.
    sockets: Vec<Weak<Socket>>,
    is_closed: bool,
}

/// The right to use one connection. Dropping a slot frees it.
#[derive(Debug)]
pub(super) struct Slot<'a> {
    pool: &'a Pool,
    /// The connection, taken from the pool or made by the owner of the slot. On drop it goes back
    /// into the pool.
    pub(super) connection: Option<Connection>,
}

impl Pool {
    /// An empty pool of at most `limit` connections.
    pub(super) fn new(limit: usize) -> Self {
        Self { limit: limit.max(1), state: Mutex::default(), returned: Condvar::new() }
    }

    /// Waits for a slot, which may hold an idle connection.
    ///
    /// # Errors
    /// The pool is closed, or all connections were in use until the deadline.
    pub(super) fn acquire(&self, deadline: Moment) -> Result<Slot<'_>> {
        let mut state = self.state.lock();
        loop {
            if state.is_closed {
                return Err(link_closed());
            }
            if state.taken < self.limit {
                state.taken += 1;
                let connection = state.idle.pop();
                return Ok(Slot { pool: self, connection });
            }
            let left = call_limit::next_wait(deadline);
            if left.is_zero() {
                let text = "all connections to the master were busy until the deadline";
                return Err(Error::new(ErrorCode::RPC_TIMEOUT, text).with("limit", self.limit));
            }
            state.waiting += 1;
            self.returned.wait_for(&mut state, left);
            state.waiting -= 1;
        }
    }

    /// Registers a new connection, so that closing the pool shuts it down.
    ///
    /// # Errors
    /// The pool was closed meanwhile.
    pub(super) fn track(&self, connection: &Connection) -> Result<()> {
        let mut state = self.state.lock();
        if state.is_closed {
            return Err(link_closed());
        }
        state.sockets.retain(|socket| socket.strong_count() > 0);
        state.sockets.push(Arc::downgrade(connection.socket()));
        Ok(())
    }

    /// Drops the idle connections: one of them was found dead, and the others are as old.
    pub(super) fn drop_idle(&self) {
        let idle = std::mem::take(&mut self.state.lock().idle);
        drop(idle);
    }

    /// Shuts down every connection and wakes all waiting callers.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        state.idle.clear();
        for socket in state.sockets.drain(..).filter_map(|socket| socket.upgrade()) {
            // Fails if the peer has already closed the connection.
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
        self.returned.notify_all();
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        let mut state = self.pool.state.lock();
        state.taken -= 1;
        if !state.is_closed {
            state.idle.extend(self.connection.take());
        }
        // Usually no caller waits, and a notification costs a system call.
        let is_wanted = state.waiting > 0;
        drop(state);
        if is_wanted {
            self.pool.returned.notify_one();
        }
    }
}

/// The error of a call on a closed link.
pub(super) fn link_closed() -> Error {
    Error::closed("the link to the master was closed")
}
