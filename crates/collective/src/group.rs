//! A group of one process: carries out its collective operations in order, and sends its messages.

use std::{
    io,
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use mooncake_base::{Error, Result, sync::Mutex};
use mooncake_os::spin_wait::{ANSWER_SPIN_TIME, SpinWait};

use crate::{
    attempt::Attempt,
    call::Call,
    collectives::{Operation, Stop, Writes},
    completion::{Completion, Outcome},
    context::Agent,
    frame::Kind,
    inbox::{Inbox, Messages, Outgoing, Receive, Sent, State, announce},
    line::{CarriedOut, CarryOut, Line, Parker},
    memory::{HostRange, Mirror},
    mesh::{
        Mesh, group_id,
        waiting::{Attention, Polling},
    },
    message::{Answer, Request},
    messages::DIRECT_BYTES_MAX,
    metrics::{self, Counters, GroupMetrics, GroupReport, OperationKind, Recording},
    peer_memory::Cell,
    progress::{Fate, View},
    staging::{Place, StagedBuffer},
};

/// Larger operations are left to the group's thread, so that a wait for one can end at any time.
const CARRIED_OUT_BYTES_MAX: usize = 256 << 10;
/// Most sends, and most receives, that wait for their counterpart.
const MESSAGES_MAX: usize = 1 << 16;
/// How often a thread polls before it offers its processor to others each time: some microseconds.
const LOOKS_BEFORE_YIELD: u32 = 100;
/// How often a wait looks for its end, where it is not announced.
pub(crate) const RECHECK: Duration = Duration::from_millis(100);

/// A group of processes, as one of them sees it.
#[derive(Debug)]
pub struct Group {
    core: Arc<Core>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug)]
pub(crate) struct Core {
    name: String,
    /// Name of the group at the coordinator.
    key: String,
    pub(crate) id: u64,
    pub(crate) slot: usize,
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) mesh: Arc<Mesh>,
    /// Ends the loans of an attempt.
    pub(crate) lent: Cell,
    staged: Mutex<Vec<Staged>>,
    pub(crate) metrics: Arc<GroupMetrics>,
    pub(crate) line: Line,
    spin_wait: Mutex<SpinWait>,
    agent: Arc<Agent>,
}

/// A contribution that members may still write from.
#[derive(Debug)]
struct Staged {
    attempt: u32,
    sequence: u64,
    buffer: StagedBuffer,
}

impl Group {
    pub(crate) fn start(
        name: &str,
        key: String,
        slot: usize,
        inbox: Arc<Inbox>,
        agent: Arc<Agent>,
    ) -> Result<Self> {
        let core = Arc::new(Core {
            name: name.to_owned(),
            id: group_id(&key),
            key,
            slot,
            inbox,
            mesh: Arc::clone(agent.mesh()),
            lent: Cell::default(),
            staged: Mutex::default(),
            metrics: Arc::default(),
            line: Line::default(),
            spin_wait: Mutex::new(SpinWait::new(ANSWER_SPIN_TIME)),
            agent,
        });
        let (working, writing) = (Arc::clone(&core), Arc::clone(&core));
        let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| {
            let failed = |error| Error::internal("a thread did not start").caused_by(error);
            thread::Builder::new().name(name.to_owned()).spawn(run).map_err(failed)
        };
        let threads = vec![
            spawn("mc-pg-work", Box::new(move || working.line.work(&working)))?,
            spawn("mc-pg-send", Box::new(move || writing.write_messages()))?,
        ];
        metrics::add_group(&core);
        Ok(Self { core, threads: Mutex::new(threads) })
    }

    /// Begins a collective operation. Operations of a group are carried out in the order of calls.
    ///
    /// # Errors
    /// This rank is not in the group any more, or the group is closed.
    pub fn begin(&self, operation: Operation) -> Result<Completion> {
        let completion = self.begin_for_waiter(operation)?;
        completion.start();
        Ok(completion)
    }

