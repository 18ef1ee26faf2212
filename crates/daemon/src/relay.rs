//! Where guests connect: the lean door, whose calls go on to the master.
//!
//! A guest is a client like any other, with an id of its own; only its way to the master leads
//! through here. So the master knows each guest's reads and writes apart, and what is left of a
//! guest that died is given back by the one call by which clients leave.

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    os::{
        fd::OwnedFd,
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr as UnixAddr, UnixListener},
    },
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_base::{ClientId, Clock, Error, ErrorCode, Moment, Result, SystemClock, TenantId};
use mooncake_http::Exposition;
use mooncake_proto::{
    convert::Caller,
    lean::{self, DaemonGreeting, ServerGreeting},
    v1::{self, request::Call, response},
};
use mooncake_store_client::MasterLink;
use rustc_hash::FxHashMap;
use socket2::{Domain, Protocol, SockAddr, SockRef, Socket, Type};

use crate::{
    connection,
    counters::{Counters, Present},
    granted,
    members::{MEMBERS_MAX, Members},
    process::Process,
    watch,
};

/// The most connections at a time. A guest has up to 16.
pub const CONNECTIONS_MAX: usize = 4096;

/// How many connections may wait to be accepted.
const BACKLOG: i32 = 1024;

/// What a thread that serves a connection needs at the most.
const STACK_BYTES: usize = 512 << 10;

/// How long to wait when the system has no more descriptors or threads.
const PAUSE: Duration = Duration::from_millis(50);

/// How long the master may take to hear that a guest is gone.
const RELEASE_PATIENCE: Duration = Duration::from_secs(5);

/// How long stopping waits for connections to end.
const STOP_PATIENCE: Duration = Duration::from_secs(1);

/// What a relay is told.
#[derive(Debug)]
pub struct RelaySettings {
    /// The way to the master. The relay's own, which ends with it.
    pub link: Arc<dyn MasterLink>,
    /// What guests are told of the daemon.
    pub daemon: DaemonGreeting,
    /// The host that guests are on, as the master knows it.
    pub host: String,
    /// Whose namespace the keys of guests live in.
    pub tenant: TenantId,
    /// How long the master may take to answer one call.
    pub rpc_timeout: Duration,
}

/// Sockets that guests will connect to.
#[derive(Debug)]
pub struct Listeners {
    tcp: Socket,
    unix: Option<Socket>,
    address: SocketAddr,
    unix_name: String,
}

/// A relay at work. Stops when dropped.
#[derive(Debug)]
pub struct Relay {
    shared: Arc<Shared>,
    listeners: Listeners,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What all connections share.
#[derive(Debug)]
pub(crate) struct Shared {
    link: Arc<dyn MasterLink>,
    pub(crate) greeting: ServerGreeting,
    /// The name that guests are registered by. Port 0: no engine of anybody's has that name.
    name: String,
    tenant: TenantId,
    rpc_timeout: Duration,
    pub(crate) members: Mutex<Members>,
    bell: watch::Bell,
    sockets: Mutex<FxHashMap<u64, Arc<Socket>>>,
    /// A connection ended.
    ended: Condvar,
    last_number: AtomicU64,
    pub(crate) counters: Counters,
    is_stopped: AtomicBool,
}

impl Listeners {
    /// Takes the port, 0 for a free one, on every address, and the abstract Unix socket of its
    /// number.
    ///
    /// # Errors
    /// The port is taken.
    pub fn bind(port: u16) -> Result<Self> {
        let bound = listen_on(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)))
            .or_else(|_| listen_on(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))))
            .and_then(|tcp| Ok((tcp.local_addr()?.as_socket(), tcp)));
        let (address, tcp) = bound.map_err(|source| {
            let error = Error::invalid("the daemon cannot listen there").with("port", port);
            error.caused_by(source)
        })?;
        let address = address.ok_or_else(|| Error::internal("a listener has no address"))?;
        let name = format!("mooncake_client_{}.sock", address.port());
        let unix = UnixAddr::from_abstract_name(&name)
            .and_then(|at| UnixListener::bind_addr(&at))
            .map(|listener| Socket::from(OwnedFd::from(listener)))
            .inspect_err(|error| {
                tracing::warn!(%error, name, "no Unix socket: guests come over TCP");
            })
            .ok();
        let unix_name = if unix.is_some() { name } else { String::new() };
        Ok(Self { tcp, unix, address, unix_name })
    }

    /// Where guests of this host connect.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.address.port()))
    }
}

