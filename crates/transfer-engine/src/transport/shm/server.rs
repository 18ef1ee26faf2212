//! The thread that serves an engine's connections to processes of the same host: it lets peers
//! attach, answers which region holds an address, and carries withdrawals.

use std::{
    collections::{HashMap, HashSet},
    io,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_base::{EngineId, Error, ErrorCode, Result};

use super::{
    attachment::Attachment,
    link::{Link, Received, poll, poll_readable},
    server_connection::{ConnectionEvent, ServerConnection},
};
use crate::{memory::lent::Lent, metrics::Refusals, process, token::Token};

/// How many peers may be attached to one engine; more are turned away.
const CLIENTS_MAX: usize = 4096;

/// How long a peer may take to introduce itself.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// How often the thread looks around without being woken.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// How long no connection is accepted after one could not be.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How many messages of one connection are read before the others get their turn.
const MESSAGES_PER_POLL: usize = 64;

/// An engine's side of all its connections on this host.
#[derive(Debug)]
pub(crate) struct ShmServer {
    shared: Arc<ServerShared>,
    name: String,
    thread: Mutex<Option<JoinHandle<()>>>,
    generation: u64,
}

#[derive(Debug)]
pub(super) struct ServerShared {
    lent: Arc<Lent>,
    auth: AuthPolicy,
    wake: WakeEvent,
    state: Mutex<Connections>,
    /// Something was confirmed, or a peer is gone.
    withdrawal_done: Condvar,
    is_stopped: AtomicBool,
}

/// Who is let in.
#[derive(Debug, Default)]
pub(crate) struct AuthPolicy {
    /// What peers must prove to know.
    pub(crate) token: Option<Token>,
    /// Where those who do not are counted.
    pub(crate) refusals: Arc<Refusals>,
}

#[derive(Debug, Default)]
struct Connections {
    last_id: u64,
    /// Peers that are attached to this engine.
    clients: HashMap<u64, ServerConnection>,
    /// Peers that this engine is attached to.
    attachments: HashMap<u64, Arc<Attachment>>,
    /// Withdrawals that were sent and not yet confirmed: peer and region.
    pending: HashSet<(u64, u64)>,
}

impl ShmServer {
    /// Listens under a name of its own and starts the thread.
    ///
    /// # Errors
    /// The system lets us have no socket or no thread.
    pub(crate) fn start(lent: Arc<Lent>, auth: AuthPolicy) -> io::Result<Self> {
        // Another random number than the engine's id, which everybody knows.
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
        let thread = std::thread::Builder::new()
            .name("mooncake-shm".to_owned())
            .spawn(move || serve(&served, &listener))?;
        let generation = process::generation();
        Ok(Self { shared, name, thread: Mutex::new(Some(thread)), generation })
    }

    /// What peers connect to.
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

    /// Has every attached peer leave the region that begins there, and waits until each has
    /// confirmed or is gone. Those that have not at the end are cut off.
    ///
    /// The region must be out of the table of regions already, so that nobody is told of it again.
    ///
    /// # Errors
    /// A peer did not confirm in time; it may be in the middle of a copy.
    pub(crate) fn withdraw(&self, base: u64, timeout: Duration) -> Result<()> {
        self.shared.withdraw(Some(base), timeout)
    }

    /// Withdraws everything and ends all connections and the thread.
    pub(crate) fn stop(&self, timeout: Duration) {
        let Some(thread) = self.thread.lock().take() else { return };
        // Peers that do not answer are cut off by what follows.
        let _ = self.shared.withdraw(None, timeout);
        self.shared.is_stopped.store(true, Ordering::Release);
        self.shared.wake.notify();
        if thread.join().is_err() {
            tracing::error!("the thread for peers of this host panicked");
        }
    }
}

impl Drop for ShmServer {
    fn drop(&mut self) {
        if !process::is_forked_since(self.generation) {
            self.stop(Duration::ZERO);
        }
    }
}

impl ServerShared {
    /// Serves an attachment from now on.
    pub(super) fn attach(&self, attachment: &Arc<Attachment>) -> u64 {
        let mut state = self.state.lock();
        state.last_id += 1;
        let id = state.last_id;
        state.attachments.insert(id, Arc::clone(attachment));
        drop(state);
        self.wake.notify();
        id
    }

    pub(super) fn detach(&self, id: u64) {
        let gone = self.state.lock().attachments.remove(&id);
        if let Some(attachment) = gone {
            attachment.close();
            self.wake.notify();
        }
    }

    /// `None` stands for everything that was given to anyone.
    fn withdraw(&self, base: Option<u64>, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        let mut state = self.state.lock();
        let Connections { clients, pending, .. } = &mut *state;
        let mut waited = HashSet::new();
        for (id, client) in clients {
            for base in client.withdraw(base) {
                waited.insert((*id, base));
            }
        }
        pending.extend(&waited);
        while waited.iter().any(|one| state.pending.contains(one)) {
            if !self.withdrawal_done.wait_until(&mut state, deadline).timed_out() {
                continue;
            }
            let late: Vec<(u64, u64)> =
                waited.iter().filter(|one| state.pending.contains(one)).copied().collect();
            let Some((_, base)) = late.first() else { break };
            for (id, _) in &late {
                drop_client(&mut state, *id);
            }
            let text = "a peer of this host did not leave the range in time and was cut off";
            return Err(Error::new(ErrorCode::OBJECT_REPLICA_BUSY, text)
                .with("address", format_args!("{base:#x}"))
                .with("peers", late.len()));
        }
        Ok(())
    }

    fn accept(&self, listener: &Link) -> io::Result<()> {
        loop {
            let link = match listener.accept() {
                Ok(link) => link,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            };
            let mut state = self.state.lock();
            if state.clients.len() >= CLIENTS_MAX {
                tracing::warn!(limit = CLIENTS_MAX, "too many peers of this host, one turned away");
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
            let is_understood = match attachment.link().receive() {
                Received::Message(message, file) => attachment.handle_message(message, file),
                Received::Empty => return,
                Received::Malformed | Received::Closed => false,
            };
            if !is_understood {
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
    state.pending.retain(|(client, _)| *client != id);
}

/// Who a polled descriptor belongs to.
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
        watch(PollSource::Wake, shared.wake.0.as_raw_fd());
        let is_accepting = accept_from <= Instant::now();
        if is_accepting {
            watch(PollSource::Listener, listener.raw_fd());
        }
        // A descriptor in the list may be closed by another thread before the poll; then the poll
        // says so, or speaks for another socket, and the look at the source finds nothing.
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
    state.clients.clear();
    state.pending.clear();
    let attachments: Vec<_> = state.attachments.drain().collect();
    drop(state);
    attachments.iter().for_each(|(_, attachment)| attachment.close());
    shared.withdrawal_done.notify_all();
}

/// Wakes the thread out of its poll.
#[derive(Debug)]
struct WakeEvent(OwnedFd);

impl WakeEvent {
    fn new() -> io::Result<Self> {
        // SAFETY: a new descriptor is the only effect.
        let file = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if file < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call above has just made it, and nobody else knows it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(file) }))
    }

    fn notify(&self) {
        let one = 1_u64;
        let file = self.0.as_fd().as_raw_fd();
        // SAFETY: reads eight bytes of a local. It fails only if the counter is full, which wakes
        // just as well.
        let _ = unsafe { libc::write(file, (&raw const one).cast(), 8) };
    }

    fn clear(&self) {
        let mut count = 0_u64;
        let file = self.0.as_fd().as_raw_fd();
        // SAFETY: writes eight bytes of a local.
        let _ = unsafe { libc::read(file, (&raw mut count).cast(), 8) };
    }
}