    /// Begins a collective operation for a caller that waits for it at once: a thread that waits
    /// for a small operation carries it out, without another thread. As long as nobody waits,
    /// nothing happens until [`Completion::start`], or for a tenth of a second.
    ///
    /// # Errors
    /// As for [`Self::begin`].
    pub fn begin_for_waiter(&self, operation: Operation) -> Result<Completion> {
        self.core.check_member()?;
        let is_small = operation.source_bytes() <= CARRIED_OUT_BYTES_MAX;
        let completion = if is_small {
            Completion::carried_out_in(Arc::downgrade(&self.core))
        } else {
            Completion::default()
        };
        self.core.line.push(operation, completion.clone())?;
        if !is_small {
            self.core.line.start();
        }
        Ok(completion)
    }

    /// Sends a message; done when the receiver has taken it.
    ///
    /// # Errors
    /// This rank is not in the group any more, or the group is closed.
    pub fn send(&self, range: HostRange, to: usize, tag: u32) -> Result<Completion> {
        self.core.check_member()?;
        let completion = self.core.counted(OperationKind::Send, range);
        let mut state = self.core.inbox.state.lock();
        if to == self.core.slot || state.progress.view.is_isolated {
            return Err(
                Error::invalid("a message needs another rank of the group").with("rank", to)
            );
        }
        if !state.progress.view.is_member(to) {
            completion.complete(Outcome { failed_slots: vec![to], ..Outcome::default() });
            return Ok(completion);
        }
        check_count(state.messages.sent.len())?;
        state.messages.next_id += 1;
        let id = state.messages.next_id;
        let cell = Box::default();
        let sent = Sent { to, completion: completion.clone(), range, buffered: 0, cell };
        state.messages.sent.insert(id, sent);
        let Messages { outgoing, is_writing, .. } = &mut state.messages;
        let is_direct = range.length() <= DIRECT_BYTES_MAX && outgoing.is_empty() && !*is_writing;
        if !is_direct {
            outgoing.push_back(Outgoing::Message { to, tag, id, range });
            drop(state);
            self.core.inbox.outgoing.notify_all();
            return Ok(completion);
        }
        *is_writing = true;
        drop(state);
        self.core.send_small(to, tag, id, range);
        Ok(completion)
    }

    /// Receives a message of a slot, or of any.
    ///
    /// # Errors
    /// This rank is not in the group any more, or the group is closed.
    pub fn receive(&self, range: HostRange, from: Option<usize>, tag: u32) -> Result<Completion> {
        self.core.check_member()?;
        let completion = self.core.counted(OperationKind::Receive, range);
        let mut ended = Vec::new();
        let mut state = self.core.inbox.state.lock();
        if from == Some(self.core.slot) || state.progress.view.is_isolated {
            return Err(Error::invalid("a message needs another rank of the group"));
        }
        if let Some(from) = from
            && !state.progress.view.is_member(from)
        {
            completion.complete(Outcome { failed_slots: vec![from], ..Outcome::default() });
            return Ok(completion);
        }
        check_count(state.messages.receives.len() + state.messages.requested.len())?;
        let receive = Receive { source: from, tag, range, completion: completion.clone() };
        let taken = state.add_receive(receive, &mut ended);
        let taken = taken.map(|(to, id)| {
            let member = state.progress.view.member(to);
            (to, id, member.and_then(|member| self.core.mesh.open_link(member)))
        });
        let has_outgoing = !state.messages.outgoing.is_empty();
        drop(state);
        if let Some((to, id, link)) = taken {
            let answer = self.core.header_of(Kind::Taken, (id, 0), 0);
            self.core.inbox.acknowledge(to, &answer, link.as_ref());
        }
        if has_outgoing {
            self.core.inbox.outgoing.notify_all();
        }
        announce(ended);
        Ok(completion)
    }

    /// Gives up a receive that has got no message, and returns whether it had got none: its memory is free
    /// then, and a message that comes later stays for another receive.
    pub fn cancel_receive(&self, completion: &Completion) -> bool {
        let mut state = self.core.inbox.state.lock();
        let receives = &mut state.messages.receives;
        let place = receives.iter().position(|receive| receive.completion.is_same(completion));
        let cancelled = place.map(|place| receives.remove(place));
        drop(state);
        let is_cancelled = cancelled.is_some();
        if let Some(receive) = cancelled {
            let error = Some(Error::invalid("the receive was cancelled"));
            receive.completion.complete(Outcome { error, ..Outcome::default() });
        }
        is_cancelled
    }

