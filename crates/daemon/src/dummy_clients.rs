//! The guests of a daemon: who they are, and their way to the master.
//!
//! A guest is a client like any other, with an id of its own; only its way to the master leads
//! through here. So the master knows each guest's reads and writes apart, and what is left of a
//! guest that died is given back by the one call by which clients leave.

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

use crate::{
    client_table::ClientTable, counters::Counters, fence_tracker, process::Process, waker::Waker,
};

/// How long the master may take to hear that a guest is gone.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// Everybody who is served, and what they are served by.
#[derive(Debug)]
pub(crate) struct DummyClients {
    link: Arc<dyn MasterLink>,
    /// The name that guests are registered by. Port 0: no engine of anybody's has that name.
    name: String,
    tenant: TenantId,
    rpc_timeout: Duration,
    table: Mutex<ClientTable>,
    /// Heard by who watches their processes.
    waker: Waker,
    pub(crate) counters: Counters,
    is_closed: AtomicBool,
}

impl DummyClients {
    /// Nobody yet. `link` is the guests' own way to the master, and ends with them.
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

    /// No call goes on to the master from now on. `false`: that was so already.
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

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.table.lock().count()
    }

    /// The processes of those who have shown theirs.
    pub(crate) fn processes(&self) -> Vec<(ClientId, Process)> {
        self.table.lock().processes()
    }

    /// Passes a call of a guest on, and gives the master's answer.
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
                let text = "a guest of a daemon lends no memory; the daemon does";
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
            let (fences, now) = (fence_tracker::fences_of(located), SystemClock.now());
            if let Some(tracker) = self.table.lock().fences(client) {
                tracker.add(now, Duration::from_millis(located.fence_ms), fences);
            }
        }
        Ok(response)
    }

    /// A connection speaks for a guest from now on.
    ///
    /// # Errors
    /// As of [`ClientTable::add_connection`].
    pub(crate) fn add_connection(&self, client: ClientId, process: Option<&Process>) -> Result<()> {
        self.table.lock().add_connection(client, process)?;
        self.waker.wake();
        Ok(())
    }

    /// A connection of a guest ended.
    pub(crate) fn remove_connection(&self, client: ClientId) {
        let is_gone = self.table.lock().remove_connection(client);
        if is_gone && !self.is_closed() {
            self.counters.count_death();
            // It may live and read on: its fences end by their time.
            self.release(client, Vec::new());
        }
    }

    /// Gives back what the master holds for a guest that is gone, and these fences.
    fn release(&self, client: ClientId, fences: Vec<v1::FenceRelease>) {
        let call = Call::Unregister(v1::UnregisterRequest { caller: Some(self.caller(client)) });
        let request = v1::Request { call: Some(call), released_fences: fences };
        match self.link.call(request, SystemClock.now() + RELEASE_TIMEOUT) {
            Ok(_) => tracing::info!(%client, "a guest is gone, what it held is free"),
            // It hears nothing of the guest any more, and so comes to the same end later.
            Err(error) => {
                tracing::warn!(%client, %error, "the master was not told of a guest's end")
            }
        }
    }

    /// A guest's process is dead.
    pub(crate) fn on_process_exit(&self, client: ClientId) {
        let removed = self.table.lock().remove(client);
        if let Some(tracker) = removed {
            self.counters.count_death();
            // Whoever is dead reads no more.
            self.release(client, tracker.into_releases(SystemClock.now()));
        }
    }

    fn caller(&self, client: ClientId) -> v1::Caller {
        (&Caller { client, tenant: self.tenant.clone() }).into()
    }
}
