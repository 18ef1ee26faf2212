//! The coordinator: it lives in global rank 0, listens to the agents of all ranks, and carries out
//! what `membership` decides.

use std::{
    collections::HashMap,
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use mooncake_base::{Clock, SystemClock, Token, sync::Condvar, sync::Mutex};
use mooncake_os::{
    DeadlineStream,
    acceptor::{Acceptor, ConnectionLimits, ConnectionPlace, pause_accepting},
    threads::Threads,
};

use crate::{
    auth,
    heartbeats::{Heartbeats, TICK},
    membership::{Membership, Notices},
    message::{self, Attach, Notice, PROCESS, Request},
};

/// Longest time that a message to an agent may wait for its socket.
const SEND_LIMIT: Duration = Duration::from_secs(5);

/// Limits of connections that have not said of which rank they are. The others are bounded by their threads.
const LIMITS: ConnectionLimits = ConnectionLimits::of_greetings(1024, Duration::from_secs(10));

/// Most connections, each of which has a thread.
const AGENTS_MAX: usize = 16_384;

/// How long the end of the coordinator waits for changes in progress. Members stop for a change, and
/// would fail if it never ended.
const SETTLE_LIMIT: Duration = Duration::from_secs(10);

/// A coordinator that runs until it is dropped.
#[derive(Debug)]
pub(crate) struct Coordinator {
    shared: Arc<CoordinatorParts>,
    threads: Threads,
}

#[derive(Debug)]
struct CoordinatorParts {
    state: Mutex<CoordinatorState>,
    stopping: AtomicBool,
    stop: Condvar,
    /// A message was handled.
    changed: Condvar,
    address: SocketAddr,
    token: Option<Token>,
}

#[derive(Debug)]
struct CoordinatorState {
    membership: Membership,
    heartbeats: Heartbeats,
    agents: HashMap<u32, AgentConnection>,
}

#[derive(Debug)]
struct AgentConnection {
    stream: TcpStream,
    connection: u64,
}

impl Coordinator {
    /// Starts a coordinator on a listener.
    pub(crate) fn start(
        listener: TcpListener,
        token: Option<Token>,
        heartbeat_timeout: Duration,
    ) -> std::io::Result<Self> {
        let address = listener.local_addr()?;
        let state = CoordinatorState {
            membership: Membership::default(),
            heartbeats: Heartbeats::new(heartbeat_timeout, SystemClock.now()),
            agents: HashMap::new(),
        };
        let shared = Arc::new(CoordinatorParts {
            state: Mutex::new(state),
            stopping: AtomicBool::new(false),
            stop: Condvar::default(),
            changed: Condvar::default(),
            address,
            token,
        });
        let accepting = Arc::clone(&shared);
        let ticking = Arc::clone(&shared);
        let threads = Threads::new(2);
        threads.spawn("mc-pg-accept", move || accepting.accept(listener))?;
        threads.spawn("mc-pg-tick", move || ticking.watch())?;
        Ok(Self { shared, threads })
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.threads.stop(|| {
            self.shared.await_settled();
            self.shared.stopping.store(true, Ordering::SeqCst);
            {
                let state = self.shared.state.lock();
                self.shared.stop.notify_all();
                for agent in state.agents.values() {
                    let _ = agent.stream.shutdown(Shutdown::Both);
                }
            }
            // The connection wakes the thread that accepts.
            let _ = TcpStream::connect_timeout(&self.shared.address, Duration::from_secs(1));
        });
    }
}

impl CoordinatorParts {
    fn accept(self: &Arc<Self>, listener: TcpListener) {
        let acceptor = Acceptor::new(listener, LIMITS);
        let servers = Threads::new(AGENTS_MAX);
        let is_over = || self.stopping.load(Ordering::SeqCst);
        for connection in 0.. {
            let Some((stream, place)) = acceptor.next(is_over) else { break };
            let shared = Arc::clone(self);
            let serving =
                servers.spawn("mc-pg-agent", move || shared.serve(stream, place, connection));
            if let Err(error) = serving {
                tracing::warn!(%error, "a rank is refused: no thread can serve it");
                pause_accepting();
            }
        }
        for agent in self.state.lock().agents.values() {
            let _ = agent.stream.shutdown(Shutdown::Both);
        }
        drop(acceptor);
        servers.join();
    }

    /// Serves one agent until its connection ends.
    fn serve(&self, mut stream: TcpStream, place: ConnectionPlace, connection: u64) {
        let _ = stream.set_nodelay(true);
        if let Err(error) = auth::accept(&stream, place.greeting_deadline(), self.token.as_ref()) {
            tracing::warn!(%error, "a rank was refused");
            return;
        }
        let first = message::receive(&mut DeadlineStream::new(&stream, place.greeting_deadline()));
        let Ok(request @ Request::Register { rank, .. }) = first else { return };
        drop(place);
        let limits =
            stream.set_read_timeout(None).and_then(|()| stream.set_write_timeout(Some(SEND_LIMIT)));
        let (Ok(()), Ok(writer)) = (limits, stream.try_clone()) else { return };
        {
            let mut state = self.state.lock();
            state.heartbeats.record(rank, SystemClock.now());
            let agent = AgentConnection { stream: writer, connection };
            if let Some(old) = state.agents.insert(rank, agent) {
                old.displace(rank);
            }
            let notices = state.membership.handle(rank, request);
            state.send(notices);
        }
        let mut says_goodbye = false;
        while !self.stopping.load(Ordering::SeqCst)
            && let Ok(request) = message::receive::<Request>(&mut stream)
        {
            let mut state = self.state.lock();
            if state.agents.get(&rank).is_none_or(|agent| agent.connection != connection) {
                return;
            }
            state.heartbeats.record(rank, SystemClock.now());
            // Other threads of the rank may send more.
            says_goodbye |= request == Request::Goodbye;
            log_request(rank, &request);
            let notices = state.membership.handle(rank, request);
            state.send(notices);
            self.changed.notify_all();
        }
        let mut state = self.state.lock();
        if state.agents.get(&rank).is_some_and(|agent| agent.connection == connection) {
            state.agents.remove(&rank);
            state.heartbeats.forget(rank);
            if !self.stopping.load(Ordering::SeqCst) {
                if !says_goodbye {
                    tracing::warn!(rank, "the process of a rank has ended");
                }
                let notices = state.membership.lose(rank, true);
                state.send(notices);
            }
            self.changed.notify_all();
        }
    }

    /// Waits until no change of a view is in progress.
    fn await_settled(&self) {
        let end = Instant::now() + SETTLE_LIMIT;
        let mut state = self.state.lock();
        while !state.membership.is_settled() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::warn!("the coordinator ends while ranks change a view");
                return;
            }
            self.changed.wait_for(&mut state, left);
        }
    }

    /// Takes ranks out that are silent for too long. Their connections stay: a process that was
    /// stopped learns what happened as soon as it runs again.
    fn watch(&self) {
        let mut state = self.state.lock();
        while !self.stopping.load(Ordering::SeqCst) {
            self.stop.wait_for(&mut state, TICK);
            for rank in state.heartbeats.silent(SystemClock.now()) {
                if state.membership.is_online(rank) {
                    let limit = state.heartbeats.limit();
                    tracing::warn!(rank, ?limit, "a rank is silent for too long");
                }
                let notices = state.membership.silence(rank);
                state.send(notices);
            }
        }
    }
}