    /// Returns the highest active slot + 1; before this rank has joined, the declared size.
    pub fn size(&self) -> usize {
        let state = self.core.inbox.state.lock();
        if state.progress.view.is_isolated { state.declared } else { state.progress.view.size() }
    }

    /// Returns the number of the view.
    pub fn epoch(&self) -> u64 {
        self.core.inbox.state.lock().progress.view.epoch
    }

    /// Returns which slots are active.
    pub fn active(&self) -> Vec<bool> {
        self.core.inbox.state.lock().progress.view.active.clone()
    }

    /// Shows the active slots of this and each later view in the mirror.
    pub fn set_mirror(&self, mirror: Mirror) {
        let mut state = self.core.inbox.state.lock();
        mirror.show(&state.progress.view.active);
        state.mirror = Some(mirror);
    }

    /// Returns for each slot whether its rank is reachable and active, or waits for activation.
    pub fn peers(&self) -> Vec<bool> {
        self.core.inbox.state.lock().peers.clone()
    }

    /// Returns what the group did.
    pub fn counters(&self) -> Counters {
        self.core.counters()
    }

    /// Makes ranks that wait in [`Self::wait_joined`] members. If the answer is
    /// [`Status::NotReady`](crate::Status::NotReady), another try may succeed after [`Self::wait_peers`].
    ///
    /// # Errors
    /// The coordinator has not answered in time.
    pub fn activate(&self, slots: Vec<usize>, limit: Duration) -> Result<Answer> {
        let group = self.core.key.clone();
        self.core.agent.ask(limit, |id| Request::Activate { group, slots, id })
    }

    /// Returns a number that grows when the state of a peer changes.
    pub fn peers_version(&self) -> u64 {
        self.core.inbox.state.lock().peers_version
    }

    /// Waits at most `time` and returns whether the state of a peer has changed since `version`.
    ///
    /// # Errors
    /// The group is closed.
    pub fn wait_peers(&self, version: u64, time: Duration) -> Result<bool> {
        let mut state = self.core.inbox.state.lock();
        if state.closed.is_none() && state.peers_version == version {
            self.core.inbox.changed.wait_for(&mut state, time);
        }
        match &state.closed {
            Some(error) => Err(error.clone()),
            None => Ok(state.peers_version != version),
        }
    }

    /// Takes ranks out of the view.
    ///
    /// # Errors
    /// The coordinator has not answered in time.
    pub fn deactivate(&self, slots: Vec<usize>, limit: Duration) -> Result<Answer> {
        let group = self.core.key.clone();
        self.core.agent.ask(limit, |id| Request::Deactivate { group, slots, id })
    }

    /// Returns whether the members have agreed on a loss since the last call.
    ///
    /// # Errors
    /// The coordinator has not answered in time.
    pub fn synchronize(&self, limit: Duration) -> Result<Answer> {
        let group = self.core.key.clone();
        self.core.agent.ask(limit, |id| Request::Synchronize { group, id })
    }

    /// Asks to become a member.
    ///
    /// # Errors
    /// This rank is a member, or the group is closed.
    pub fn begin_join(&self) -> Result<()> {
        let state = self.core.inbox.state.lock();
        if let Some(error) = &state.closed {
            return Err(error.clone());
        }
        if state.progress.has_joined() {
            return Err(Error::invalid("this rank is a member of the group already"));
        }
        drop(state);
        self.core.agent.tell(&Request::Join { group: self.core.key.clone() })
    }

    /// Waits at most `time` and returns whether this rank is a member.
    ///
    /// # Errors
    /// The group is closed.
    pub fn wait_joined(&self, time: Duration) -> Result<bool> {
        let mut state = self.core.inbox.state.lock();
        let is_member = |state: &State| state.progress.has_joined();
        if state.closed.is_none() && !is_member(&state) {
            self.core.inbox.changed.wait_for(&mut state, time);
        }
        match &state.closed {
            Some(error) => Err(error.clone()),
            None => Ok(is_member(&state)),
        }
    }

