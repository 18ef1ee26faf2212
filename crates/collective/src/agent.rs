//! The link of a process to the coordinator: requests and answers, views of groups, signs of life.

use std::{
    collections::HashMap,
    net::{Shutdown, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use mooncake_base::{
    Error, ErrorCode, Result,
    sync::{Condvar, Mutex},
};

use crate::{
    inbox::{GroupState, Inbox},
    mesh::{Mesh, group_id},
    message::{self, Answer, Commit, Notice, PROCESS, Request},
};

const PING_INTERVAL: Duration = Duration::from_secs(1);
/// How long operations may still end after the coordinator has gone: its process may have ended
/// because everything was done.
const COORDINATOR_GRACE: Duration = Duration::from_secs(1);

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
    /// Why the coordinator serves this process no more.
    refusal: Mutex<Option<String>>,
    heard: Mutex<Instant>,
    stopping: Mutex<bool>,
    stop: Condvar,
    heartbeat_timeout: Duration,
}

impl Agent {
    pub(crate) fn new(
        mesh: Arc<Mesh>,
        stream: TcpStream,
        heartbeat_timeout: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            mesh,
            stream,
            writing: Mutex::new(()),
            answers: Mutex::new(HashMap::new()),
            answered: Condvar::default(),
            next_id: AtomicU64::new(1),
            is_over: AtomicBool::new(false),
            refusal: Mutex::default(),
            heard: Mutex::new(Instant::now()),
            stopping: Mutex::new(false),
            stop: Condvar::default(),
            heartbeat_timeout,
        })
    }

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
                return Err(if is_over { self.ended() } else { not_agreed(limit) });
            }
            self.answered.wait_for(&mut answers, left);
        }
    }

    /// Returns why the connection to the coordinator has ended.
    fn ended(&self) -> Error {
        match &*self.refusal.lock() {
            Some(reason) => Error::closed(reason.clone()),
            None => gone(),
        }
    }

    /// Leaves a group. The coordinator takes the slot out of the view, which is no failure.
    pub(crate) fn leave(&self, group: &str) {
        let _ = self.tell(&Request::Leave { group: group.to_owned() });
    }

    /// Ends the link, and waits until the coordinator knows that this is no failure.
    pub(crate) fn say_goodbye(&self) {
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

    /// Ends the connection to the coordinator.
    pub(crate) fn shut_down(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Carries out what the coordinator says, until its connection ends.
    pub(crate) fn listen(&self) {
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
                inbox.close(&self.ended());
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
            Notice::Refused { group, reason } if group == PROCESS => {
                tracing::error!(%reason, "this process is no rank any more");
                *self.refusal.lock() = Some(reason);
            }
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
    pub(crate) fn ping(&self) {
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
    pub(crate) fn report_lost(&self) {
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
fn log_view(state: &GroupState, commit: &Commit) {
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

pub(crate) fn slots_where(states: &[bool], wanted: bool) -> Vec<usize> {
    (0..states.len()).filter(|slot| states[*slot] == wanted).collect()
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
