//! Dummy clients of a daemon: their registration, and forwarding of their calls to the master.
//!
//! A dummy client has an id of its own, like every client; only its calls pass through the daemon.
//! The master therefore tracks its reads and writes separately, and the state of a dead dummy
//! client is released with the same unregister call that live clients send.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use mooncake_base::sync::Mutex;
use mooncake_base::{
    ClientId, Clock, Endpoint, Error, ErrorCode, Moment, Result, SystemClock, TenantId,
};
use mooncake_proto::{
    convert::Caller,
    v1::{self, request::Call, response},
};
use mooncake_store_client::{CallFailure, MasterLink};

use crate::{
    client_table::ClientTable,
    counters::Counters,
    owed_releases::{OwedRelease, OwedReleases},
    process::Process,
    waker::Waker,
};

/// Time limit of the unregister call for a dead client.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// The dummy clients of a daemon and the link that they share.
#[derive(Debug)]
pub(crate) struct DummyClients {
    link: Arc<dyn MasterLink>,
    /// Name under which dummy clients are registered. Port 0: no engine has this name.
    name: String,
    tenant: TenantId,
    rpc_timeout: Duration,
    unconnected_max: Duration,
    table: Mutex<ClientTable>,
    /// Sent by the thread that watches. Never locked together with the table.
    owed: Mutex<OwedReleases>,
    /// Wakes the thread that watches their processes.
    waker: Waker,
    pub(crate) counters: Counters,
    is_closed: AtomicBool,
}

impl DummyClients {
    /// Creates an empty set. It owns `link` and closes it on shutdown. Forgets a client that has had
    /// no connection for `unconnected_max`.
    pub(crate) fn new(
        link: Arc<dyn MasterLink>,
        host: String,
        tenant: TenantId,
        rpc_timeout: Duration,
        unconnected_max: Duration,
        waker: Waker,
    ) -> Self {
        Self {
            link,
            name: Endpoint::new(host, 0).to_string(),
            tenant,
            rpc_timeout,
            unconnected_max,
            table: Mutex::default(),
            owed: Mutex::default(),
            waker,
            counters: Counters::default(),
            is_closed: AtomicBool::new(false),
        }
    }

    /// Stops forwarding. Returns `false` if already closed.
    pub(crate) fn close(&self) -> bool {
        if self.is_closed.swap(true, Ordering::SeqCst) {
            return false;
        }
        self.waker.wake();
        self.link.close();
        true
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }

    /// Number of dummy clients.
    pub(crate) fn count(&self) -> usize {
        self.table.lock().count()
    }

    /// The processes of the clients whose process is known.
    pub(crate) fn processes(&self) -> Vec<(ClientId, Process)> {
        self.table.lock().processes()
    }

    /// Forwards a call of a dummy client and returns the master's response.
    ///
    /// # Errors
    /// The master cannot be reached.
    pub(crate) fn forward(
        &self,
        client: ClientId,
        mut request: v1::Request,
    ) -> Result<v1::Response> {
        let call = request.call.as_mut().ok_or_else(|| Error::invalid("the call is empty"))?;
        match call {
            Call::Register(register) => register.name.clone_from(&self.name),
            Call::Mount(mount) if !mount.segments.is_empty() => {
                let text = "a dummy client cannot mount memory; the daemon mounts it";
                return Err(Error::new(ErrorCode::NOT_SUPPORTED, text));
            }
            _ => {}
        }
        *call.caller_mut() = Some(self.caller(client));
        let kind = CallKind::of(call);
        if kind == CallKind::Use {
            self.table.lock().record_use(client);
        } else {
            // A client that registers is back, and one that leaves is released by this call.
            self.owed.lock().remove(client);
        }
        let is_leaving = kind == CallKind::Leave;
        let fences = if is_leaving { request.released_fences.clone() } else { Vec::new() };
        let begin = SystemClock.now();
        let response = self.link.call(request, begin + self.rpc_timeout);
        self.counters.count_call(SystemClock.now().since(begin), response.is_ok());
        if is_leaving {
            // With or without an answer: the client does not come again to leave.
            self.table.lock().record_leave(client);
            if let Err(failure) = &response {
                self.delay_releases(client, &failure.error);
                self.owe_release(client, fences);
            }
        }
        let response = response?;
        if let Some(response::Call::Register(_)) = &response.call {
            self.table.lock().record_registration(client);
        }
        if let Some(response::Call::Locate(located)) = &response.call
            && located.fence_ms > 0
        {
            let (fences, now) = (v1::FenceRelease::group(located.fences()), SystemClock.now());
            if let Some(tracker) = self.table.lock().fences(client) {
                tracker.add(now, Duration::from_millis(located.fence_ms), fences);
            }
        }
        Ok(response)
    }

