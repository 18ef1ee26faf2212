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
use mooncake_base::{ClientId, Clock, Endpoint, Error, ErrorCode, Result, SystemClock, TenantId};
use mooncake_proto::{
    convert::Caller,
    v1::{self, request::Call, response},
};
use mooncake_store_client::MasterLink;

use crate::{client_table::ClientTable, counters::Counters, process::Process, waker::Waker};

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
    table: Mutex<ClientTable>,
    /// Wakes the thread that watches their processes.
    waker: Waker,
    pub(crate) counters: Counters,
    is_closed: AtomicBool,
}

impl DummyClients {
    /// Creates an empty set. It owns `link` and closes it on shutdown.
    pub(crate) fn new(
        link: Arc<dyn MasterLink>,
        host: String,
        tenant: TenantId,
        rpc_timeout: Duration,
        waker: Waker,
    ) -> Self {
        Self {
            link,
            name: Endpoint::new(host, 0).to_string(),
            tenant,
            rpc_timeout,
            table: Mutex::default(),
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
        let is_leaving = matches!(call, Call::Unregister(_));
        match call {
            Call::Register(register) => register.name.clone_from(&self.name),
            Call::Mount(mount) if !mount.segments.is_empty() => {
                let text = "a dummy client cannot mount memory; the daemon mounts it";
                return Err(Error::new(ErrorCode::NOT_SUPPORTED, text));
            }
            _ => {}
        }
        *call.caller_mut() = Some(self.caller(client));
        let begin = SystemClock.now();
        let response = self.link.call(request, begin + self.rpc_timeout);
        self.counters.count_call(SystemClock.now().since(begin), response.is_ok());
        let response = response?;
        if is_leaving {
            self.table.lock().remove(client);
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
        self.waker.wake();
        Ok(())
    }

    /// Removes a connection of a dummy client.
    pub(crate) fn remove_connection(&self, client: ClientId) {
        let is_gone = self.table.lock().remove_connection(client);
        if is_gone && !self.is_closed() {
            self.counters.died.increment();
            // The process may be alive and still reading, so its fences must expire by themselves.
            self.release(client, Vec::new());
        }
    }

    /// Unregisters a client that is gone and releases the given fences.
    fn release(&self, client: ClientId, fences: Vec<v1::FenceRelease>) {
        let call = Call::Unregister(v1::UnregisterRequest { caller: Some(self.caller(client)) });
        let request =
            v1::Request { call: Some(call), released_fences: fences, ..Default::default() };
        match self.link.call(request, SystemClock.now() + RELEASE_TIMEOUT) {
            Ok(_) => tracing::info!(%client, "a dummy client is gone; its state is released"),
            // The master expires the client later, when its heartbeats stay away.
            Err(error) => {
                tracing::warn!(%client, %error, "cannot unregister a dummy client that is gone")
            }
        }
    }

    /// Releases the state of a client whose process has exited.
    pub(crate) fn on_process_exit(&self, client: ClientId) {
        let removed = self.table.lock().remove(client);
        if let Some(tracker) = removed {
            self.counters.died.increment();
            // A dead process cannot read, so its fences are released at once.
            self.release(client, tracker.into_releases(SystemClock.now()));
        }
    }

    fn caller(&self, client: ClientId) -> v1::Caller {
        (&Caller { client, tenant: self.tenant.clone() }).into()
    }
}