impl Relay {
    /// Begins to serve.
    ///
    /// # Errors
    /// The system has no more descriptors or threads.
    pub fn start(listeners: Listeners, settings: RelaySettings) -> Result<Self> {
        let (bell, ear) = watch::bell()?;
        let greeting = ServerGreeting {
            version: lean::VERSION,
            master: ClientId::random().to_bytes().to_vec(),
            unix_socket: listeners.unix_name.clone(),
            daemon: Some(settings.daemon),
        };
        let shared = Arc::new(Shared {
            link: settings.link,
            greeting,
            name: mooncake_base::Endpoint::new(settings.host, 0).to_string(),
            tenant: settings.tenant,
            rpc_timeout: settings.rpc_timeout,
            members: Mutex::default(),
            bell,
            sockets: Mutex::default(),
            ended: Condvar::new(),
            last_number: AtomicU64::new(0),
            counters: Counters::default(),
            is_stopped: AtomicBool::new(false),
        });
        let relay = Self { shared, listeners, threads: Mutex::default() };
        let watching = watch::start(Arc::clone(&relay.shared), ear)?;
        relay.threads.lock().push(watching);
        for listener in std::iter::once(&relay.listeners.tcp).chain(&relay.listeners.unix) {
            let accepting = relay.accept_from(listener)?;
            relay.threads.lock().push(accepting);
        }
        Ok(relay)
    }

    /// Where guests of this host connect.
    pub fn address(&self) -> SocketAddr {
        self.listeners.address()
    }

    /// How many guests it knows.
    pub fn guests(&self) -> usize {
        self.shared.members.lock().count()
    }