impl AgentConnection {
    /// Ends the connection of a process whose rank another process has now.
    fn displace(mut self, rank: u32) {
        let reason = format!("another process has registered as rank {rank}");
        tracing::warn!(rank, "another process has registered as this rank: the earlier one is out");
        let notice = Notice::Refused { group: PROCESS.to_owned(), reason };
        let _ = message::send(&mut self.stream, &notice);
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl CoordinatorState {
    fn send(&mut self, notices: Notices) {
        for (rank, notice) in notices {
            let Some(agent) = self.agents.get_mut(&rank) else { continue };
            if message::send::<Notice>(&mut agent.stream, &notice).is_err() {
                // Its reader notices the end of the connection.
                let _ = agent.stream.shutdown(Shutdown::Both);
            }
        }
    }
}

/// Logs a request that changes who is in a group.
fn log_request(rank: u32, request: &Request) {
    match request {
        Request::Suspect { rank: lost, .. } => {
            tracing::info!(rank, lost, "a rank has lost its connection to another one");
        }
        Request::Attach(Attach { group, slot, is_extension, .. }) => {
            tracing::info!(group, rank, slot, is_extension, "a rank makes a group");
        }
        Request::Join { group } => tracing::info!(group, rank, "a rank waits for its activation"),
        Request::Activate { group, slots, .. } => {
            tracing::info!(group, rank, ?slots, "a rank wants to activate others");
        }
        Request::Deactivate { group, slots, .. } => {
            tracing::info!(group, rank, ?slots, "a rank wants to remove others");
        }
        Request::Leave { group } => tracing::info!(group, rank, "a rank leaves a group"),
        _ => {}
    }
}
