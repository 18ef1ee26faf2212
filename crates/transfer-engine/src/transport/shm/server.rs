//! The server thread of an engine's connections to processes of the same host.
//!
//! The thread accepts peers, answers which region contains an address, and handles withdrawals in
//! both directions.

mod connection;
mod wake_event;

use std::{
    collections::HashMap,
    io,
    os::fd::{AsRawFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_base::{EngineId, Error, ErrorCode, Result};
use mooncake_os::{acceptor::ACCEPT_PAUSE, threads::Threads};

pub(crate) use self::connection::AuthPolicy;
use self::{
    connection::{ConnectionEvent, ServerConnection},
    wake_event::WakeEvent,
};
use super::{
    client::Attachment,
    link::{Link, Received, effective_user, poll, poll_readable},
};
use crate::{
    memory::{exported_memory::ExportedMemory, region::Region},
    metrics::Refusals,
    token::Token,
};

/// The maximum number of peers attached to one engine; further connections are refused.
const CLIENTS_MAX: usize = 4096;

/// The maximum number of peers in their handshake; above it the oldest one gives way.
const HANDSHAKES_MAX: usize = 256;

/// The maximum duration of a peer's handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// The interval at which the thread wakes up without an event.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The maximum number of messages read from one connection before the others are served.
const MESSAGES_PER_POLL: usize = 64;

/// The server of an engine: owns the thread and all connections to peers of this host.
#[derive(Debug)]
pub(crate) struct ShmServer {
    shared: Arc<ServerShared>,
    name: String,
    threads: Threads,
}

#[derive(Debug)]
pub(super) struct ServerShared {
    lent: Arc<ExportedMemory>,
    auth: AuthPolicy,
    wake: WakeEvent,
    state: Mutex<Connections>,
    /// Signaled when a withdrawal was confirmed or a peer is gone.
    withdrawal_done: Condvar,
    is_stopped: AtomicBool,
}

#[derive(Debug, Default)]
struct Connections {
    last_id: u64,
    /// Peers attached to this engine.
    clients: HashMap<u64, ServerConnection>,
    /// Peers to which this engine is attached.
    attachments: HashMap<u64, Arc<Attachment>>,
    /// The thread serves nothing any more.
    is_ended: bool,
    /// Withdrawals that were sent and not yet confirmed, by peer id and region base. The region keeps
    /// the memory until the peer has left it.
    pending: HashMap<(u64, u64), Option<Arc<Region>>>,
}

impl ShmServer {
    /// Listens on a socket with a unique name and starts the thread.
    ///
    /// # Errors
    /// The socket or the thread could not be created.
    pub(crate) fn start(lent: Arc<ExportedMemory>, auth: AuthPolicy) -> io::Result<Self> {
        // The socket's name is not derived from the engine's id, which is public.
        let name = format!("mooncake-{:032x}", EngineId::random().bits());
        let listener = Link::listen(&name)?;
        let shared = Arc::new(ServerShared {
            lent,
            auth,
            wake: WakeEvent::new()?,
            state: Mutex::default(),
            withdrawal_done: Condvar::new(),
            is_stopped: AtomicBool::new(false),
        });
        let served = Arc::clone(&shared);
        let threads = Threads::new(1);
        threads.spawn("mooncake-shm", move || serve(&served, &listener))?;
        Ok(Self { shared, name, threads })
    }

    /// Returns the name of the abstract socket that peers connect to.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn id(&self) -> EngineId {
        self.shared.lent.id
    }

    pub(super) fn token(&self) -> Option<&Token> {
        self.shared.auth.token.as_ref()
    }

    pub(super) fn refusals(&self) -> &Refusals {
        &self.shared.auth.refusals
    }

    pub(super) const fn shared(&self) -> &Arc<ServerShared> {
        &self.shared
    }

    /// Tells every attached peer that the region is withdrawn. The region must already be removed
    /// from the region table, so that no peer learns of it again.
    pub(crate) fn begin_withdrawal(&self, region: &Arc<Region>) {
        self.shared.begin_withdrawal(Some(region));
    }

    /// Waits until each peer has confirmed the withdrawal of this base or is gone. Peers that have
    /// not confirmed at the deadline are told to disconnect, and are not waited for again.
    ///
    /// # Errors
    /// A peer did not confirm in time; it may be in the middle of a copy.
    pub(crate) fn await_withdrawal(&self, base: u64, deadline: Instant) -> Result<()> {
        self.shared.await_withdrawal(Some(base), deadline)
    }

    /// Withdraws all regions, closes all connections, and joins the thread.
    pub(crate) fn stop(&self, timeout: Duration) {
        self.threads.stop(|| {
            // Peers that do not confirm are disconnected when the thread ends.
            self.shared.begin_withdrawal(None);
            if let Err(error) = self.shared.await_withdrawal(None, Instant::now() + timeout) {
                tracing::info!(%error, "a peer of this host did not confirm that the engine closes");
            }
            self.shared.is_stopped.store(true, Ordering::Release);
            self.shared.wake.notify();
        });
    }
}

impl Drop for ShmServer {
    fn drop(&mut self) {
        self.stop(Duration::ZERO);
    }
}

impl ServerShared {
    /// Adds an attachment, which the thread serves from now on. Returns its id.
    ///
    /// # Errors
    /// The engine is closed: nothing would take the answers of the peer.
    pub(super) fn attach(&self, attachment: &Arc<Attachment>) -> Result<u64> {
        let mut state = self.state.lock();
        if state.is_ended {
            return Err(Error::closed("the engine is closed"));
        }
        state.last_id += 1;
        let id = state.last_id;
        state.attachments.insert(id, Arc::clone(attachment));
        drop(state);
        self.wake.notify();
        Ok(id)
    }

    pub(super) fn detach(&self, id: u64) {
        let gone = self.state.lock().attachments.remove(&id);
        if let Some(attachment) = gone {
            attachment.close();
            self.wake.notify();
        }
    }

    /// Withdraws one region, or with `None` every region announced to a peer.
    fn begin_withdrawal(&self, region: Option<&Arc<Region>>) {
        let mut state = self.state.lock();
        let Connections { clients, pending, .. } = &mut *state;
        for (id, client) in clients {
            for base in client.withdraw(region.map(|region| region.base)) {
                pending.insert((*id, base), region.cloned());
            }
        }
    }

    /// Waits until no withdrawal of this base, or with `None` of any, is open.
    fn await_withdrawal(&self, base: Option<u64>, deadline: Instant) -> Result<()> {
        let mut state = self.state.lock();
        loop {
            let open = state.pending.keys().filter(|pair| base.is_none_or(|base| base == pair.1));
            let open: Vec<(u64, u64)> = open.copied().collect();
            let Some((_, first)) = open.first() else { return Ok(()) };
            let is_expelled = |(id, _): &(u64, u64)| {
                state.clients.get(id).is_none_or(ServerConnection::is_expelled)
            };
            let is_hopeless = open.iter().all(is_expelled);
            if !is_hopeless && !self.withdrawal_done.wait_until(&mut state, deadline).timed_out() {
                continue;
            }
            let is_open = |pair: &&(u64, u64)| state.pending.contains_key(pair);
            let late: Vec<u64> = open.iter().filter(is_open).map(|(id, _)| *id).collect();
            if late.is_empty() {
                continue;
            }
            for id in &late {
                state.clients.get_mut(id).into_iter().for_each(ServerConnection::expel);
            }
            let text = "a peer of this host did not leave the range in time and was disconnected; \
                unregister it again before its memory is freed";
            return Err(Error::new(ErrorCode::OBJECT_REPLICA_BUSY, text)
                .with("address", format_args!("{first:#x}"))
                .with("peers", late.len()));
        }
    }

    fn accept(&self, listener: &Link) -> io::Result<()> {
        loop {
            let link = match listener.accept() {
                Ok(link) => link,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            };
            // Peers of other users take no place.
            let user = link.credentials().map(|peer| peer.user);
            if user.as_ref().ok() != Some(&effective_user()) {
                tracing::debug!(?user, "a peer of this host was refused: another user");
                continue;
            }
            let mut state = self.state.lock();
            let handshakes = state.clients.iter().filter(|(_, client)| client.is_handshaking());
            let handshakes: Vec<u64> = handshakes.map(|(id, _)| *id).collect();
            if handshakes.len() >= HANDSHAKES_MAX || state.clients.len() >= CLIENTS_MAX {
                // Ids ascend: the smallest is the oldest.
                let oldest = handshakes.into_iter().min();
                oldest.into_iter().for_each(|id| drop_client(&mut state, id));
            }
            if state.clients.len() >= CLIENTS_MAX {
                tracing::warn!(
                    limit = CLIENTS_MAX,
                    "too many peers of this host, connection refused"
                );
                continue;
            }
            state.last_id += 1;
            let id = state.last_id;
            state.clients.insert(id, ServerConnection::new(link));
        }
    }

    fn serve_client(&self, id: u64) {
        let mut state = self.state.lock();
        for _ in 0..MESSAGES_PER_POLL {
            let Some(client) = state.clients.get_mut(&id) else { return };
            match client.serve_next(&self.lent, &self.auth) {
                ConnectionEvent::Idle => return,
                ConnectionEvent::Served => {}
                ConnectionEvent::Confirmed(base) => {
                    state.pending.remove(&(id, base));
                    self.withdrawal_done.notify_all();
                }
                ConnectionEvent::Closed => {
                    drop_client(&mut state, id);
                    self.withdrawal_done.notify_all();
                    return;
                }
            }
        }
    }

    fn serve_attachment(&self, id: u64) {
        let found = self.state.lock().attachments.get(&id).cloned();
        let Some(attachment) = found else { return };
        for _ in 0..MESSAGES_PER_POLL {
            let is_expected = match attachment.link().receive() {
                Received::ShmMessage(message, file) => attachment.handle_message(message, file),
                Received::Empty => return,
                Received::Malformed | Received::Closed => false,
            };
            if !is_expected {
                self.detach(id);
                return;
            }
        }
    }

    fn drop_stalled_handshakes(&self) {
        let mut state = self.state.lock();
        state.clients.retain(|_, client| !client.is_handshaking_for(HANDSHAKE_TIMEOUT));
    }
}

fn drop_client(state: &mut Connections, id: u64) {
    if let Some(client) = state.clients.remove(&id) {
        client.shut_down();
    }
    state.pending.retain(|(client, _), _| *client != id);
}

/// The owner of a polled file descriptor.
#[derive(Debug, Clone, Copy)]
enum PollSource {
    Wake,
    Listener,
    Client(u64),
    Attachment(u64),
}

fn serve(shared: &ServerShared, listener: &Link) {
    let mut polled = Vec::new();
    let mut sources = Vec::new();
    let mut accept_from = Instant::now();
    while !shared.is_stopped.load(Ordering::Acquire) {
        polled.clear();
        sources.clear();
        let mut watch = |source: PollSource, descriptor: RawFd| {
            sources.push(source);
            polled.push(poll_readable(descriptor));
        };
        watch(PollSource::Wake, shared.wake.as_fd().as_raw_fd());
        let is_accepting = accept_from <= Instant::now();
        if is_accepting {
            watch(PollSource::Listener, listener.raw_fd());
        }
        // Another thread may close a listed file descriptor before the poll. The poll then reports
        // that, or an event of an unrelated socket; serving the source finds no message.
        let state = shared.state.lock();
        state.clients.iter().for_each(|(id, one)| watch(PollSource::Client(*id), one.raw_fd()));
        for (id, attachment) in &state.attachments {
            watch(PollSource::Attachment(*id), attachment.link().raw_fd());
        }
        drop(state);
        poll(&mut polled, if is_accepting { POLL_INTERVAL } else { ACCEPT_PAUSE });
        for (source, one) in sources.iter().zip(&polled) {
            if one.revents == 0 {
                continue;
            }
            match *source {
                PollSource::Wake => shared.wake.clear(),
                PollSource::Listener => {
                    if let Err(error) = shared.accept(listener) {
                        tracing::warn!(%error, "a peer of this host could not be accepted");
                        accept_from = Instant::now() + ACCEPT_PAUSE;
                    }
                }
                PollSource::Client(id) => shared.serve_client(id),
                PollSource::Attachment(id) => shared.serve_attachment(id),
            }
        }
        shared.drop_stalled_handshakes();
    }
    let mut state = shared.state.lock();
    state.is_ended = true;
    state.clients.clear();
    state.pending.clear();
    let attachments: Vec<_> = state.attachments.drain().collect();
    drop(state);
    attachments.iter().for_each(|(_, attachment)| attachment.close());
    shared.withdrawal_done.notify_all();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silent_strangers_give_way_in_the_order_of_their_arrival() {
        let lent = ExportedMemory::register(EngineId::random());
        let server = ShmServer::start(lent, AuthPolicy::default()).unwrap();
        let connect = |_| Link::connect(server.name(), Duration::from_secs(20)).unwrap();
        let strangers: Vec<Link> = (0..HANDSHAKES_MAX + 8).map(connect).collect();
        let begin = Instant::now();
        while !strangers[..8].iter().all(Link::is_closed) {
            assert!(begin.elapsed() < HANDSHAKE_TIMEOUT, "the first ones give way at once");
            std::thread::yield_now();
        }
        assert!(!strangers[8..].iter().any(Link::is_closed), "the others are left alone");
        assert!(server.shared.state.lock().clients.len() <= HANDSHAKES_MAX);
    }
}