    /// What writes its metrics, for as long as anybody asks.
    pub fn metrics(&self) -> impl Fn(&mut Exposition) + Send + Sync + 'static {
        let shared = Arc::clone(&self.shared);
        move |out| {
            let present = Present {
                guests: (shared.members.lock().count(), MEMBERS_MAX),
                connections: (shared.sockets.lock().len(), CONNECTIONS_MAX),
            };
            shared.counters.add_to(out, &present);
        }
    }

    /// Ends every connection and the threads behind them. Guests are not told of at the master:
    /// they may go on with the next daemon.
    pub fn stop(&self) {
        if self.shared.is_stopped.swap(true, Ordering::SeqCst) {
            return;
        }
        self.shared.bell.ring();
        for listener in std::iter::once(&self.listeners.tcp).chain(&self.listeners.unix) {
            // Wakes the thread that accepts.
            let _ = listener.shutdown(std::net::Shutdown::Both);
        }
        self.shared.link.close();
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            // One that panicked has told so by itself.
            let _ = thread.join();
        }
        self.shared.end_connections(SystemClock.now() + STOP_PATIENCE);
    }

    #[allow(clippy::disallowed_methods, reason = "nothing tells that there are descriptors again")]
    fn accept_from(&self, listener: &Socket) -> Result<JoinHandle<()>> {
        let failed = |source| Error::internal("no thread to accept connections").caused_by(source);
        let listener = listener.try_clone().map_err(failed)?;
        let shared = Arc::clone(&self.shared);
        std::thread::Builder::new()
            .name("mc-accept".to_owned())
            .spawn(move || {
                while !shared.is_stopped() {
                    match listener.accept() {
                        Ok((socket, peer)) => shared.admit(socket, &peer),
                        Err(_) if shared.is_stopped() => return,
                        Err(error) => {
                            tracing::warn!(%error, "a connection could not be accepted");
                            std::thread::sleep(PAUSE);
                        }
                    }
                }
            })
            .map_err(failed)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    pub(crate) fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::SeqCst)
    }

    /// Passes a call of a guest on, and gives the master's answer.
    ///
    /// # Errors
    /// The master cannot be reached.
    pub(crate) fn pass_on(
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
            self.members.lock().forget(client);
        }
        if let Some(response::Call::Locate(located)) = &response.call
            && located.fence_ms > 0
        {
            let (fences, now) = (granted::fences(located), SystemClock.now());
            if let Some(granted) = self.members.lock().granted(client) {
                granted.add(now, Duration::from_millis(located.fence_ms), fences);
            }
        }
        Ok(response)
    }

    /// A connection speaks for a guest from now on.
    ///
    /// # Errors
    /// As of [`Members::join`].
    pub(crate) fn join(&self, client: ClientId, process: Option<&Process>) -> Result<()> {
        self.members.lock().join(client, process)?;
        self.bell.ring();
        Ok(())
    }

    /// A connection of a guest ended.
    pub(crate) fn leave(&self, client: ClientId) {
        let is_gone = self.members.lock().leave(client);
        if is_gone && !self.is_stopped() {
            self.counters.count_death();
            // It may live and read on: its fences end by their time.
            self.release(client, Vec::new());
        }
    }

    /// Gives back what the master holds for a guest that is gone, and these fences.
    pub(crate) fn release(&self, client: ClientId, returned: Vec<v1::FenceReturn>) {
        let call = Call::Unregister(v1::UnregisterRequest { caller: Some(self.caller(client)) });
        let request = v1::Request { call: Some(call), returned };
        match self.link.call(request, SystemClock.now() + RELEASE_PATIENCE) {
            Ok(_) => tracing::info!(%client, "a guest is gone, what it held is free"),
            // It hears nothing of the guest any more, and so comes to the same end later.
            Err(error) => {
                tracing::warn!(%client, %error, "the master was not told of a guest's end")
            }
        }
    }

    fn caller(&self, client: ClientId) -> v1::Caller {
        (&Caller { client, tenant: self.tenant.clone() }).into()
    }

    /// Serves a new connection in a thread of its own.
    #[allow(clippy::disallowed_methods, reason = "nothing tells that there are threads again")]
    fn admit(self: &Arc<Self>, socket: Socket, peer: &SockAddr) {
        if let Some(peer) = peer.as_socket() {
            if !is_local(&socket, peer) {
                tracing::warn!(%peer, "only processes of this host are served, one is refused");
                self.counters.count_refusal();
                return;
            }
            // A socket that refuses works all the same, only slower.
            let _ = socket.set_tcp_nodelay(true);
        }
        let socket = Arc::new(socket);
        let number = self.last_number.fetch_add(1, Ordering::Relaxed);
        {
            let mut sockets = self.sockets.lock();
            if sockets.len() >= CONNECTIONS_MAX {
                tracing::warn!(limit = CONNECTIONS_MAX, "too many connections, one is refused");
                self.counters.count_refusal();
                return;
            }
            sockets.insert(number, Arc::clone(&socket));
        }
        let process = peer.is_unix().then(|| Process::behind(&socket)).flatten();
        let shared = Arc::clone(self);
        let serving = std::thread::Builder::new()
            .name("mc-guest".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                let ended = Ended { shared, number };
                connection::serve(&ended.shared, &socket, process);
            });
        if let Err(error) = serving {
            tracing::warn!(%error, "no thread for a connection, it is refused");
            self.counters.count_refusal();
            self.sockets.lock().remove(&number);
            std::thread::sleep(PAUSE);
        }
    }

    fn end_connections(&self, deadline: Moment) {
        let mut sockets = self.sockets.lock();
        for socket in sockets.values() {
            // It fails if the other side was faster.
            let _ = SockRef::from(&**socket).shutdown(std::net::Shutdown::Both);
        }
        while !sockets.is_empty() {
            let left = deadline.left(SystemClock.now());
            if left.is_zero() {
                tracing::warn!(connections = sockets.len(), "connections did not end in time");
                return;
            }
            self.ended.wait_for(&mut sockets, left);
        }
    }
}

/// Takes a connection off the list, in whatever way it ends.
struct Ended {
    shared: Arc<Shared>,
    number: u64,
}

impl Drop for Ended {
    fn drop(&mut self) {
        self.shared.sockets.lock().remove(&self.number);
        self.shared.ended.notify_all();
    }
}

fn listen_on(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket)
}

fn is_local(socket: &Socket, peer: SocketAddr) -> bool {
    let peer = peer.ip().to_canonical();
    let own = socket.local_addr().ok().and_then(|own| own.as_socket());
    peer.is_loopback() || own.is_some_and(|own| own.ip().to_canonical() == peer)
}
