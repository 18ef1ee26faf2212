//! The process's part: its connections, its link to the coordinator, and its groups.

use std::{
    net::{IpAddr, TcpListener, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use mooncake_base::{
    Clock, Endpoint, Error, ErrorCode, Result, SystemClock, Token, sync::Mutex, token::nonce,
};
use mooncake_os::{dial::dial, threads::Threads};

use crate::{
    agent::{Agent, slots_where},
    auth,
    coordinator::Coordinator,
    fabric::Fabric,
    group::Group,
    inbox::{GroupState, Inbox},
    mesh::{Mesh, group_id},
    message::{Attach, Member, Request},
    progress::View,
};

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
    threads: Threads,
    rank: u32,
    incarnation: u64,
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
        let agent = Agent::new(Arc::clone(&mesh), stream, config.heartbeat_timeout);
        agent.tell(&Request::Register {
            rank: config.rank,
            incarnation,
            address: data_address.to_string(),
        })?;
        let (reader, pinger, watcher) =
            (Arc::clone(&agent), Arc::clone(&agent), Arc::clone(&agent));
        let threads = Threads::new(4);
        threads.spawn("mc-pg-mesh", move || mesh.accept(listener)).map_err(broken)?;
        threads.spawn("mc-pg-notice", move || reader.listen()).map_err(broken)?;
        threads.spawn("mc-pg-ping", move || pinger.ping()).map_err(broken)?;
        threads.spawn("mc-pg-lost", move || watcher.report_lost()).map_err(broken)?;
        Ok(Self {
            agent,
            coordinator: Mutex::new(coordinator),
            coordinator_address,
            data_address,
            threads,
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
        let inbox = self.agent.mesh().inbox(id).ok_or_else(|| Error::invalid("too many groups"))?;
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
            self.agent.mesh().forget(id);
            return Err(error);
        }
        Group::start(&config.name, key, config.slot, inbox, Arc::clone(&self.agent))
    }

    /// Ends the connections and threads; groups must be closed before. Harmless if repeated.
    pub fn close(&self) {
        let has_ended = self.threads.stop(|| {
            self.agent.say_goodbye();
            self.agent.mesh().begin_close();
            self.agent.shut_down();
            // The connection wakes the thread that accepts.
            let _ = TcpStream::connect_timeout(&self.data_address, Duration::from_secs(1));
        });
        if !has_ended {
            return;
        }
        self.agent.mesh().join();
        // Groups that are still open get nothing more.
        for inbox in self.agent.mesh().inboxes() {
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

fn not_made(config: &GroupConfig, state: &GroupState) -> Error {
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

fn broken(error: std::io::Error) -> Error {
    let text = error.to_string();
    Error::new(ErrorCode::RPC_FAIL, "a process group cannot start").with("reason", text)
}