    /// Ends the group: operations that are not done fail, its threads end. Harmless if repeated.
    pub fn close(&self) {
        let threads = std::mem::take(&mut *self.threads.lock());
        if threads.is_empty() {
            return;
        }
        metrics::remove_group(&self.core);
        self.core.agent.leave(&self.core.key);
        self.core.inbox.close(&closed());
        self.core.line.close();
        for thread in threads {
            if thread.thread().id() != thread::current().id() {
                let _ = thread.join();
            }
        }
        self.core.mesh.forget(self.core.id);
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.close();
    }
}

impl Core {
    /// Returns a completion that counts a message when it ends.
    fn counted(self: &Arc<Self>, kind: OperationKind, range: HostRange) -> Completion {
        let recording = Recording::begin(&self.metrics, kind, range.length());
        Completion::counted(recording, Arc::downgrade(self))
    }

    /// Returns the state of the group as metrics show it.
    pub(crate) fn report(&self) -> GroupReport {
        let state = self.inbox.state.lock();
        let active = state.progress.view.active.iter().filter(|active| **active).count();
        let epoch = state.progress.view.epoch;
        drop(state);
        GroupReport {
            name: self.name.clone(),
            slot: self.slot.to_string(),
            epoch,
            active,
            counters: self.counters(),
        }
    }

    fn counters(&self) -> Counters {
        let bytes_buffered = self.inbox.state.lock().buffered_bytes();
        Counters { bytes_buffered, ..self.metrics.snapshot() }
    }

    fn check_member(&self) -> Result<()> {
        let state = self.inbox.state.lock();
        if let Some(error) = &state.closed {
            return Err(error.clone());
        }
        if !state.progress.view.is_member(self.slot) {
            return Err(not_active());
        }
        Ok(())
    }

    /// Lets a thread sleep: as long as the result lives, peers wake this process for their frames. Those
    /// that have not read ours are woken.
    pub(crate) fn prepare_sleep(&self) -> Attention {
        let attention = self.mesh.pay_attention();
        self.wake_readers();
        attention
    }

    /// Lets this thread sleep until its parker is woken, at most `time`, and ends its polling.
    /// Peers wake this process for their frames meanwhile, and those that have not read ours are
    /// woken. Returns whether the parker was woken.
    pub(crate) fn sleep(
        &self,
        parker: &Parker,
        polling: Option<Polling<'_>>,
        time: Duration,
    ) -> bool {
        let sleep = self.mesh.begin_sleep();
        self.wake_readers();
        drop(polling);
        sleep.until_woken(parker, time)
    }

    fn wake_readers(&self) {
        for link in self.mesh.wake_readers() {
            self.inbox.push_outgoing(Outgoing::Rest(link));
        }
    }