    /// Adds a connection of a dummy client.
    ///
    /// # Errors
    /// Same as [`ClientTable::add_connection`].
    pub(crate) fn add_connection(&self, client: ClientId, process: Option<&Process>) -> Result<()> {
        self.table.lock().add_connection(client, process)?;
        self.owed.lock().remove(client);
        self.waker.wake();
        Ok(())
    }

    /// Removes a connection of a dummy client.
    pub(crate) fn remove_connection(&self, client: ClientId) {
        let is_gone = self.table.lock().remove_connection(SystemClock.now(), client);
        if self.is_closed() {
            return;
        }
        if is_gone {
            self.counters.died.increment();
            // The process may be alive and still reading, so its fences must expire by themselves.
            self.owe_release(client, Vec::new());
        }
        self.waker.wake();
    }

    /// Records that the process of a client has exited. [`send_releases`](Self::send_releases) then
    /// releases its state.
    pub(crate) fn on_process_exit(&self, client: ClientId) {
        let removed = self.table.lock().remove(client);
        if let Some(tracker) = removed {
            self.counters.died.increment();
            // A dead process cannot read, so its fences are released at once.
            self.owe_release(client, tracker.into_releases(SystemClock.now()));
        }
    }

    /// Forgets the clients that have had no connection for too long. They are not unregistered: the
    /// process is alive and may still write into memory that it maps. The master expires them, and
    /// keeps that memory as long as it does for every client that may be alive.
    pub(crate) fn drop_unconnected(&self) {
        let gone = self.table.lock().take_unconnected(SystemClock.now(), self.unconnected_max);
        for client in gone {
            self.counters.died.increment();
            tracing::info!(%client, "a dummy client without connections is forgotten");
        }
    }

    /// Returns the time at which [`drop_unconnected`](Self::drop_unconnected) or
    /// [`send_releases`](Self::send_releases) has something to do next.
    pub(crate) fn next_due(&self) -> Option<Moment> {
        let unconnected = self.table.lock().unconnected_since();
        let forgotten = unconnected.map(|since| since + self.unconnected_max);
        let released = self.owed.lock().due_at();
        forgotten.into_iter().chain(released).min()
    }

    /// Unregisters clients that are gone at the master, until a call gets no answer.
    pub(crate) fn send_releases(&self) {
        while !self.is_closed() {
            let next = self.owed.lock().next(SystemClock.now());
            let Some(release) = next else { return };
            let client = release.client;
            match self.release(release) {
                Ok(_) => {
                    self.owed.lock().remove(client);
                    tracing::info!(%client, "a dummy client is gone; its state is released");
                }
                Err(failure) => self.delay_releases(client, &failure.error),
            }
        }
    }

    /// Has the thread that watches unregister a client that is gone.
    fn owe_release(&self, client: ClientId, fences: Vec<v1::FenceRelease>) {
        self.owed.lock().add(SystemClock.now(), client, fences);
        self.waker.wake();
    }

    /// Delays all releases after one that the master did not answer.
    fn delay_releases(&self, client: ClientId, error: &Error) {
        if self.owed.lock().delay(SystemClock.now()) {
            tracing::warn!(%client, %error, "cannot unregister a dummy client that is gone; trying again");
        }
    }

    fn release(&self, release: OwedRelease) -> Result<v1::Response, Box<CallFailure>> {
        let caller = Some(self.caller(release.client));
        let request = v1::Request {
            call: Some(Call::Unregister(v1::UnregisterRequest { caller })),
            released_fences: release.fences,
            ..Default::default()
        };
        self.link.call(request, SystemClock.now() + RELEASE_TIMEOUT)
    }

    fn caller(&self, client: ClientId) -> v1::Caller {
        (&Caller { client, tenant: self.tenant.clone() }).into()
    }
}

/// What a call says of the client's registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CallKind {
    Register,
    Leave,
    /// Of a client that is registered.
    Use,
}

impl CallKind {
    const fn of(call: &Call) -> Self {
        match call {
            Call::Register(_) => Self::Register,
            Call::Unregister(_) => Self::Leave,
            _ => Self::Use,
        }
    }
}
