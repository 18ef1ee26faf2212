//! The process's part: its connections, its link to the coordinator, and its groups.

use std::{
    collections::HashMap,
    net::{IpAddr, Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use mooncake_base::{
    Clock, Endpoint, Error, ErrorCode, Result, SystemClock, Token,
    sync::{Condvar, Mutex},
    token::nonce,
};
use mooncake_os::dial::dial;

use crate::{
    auth,
    coordinator::Coordinator,
    fabric::Fabric,
    group::Group,
    inbox::{Inbox, State},
    mesh::{Mesh, group_id},
    message::{self, Answer, Attach, Commit, Member, Notice, Request},
    progress::View,
};

const PING_INTERVAL: Duration = Duration::from_secs(1);
/// How long operations may still end after the coordinator has gone: its process may have ended
/// because everything was done.
const COORDINATOR_GRACE: Duration = Duration::from_secs(1);
const SEND_LIMIT: Duration = Duration::from_secs(5);

/// Settings of a process.
#[derive(Debug, Clone)]
pub struct ContextConfig {
    /// Global rank of this process. Rank 0 runs the coordinator.
    pub rank: u32,
    /// Address that the listeners bind, and that other ranks connect to.
    pub host: IpAddr,
    /// Address of the coordinator; none at rank 0.
    pub coordinator: Option<String>,
    /// Secret that all ranks share.
    pub token: Option<Token>,
    /// Reads memory of ranks on other hosts; those without one get bytes over TCP.
    pub fabric: Option<Arc<dyn Fabric>>,
    /// Silence after which a rank is taken out of the views.
    pub heartbeat_timeout: Duration,
    /// Longest time in which the coordinator must be reached.
    pub bootstrap_timeout: Duration,
}

/// Settings of a group.
#[derive(Debug, Clone)]
pub struct GroupConfig {
    /// Name, the same at all ranks.
    pub name: String,
    /// Slot of this process.
    pub slot: usize,
    /// Number of founders.
    pub declared: usize,
    /// Number of slots.
    pub capacity: usize,
    /// Whether this rank joins a group that runs.
    pub is_extension: bool,
    /// Whether lost ranks leave the view, not only the operations.
    pub removes_lost: bool,
    /// Global rank of slot 0. It tells groups apart that have one name and no rank in common.
    pub first_rank: u32,
    /// Longest time in which all founders must have made the group.
    pub made_within: Duration,
}

impl GroupConfig {
    /// Returns the name that the coordinator and the members use.
    fn key(&self) -> String {
        format!("{}@{}", self.name, self.first_rank)
    }
}

/// The process's part in collective operations.
#[derive(Debug)]
pub struct Context {
    agent: Arc<Agent>,
    coordinator: Mutex<Option<Coordinator>>,
    coordinator_address: String,
    data_address: std::net::SocketAddr,
    threads: Mutex<Vec<JoinHandle<()>>>,
    rank: u32,
    incarnation: u64,
}

/// The link to the coordinator.
#[derive(Debug)]
pub(crate) struct Agent {
    mesh: Arc<Mesh>,
    stream: TcpStream,
    writing: Mutex<()>,
    answers: Mutex<HashMap<u64, Option<Answer>>>,
    answered: Condvar,
    next_id: AtomicU64,
    is_over: AtomicBool,
    heard: Mutex<Instant>,
    stopping: Mutex<bool>,
    stop: Condvar,
    heartbeat_timeout: Duration,
}

impl Context {
    /// Starts the listeners, at rank 0 the coordinator too, and registers with the coordinator.
    ///
    /// # Errors
    /// The address cannot be bound, or the coordinator cannot be reached.
    pub fn start(config: &ContextConfig) -> Result<Self> {
        let bind = || {
            TcpListener::bind((config.host, 0)).map_err(|error| {
                Error::new(ErrorCode::INVALID_PARAMS, "the address of this rank cannot be bound")
                    .with("host", config.host)
                    .caused_by(error)
            })
        };
        let own = |listener: &TcpListener| listener.local_addr().map_err(broken);
        let (coordinator, coordinator_address) = if let Some(address) = &config.coordinator {
            (None, address.clone())
        } else {
            let listener = bind()?;
            let address = own(&listener)?.to_string();
            let token = config.token.clone();
            let coordinator = Coordinator::start(listener, token, config.heartbeat_timeout);
            (Some(coordinator.map_err(broken)?), address)
        };
        let listener = bind()?;
        let data_address = own(&listener)?;
        let [a, b, c, d, e, f, g, h, ..] = nonce();
        let incarnation = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        let (token, fabric) = (config.token.clone(), config.fabric.clone());
        let mesh = Mesh::new(config.rank, incarnation, token, fabric);
        let endpoint: Endpoint = coordinator_address.parse()?;
        let deadline = SystemClock.now() + config.bootstrap_timeout;
        let stream = dial(&endpoint, deadline)?;
        stream.set_nodelay(true).map_err(broken)?;
        auth::dial(&stream, deadline, config.token.as_ref()).map_err(broken)?;
        stream.set_read_timeout(None).map_err(broken)?;
        stream.set_write_timeout(Some(SEND_LIMIT)).map_err(broken)?;
        let agent = Arc::new(Agent {
            mesh: Arc::clone(&mesh),
            stream,
            writing: Mutex::new(()),
            answers: Mutex::new(HashMap::new()),
            answered: Condvar::default(),
            next_id: AtomicU64::new(1),
            is_over: AtomicBool::new(false),
            heard: Mutex::new(Instant::now()),
            stopping: Mutex::new(false),
            stop: Condvar::default(),
            heartbeat_timeout: config.heartbeat_timeout,
        });
        agent.tell(&Request::Register {
            rank: config.rank,
            incarnation,
            address: data_address.to_string(),
        })?;
        let (reader, pinger, watcher) =
            (Arc::clone(&agent), Arc::clone(&agent), Arc::clone(&agent));
        let threads = vec![
            spawn("mc-pg-mesh", move || mesh.accept(listener))?,
            spawn("mc-pg-notice", move || reader.listen())?,
            spawn("mc-pg-ping", move || pinger.ping())?,
            spawn("mc-pg-lost", move || watcher.report_lost())?,
        ];
        Ok(Self {
            agent,
            coordinator: Mutex::new(coordinator),
            coordinator_address,
            data_address,
            threads: Mutex::new(threads),
            rank: config.rank,
            incarnation,
        })
    }

    /// Returns the address of the coordinator.
    pub fn coordinator_address(&self) -> &str {
        &self.coordinator_address
    }

    /// Makes a group, and waits until all founders have made it.
    ///
    /// # Errors
    /// The coordinator refuses the slot, a founder has gone, or the time is up.
    pub fn group(&self, config: &GroupConfig) -> Result<Group> {
        let key = config.key();
        let id = group_id(&key);
        let inbox = self.agent.mesh.inbox(id).ok_or_else(|| Error::invalid("too many groups"))?;
        {
            let mut state = inbox.state.lock();
            if state.is_made {
                return Err(
                    Error::invalid("a group of this name exists").with("name", &config.name)
                );
            }
            state.is_made = true;
            state.name.clone_from(&config.name);
            state.progress.slot = config.slot;
            state.capacity = config.capacity;
            state.declared = config.declared;
            state.peers = vec![false; config.capacity];
            state.progress.view = self.isolated_view(config);
        }
        self.agent.tell(&Request::Attach(Attach {
            group: key.clone(),
            slot: config.slot,
            declared: config.declared,
            capacity: config.capacity,
            is_extension: config.is_extension,
            removes_lost: config.removes_lost,
        }))?;
        if let Err(error) = self.await_made(&inbox, config) {
            // The others need not wait any more.
            self.agent.leave(&key);
            self.agent.mesh.forget(id);
            return Err(error);
        }
        Group::start(&config.name, key, config.slot, inbox, Arc::clone(&self.agent))
    }

    /// Ends the connections and threads; groups must be closed before. Harmless if repeated.
    pub fn close(&self) {
        let threads = std::mem::take(&mut *self.threads.lock());
        if threads.is_empty() {
            return;
        }
        self.agent.say_goodbye();
        self.agent.mesh.begin_close();
        let _ = self.agent.stream.shutdown(Shutdown::Both);
        // The connection wakes the thread that accepts.
        let _ = TcpStream::connect_timeout(&self.data_address, Duration::from_secs(1));
        for thread in threads {
            let _ = thread.join();
        }
        self.agent.mesh.join();
        // Groups that are still open get nothing more.
        for inbox in self.agent.mesh.inboxes() {
            inbox.close(&Error::closed("the connections of this process are closed"));
        }
        drop(self.coordinator.lock().take());
    }

    /// The view of a rank that has not joined: it alone.
    fn isolated_view(&self, config: &GroupConfig) -> View {
        let mut active = vec![false; config.capacity];
        if let Some(own) = active.get_mut(config.slot) {
            *own = true;
        }
        let own = Member {
            slot: config.slot,
            rank: self.rank,
            incarnation: self.incarnation,
            address: String::new(),
        };
        View { active, members: vec![own], is_isolated: config.is_extension, ..View::default() }
    }

    fn await_made(&self, inbox: &Inbox, config: &GroupConfig) -> Result<()> {
        let end = Instant::now() + config.made_within;
        let mut state = inbox.state.lock();
        loop {
            if let Some(reason) = state.refusal.take() {
                return Err(Error::invalid(reason).with("group", &config.name));
            }
            if let Some(error) = &state.closed {
                return Err(error.clone());
            }
            // A commit counts the epoch up; an extension rank is told that it is known.
            if state.progress.view.epoch > 0 || state.is_known {
                return Ok(());
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(not_made(config, &state));
            }
            inbox.changed.wait_for(&mut state, left);
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.close();
    }
}

impl Agent {
    pub(crate) fn heartbeat_timeout(&self) -> Duration {
        self.heartbeat_timeout
    }

    pub(crate) fn mesh(&self) -> &Arc<Mesh> {
        &self.mesh
    }

    /// Sends a request that has no answer.
    pub(crate) fn tell(&self, request: &Request) -> Result<()> {
        let _writing = self.writing.lock();
        message::send(&mut &self.stream, request).map_err(|error| gone().caused_by(error))
    }

    /// Sends a request and waits for its answer.
    pub(crate) fn ask(
        &self,
        limit: Duration,
        request: impl FnOnce(u64) -> Request,
    ) -> Result<Answer> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        self.answers.lock().insert(id, None);
        let told = self.tell(&request(id));
        let end = Instant::now() + limit;
        let mut answers = self.answers.lock();
        if let Err(error) = told {
            answers.remove(&id);
            return Err(error);
        }
        loop {
            if let Some(Some(_)) = answers.get(&id)
                && let Some(Some(answer)) = answers.remove(&id)
            {
                return Ok(answer);
            }
            let left = end.saturating_duration_since(Instant::now());
            let is_over = self.is_over.load(Ordering::SeqCst);
            if left.is_zero() || is_over {
                answers.remove(&id);
                return Err(if is_over { gone() } else { not_agreed(limit) });
            }
            self.answered.wait_for(&mut answers, left);
        }
    }

    /// Leaves a group. The coordinator takes the slot out of the view, which is no failure.
    pub(crate) fn leave(&self, group: &str) {
        let _ = self.tell(&Request::Leave { group: group.to_owned() });
    }

    /// Ends the link, and waits until the coordinator knows that this is no failure.
    fn say_goodbye(&self) {
        *self.stopping.lock() = true;
        self.stop.notify_all();
        if self.tell(&Request::Goodbye).is_err() {
            return;
        }
        let end = Instant::now() + COORDINATOR_GRACE;
        let mut answers = self.answers.lock();
        while !self.is_over.load(Ordering::SeqCst) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            self.answered.wait_for(&mut answers, left);
        }
    }

    /// Carries out what the coordinator says, until its connection ends.
    fn listen(&self) {
        let mut stream = &self.stream;
        while let Ok(notice) = message::receive::<Notice>(&mut stream) {
            *self.heard.lock() = Instant::now();
            if notice == Notice::Goodbye {
                break;
            }
            self.handle(notice);
        }
        {
            let _answers = self.answers.lock();
            self.is_over.store(true, Ordering::SeqCst);
            self.answered.notify_all();
        }
        let mut stopping = self.stopping.lock();
        if !*stopping {
            self.stop.wait_for(&mut stopping, COORDINATOR_GRACE);
        }
        let is_stopping = *stopping;
        drop(stopping);
        if !is_stopping {
            for inbox in self.mesh.inboxes() {
                inbox.close(&gone());
            }
        }
    }

    fn handle(&self, notice: Notice) {
        match notice {
            Notice::Pong | Notice::Goodbye => {}
            Notice::Attached { group } => self.with(&group, |inbox| {
                inbox.state.lock().is_known = true;
                inbox.changed.notify_all();
            }),
            Notice::Refused { group, reason } => self.with(&group, |inbox| {
                inbox.state.lock().refusal = Some(reason);
                inbox.changed.notify_all();
            }),
            Notice::Prepare { group, attempt, members } => self.with(&group.clone(), |inbox| {
                self.mesh.connect(&members);
                let finished = inbox.prepare(attempt);
                let _ = self.tell(&Request::Report { group, attempt, finished });
            }),
            Notice::Commit(commit) => self.with(&commit.group.clone(), |inbox| {
                log_view(&inbox.state.lock(), &commit);
                for (rank, incarnation) in inbox.commit(commit) {
                    let shares_view = |inbox: &Arc<Inbox>| inbox.shares_view_with(rank);
                    if !self.mesh.inboxes().iter().any(shares_view) {
                        self.mesh.drop_link(rank, incarnation);
                    }
                }
            }),
            Notice::Peers { group, states } => self.with(&group, |inbox| {
                let mut state = inbox.state.lock();
                state.peers = states;
                state.peers_version += 1;
                drop(state);
                inbox.changed.notify_all();
            }),
            Notice::Reply { id, answer } => {
                let mut answers = self.answers.lock();
                if let Some(slot) = answers.get_mut(&id) {
                    *slot = Some(answer);
                }
                self.answered.notify_all();
            }
        }
    }

    fn with(&self, group: &str, action: impl FnOnce(&Inbox)) {
        if let Some(inbox) = self.mesh.inbox(group_id(group)) {
            action(&inbox);
        }
    }

    /// Lets the coordinator hear of this rank, and notices if it is not heard of itself.
    fn ping(&self) {
        let mut stopping = self.stopping.lock();
        while !*stopping && !self.is_over.load(Ordering::SeqCst) {
            let before = Instant::now();
            self.stop.wait_for(&mut stopping, PING_INTERVAL);
            drop(stopping);
            let _ = self.tell(&Request::Ping);
            let pause = before.elapsed().saturating_sub(PING_INTERVAL);
            let mut heard = self.heard.lock();
            if pause > PING_INTERVAL {
                // This process did not run: it could not hear.
                *heard = Instant::now();
            }
            let silence = heard.elapsed();
            drop(heard);
            if silence > 2 * self.heartbeat_timeout {
                let _ = self.stream.shutdown(Shutdown::Both);
            }
            stopping = self.stopping.lock();
        }
    }

    /// Tells the coordinator which connections ended.
    fn report_lost(&self) {
        while !self.mesh.is_closing() {
            for (rank, incarnation) in self.mesh.wait_lost(PING_INTERVAL) {
                // A rank that was removed does not accuse those that closed their connections.
                if !self.mesh.inboxes().iter().any(|inbox| inbox.shares_view_with(rank)) {
                    continue;
                }
                let _ = self.tell(&Request::Suspect { rank, incarnation });
            }
        }
    }
}

/// Logs a new view: at a loss as a warning.
fn log_view(state: &State, commit: &Commit) {
    let Commit { epoch, failed, .. } = commit;
    let (group, rank) = (&state.name, state.progress.slot);
    let active = slots_where(&commit.active, true);
    if failed.is_empty() {
        tracing::info!(group, rank, epoch, ?active, "the members of a process group");
    } else {
        let lost = failed;
        tracing::warn!(group, rank, epoch, ?lost, ?active, "a process group has lost ranks");
    }
}

fn slots_where(states: &[bool], wanted: bool) -> Vec<usize> {
    (0..states.len()).filter(|slot| states[*slot] == wanted).collect()
}

fn not_made(config: &GroupConfig, state: &State) -> Error {
    let text = "not all ranks have made the group in time: start all of them, or allow more time";
    let error = Error::new(ErrorCode::RPC_TIMEOUT, text)
        .with("group", &config.name)
        .with("limit_s", config.made_within.as_secs_f64());
    let founders = state.peers.get(..config.declared).unwrap_or_default();
    match slots_where(founders, false) {
        // The coordinator has told who is there.
        absent if state.peers_version > 0 && !absent.is_empty() => {
            error.with("absent_ranks", format!("{absent:?}"))
        }
        _ => error,
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    thread::Builder::new().name(name.to_owned()).spawn(run).map_err(broken)
}

fn broken(error: std::io::Error) -> Error {
    let text = error.to_string();
    Error::new(ErrorCode::RPC_FAIL, "a process group cannot start").with("reason", text)
}

fn not_agreed(limit: Duration) -> Error {
    let text = "the members have not agreed on a change of the view in time: one of them is silent";
    Error::new(ErrorCode::RPC_TIMEOUT, text).with("limit_s", limit.as_secs_f64())
}

fn gone() -> Error {
    Error::new(
        ErrorCode::RPC_FAIL,
        "global rank 0 is gone, which coordinates the process groups: start all ranks again",
    )
}