    /// Polls the rings for a short time, until there is something to do.
    pub(crate) fn spin(&self, polling: &Polling<'_>, is_over: impl Fn() -> bool) {
        let Some(mut spin_wait) = self.spin_wait.try_lock() else { return };
        let mut looks = 0_u32;
        spin_wait.poll(|| {
            polling.poll();
            looks += 1;
            if looks > LOOKS_BEFORE_YIELD {
                // The thread that this one waits for may be queued for the same processor.
                thread::yield_now();
            }
            if is_over() { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
        });
    }

    /// Carries out one operation, again if the view changes meanwhile.
    async fn attempt(&self, operation: &Operation) -> Outcome {
        let (mut begun, call) = (false, operation.call());
        loop {
            let view = match self.start_attempt(&mut begun, call).await {
                Ok(view) => view,
                Err(error) => return self.end_failed(error),
            };
            self.lent.end();
            self.staged.lock().retain(|staged| staged.attempt == view.attempt);
            let exchange = Attempt::new(self, view, call);
            let mut has_data = None;
            match exchange.run_announced(operation, &mut has_data).await {
                Ok(()) => return self.end(has_data.unwrap_or_default()),
                Err(Stop::Failed(error) | Stop::FailedElsewhere(error)) => {
                    return self.end_failed(error);
                }
                Err(Stop::Interrupted) => {}
            }
            match self.await_view(exchange.view.attempt).await {
                Err(error) => return self.end_failed(error),
                Ok(is_finished) => {
                    if let (true, Some(writes)) = (is_finished, has_data) {
                        return self.end(writes);
                    }
                }
            }
        }
    }

    /// Copies a contribution to memory that peers map or read; `None` if there is none for it.
    /// Returns its place, and its address if peers of other hosts may read it.
    pub(crate) fn stage(
        &self,
        attempt: u32,
        sequence: u64,
        bytes: &[u8],
    ) -> Option<(Option<Place>, Option<u64>)> {
        let buffer = self.mesh.stage().put(bytes)?;
        let places = (buffer.place(), buffer.registered_address());
        self.staged.lock().push(Staged { attempt, sequence, buffer });
        Some(places)
    }

    /// Returns the time after which a silent rank has left the view.
    pub(crate) fn silence_limit(&self) -> Duration {
        2 * self.agent.heartbeat_timeout()
    }

    /// Uses the memory of contributions again that are of an operation before this one, in its view.
    pub(crate) fn reuse_staged(&self, sequence: u64) {
        let mut staged = self.staged.lock();
        let earlier = staged.extract_if(.., |it| it.sequence < sequence);
        earlier.for_each(|it| it.buffer.reuse());
    }

    /// Waits until the group is not stopped, and returns the view.
    async fn start_attempt(&self, begun: &mut bool, call: Call) -> Result<View> {
        let find = |state: &mut State| {
            if let Some(error) = &state.closed {
                return Some(Err(error.clone()));
            }
            if state.progress.stopped.is_some() {
                return None;
            }
            if !state.progress.view.is_member(self.slot) {
                return Some(Err(not_active()));
            }
            let sequence = state.progress.begin(*begun);
            *begun = true;
            state.begin_call(state.progress.view.attempt, sequence, call);
            Some(Ok(state.progress.view.clone()))
        };
        self.inbox.find(find).await
    }

    /// Waits for the view after an interruption. Returns whether the operation is finished as it is.
    async fn await_view(&self, attempt: u32) -> Result<bool> {
        let find = |state: &mut State| match (&state.closed, state.progress.fate(attempt)) {
            (Some(error), _) => Some(Err(error.clone())),
            (None, Some(Fate::Removed)) => Some(Err(not_active())),
            (None, fate) => fate.map(|fate| Ok(fate == Fate::Finished)),
        };
        self.inbox.find(find).await
    }

    fn end(&self, writes: Writes) -> Outcome {
        self.lent.end();
        writes.carry_out();
        let mut state = self.inbox.state.lock();
        state.progress.end();
        let mut failed_slots = std::mem::take(&mut state.unreported);
        failed_slots.sort_unstable();
        failed_slots.dedup();
        Outcome { failed_slots, ..Outcome::default() }
    }

    fn end_failed(&self, error: Error) -> Outcome {
        self.lent.end();
        let mut state = self.inbox.state.lock();
        state.progress.end();
        let (attempt, next) = (state.progress.view.attempt, state.progress.next);
        state.parts.retain(|key, _| key.0 > attempt || key.1 >= next);
        drop(state);
        Outcome { error: Some(error), ..Outcome::default() }
    }
}

impl CarryOut for Core {
    fn carry_out(self: Arc<Self>, operation: Operation) -> CarriedOut {
        Box::pin(async move {
            let (kind, bytes) = (operation.kind(), operation.source_bytes());
            let recording = Recording::begin(&self.metrics, kind, bytes);
            let outcome = self.attempt(&operation).await;
            recording.end(&outcome);
            outcome
        })
    }

    fn core(&self) -> Option<&Core> {
        Some(self)
    }
}

pub(crate) fn slot_number(slot: usize) -> u32 {
    u32::try_from(slot).unwrap_or(u32::MAX)
}

fn check_count(messages: usize) -> Result<()> {
    if messages < MESSAGES_MAX {
        return Ok(());
    }
    let error = Error::invalid("too many messages wait: wait for some of them");
    Err(error.with("messages_max", MESSAGES_MAX))
}

pub(crate) fn closed() -> Error {
    Error::closed("the process group is closed")
}

fn not_active() -> Error {
    Error::invalid(
        "this rank is not active in this group: the others have removed it; call join_group",
    )
}
