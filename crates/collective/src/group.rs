//! A group of one process: carries out its collective operations in order, and sends its messages.

use std::{
    collections::VecDeque,
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use mooncake_base::{
    Error, Result,
    sync::{Condvar, Mutex},
};

use crate::{
    collectives::{Exchange, Operation, Stop, Writes},
    completion::{Completion, Outcome},
    context::Agent,
    inbox::{Counters, Inbox, Outgoing, Receive, Running, State, View, announce},
    memory::{HostRange, Mirror},
    mesh::{Header, Kind, Mesh},
    message::{Answer, Request},
};

/// The step by which a member says that it has its data, or why it has not.
const DONE: u32 = u32::MAX;
/// Most operations that wait for their turn.
const QUEUE_MAX: usize = 1 << 16;
/// How often a wait looks for its end, where it is not announced.
const RECHECK: Duration = Duration::from_millis(100);

/// A group of processes, as one of them sees it.
#[derive(Debug)]
pub struct Group {
    core: Arc<Core>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Core {
    name: String,
    id: u64,
    slot: usize,
    inbox: Arc<Inbox>,
    mesh: Arc<Mesh>,
    agent: Arc<Agent>,
    queue: Mutex<Queue>,
    queued: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    operations: VecDeque<(Operation, Completion)>,
    is_closed: bool,
}

impl Group {
    pub(crate) fn start(
        name: &str,
        id: u64,
        slot: usize,
        inbox: Arc<Inbox>,
        agent: Arc<Agent>,
    ) -> Result<Self> {
        let core = Arc::new(Core {
            name: name.to_owned(),
            id,
            slot,
            inbox,
            mesh: Arc::clone(agent.mesh()),
            agent,
            queue: Mutex::new(Queue::default()),
            queued: Condvar::default(),
        });
        let (working, writing) = (Arc::clone(&core), Arc::clone(&core));
        let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| {
            let failed = |error| Error::internal("a thread did not start").caused_by(error);
            thread::Builder::new().name(name.to_owned()).spawn(run).map_err(failed)
        };
        let threads = vec![
            spawn("mc-pg-work", Box::new(move || working.work()))?,
            spawn("mc-pg-send", Box::new(move || writing.write_messages()))?,
        ];
        Ok(Self { core, threads: Mutex::new(threads) })
    }

    /// Begins a collective operation. Operations of a group are carried out in the order of calls.
    ///
    /// # Errors
    /// This rank is not in the group any more, or the group is closed.
    pub fn begin(&self, operation: Operation) -> Result<Completion> {
        self.core.check_member()?;
        let completion = Completion::default();
        let mut queue = self.core.queue.lock();
        if queue.is_closed {
            return Err(closed());
        }
        if queue.operations.len() >= QUEUE_MAX {
            return Err(Error::invalid("too many operations wait: wait for some of them")
                .with("operations_max", QUEUE_MAX));
        }
        queue.operations.push_back((operation, completion.clone()));
        drop(queue);
        self.core.queued.notify_one();
        Ok(completion)
    }

    /// Sends a message; done when the receiver has taken it.
    ///
    /// # Errors
    /// This rank is not in the group any more, or the group is closed.
    pub fn send(&self, range: HostRange, to: usize, tag: u32) -> Result<Completion> {
        self.core.check_member()?;
        let completion = Completion::default();
        let mut state = self.core.inbox.state.lock();
        if to == self.core.slot || state.view.is_isolated {
            return Err(
                Error::invalid("a message needs another rank of the group").with("rank", to)
            );
        }
        if !state.view.is_member(to) {
            return Ok(Completion::of(Outcome { failed_slots: vec![to], ..Outcome::default() }));
        }
        state.messages.next_id += 1;
        let id = state.messages.next_id;
        state.messages.sent.insert(id, (to, completion.clone()));
        state.messages.outgoing.push_back(Outgoing::Message { to, tag, id, range });
        drop(state);
        self.core.inbox.changed.notify_all();
        Ok(completion)
    }

    /// Receives a message of a slot, or of any.
    ///
    /// # Errors
    /// This rank is not in the group any more, or the group is closed.
    pub fn receive(&self, range: HostRange, from: Option<usize>, tag: u32) -> Result<Completion> {
        self.core.check_member()?;
        let completion = Completion::default();
        let mut ended = Vec::new();
        let mut state = self.core.inbox.state.lock();
        if from == Some(self.core.slot) || state.view.is_isolated {
            return Err(Error::invalid("a message needs another rank of the group"));
        }
        if let Some(from) = from
            && !state.view.is_member(from)
        {
            return Ok(Completion::of(Outcome { failed_slots: vec![from], ..Outcome::default() }));
        }
        let receive = Receive { source: from, tag, range, completion: completion.clone() };
        state.messages.receives.push(receive);
        state.match_messages(&mut ended);
        drop(state);
        self.core.inbox.changed.notify_all();
        announce(ended);
        Ok(completion)
    }

    /// Returns the highest active slot + 1; before this rank has joined, the declared size.
    pub fn size(&self) -> usize {
        let state = self.core.inbox.state.lock();
        if state.view.is_isolated { state.declared } else { state.view.size() }
    }

    /// Returns the number of the view.
    pub fn epoch(&self) -> u64 {
        self.core.inbox.state.lock().view.epoch
    }

    /// Returns which slots are active.
    pub fn active(&self) -> Vec<bool> {
        self.core.inbox.state.lock().view.active.clone()
    }

    /// Shows the active slots of this and each later view in the mirror.
    pub fn set_mirror(&self, mirror: Mirror) {
        let mut state = self.core.inbox.state.lock();
        mirror.show(&state.view.active);
        state.mirror = Some(mirror);
    }

    /// Returns for each slot whether its rank is reachable and active, or waits for activation.
    pub fn peers(&self) -> Vec<bool> {
        self.core.inbox.state.lock().peers.clone()
    }

    /// Returns what the group did.
    pub fn counters(&self) -> Counters {
        self.core.inbox.state.lock().counters
    }

    /// Makes ranks that wait in [`Self::wait_joined`] members.
    ///
    /// # Errors
    /// The coordinator has not answered in time.
    pub fn activate(&self, slots: Vec<usize>, limit: Duration) -> Result<Answer> {
        let group = self.core.name.clone();
        self.core.agent.ask(limit, |id| Request::Activate { group, slots, id })
    }

    /// Takes ranks out of the view.
    ///
    /// # Errors
    /// The coordinator has not answered in time.
    pub fn deactivate(&self, slots: Vec<usize>, limit: Duration) -> Result<Answer> {
        let group = self.core.name.clone();
        self.core.agent.ask(limit, |id| Request::Deactivate { group, slots, id })
    }

    /// Returns whether the members have agreed on a loss since the last call.
    ///
    /// # Errors
    /// The coordinator has not answered in time.
    pub fn synchronize(&self, limit: Duration) -> Result<Answer> {
        let group = self.core.name.clone();
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
        if state.view.is_member(self.core.slot) && !state.view.is_isolated {
            return Err(Error::invalid("this rank is a member of the group already"));
        }
        drop(state);
        self.core.agent.tell(&Request::Join { group: self.core.name.clone() })
    }

    /// Waits at most `time` and returns whether this rank is a member.
    ///
    /// # Errors
    /// The group is closed.
    pub fn wait_joined(&self, time: Duration) -> Result<bool> {
        let mut state = self.core.inbox.state.lock();
        let is_member =
            |state: &State| state.view.is_member(self.core.slot) && !state.view.is_isolated;
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
        self.core.agent.leave(&self.core.name);
        self.core.inbox.close(&closed());
        let waiting = {
            let mut queue = self.core.queue.lock();
            queue.is_closed = true;
            std::mem::take(&mut queue.operations)
        };
        self.core.queued.notify_all();
        for (_, completion) in waiting {
            completion.complete(Outcome { error: Some(closed()), ..Outcome::default() });
        }
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
    fn check_member(&self) -> Result<()> {
        let state = self.inbox.state.lock();
        if let Some(error) = &state.closed {
            return Err(error.clone());
        }
        if !state.view.is_member(self.slot) {
            return Err(not_active());
        }
        Ok(())
    }

    /// Carries out the operations, one after the other.
    fn work(&self) {
        loop {
            let mut queue = self.queue.lock();
            while queue.operations.is_empty() && !queue.is_closed {
                self.queued.wait_for(&mut queue, RECHECK);
            }
            let Some((operation, completion)) = queue.operations.pop_front() else { return };
            drop(queue);
            completion.complete(self.carry_out(&operation));
        }
    }

    /// Carries out one operation, again if the view changes meanwhile.
    fn carry_out(&self, operation: &Operation) -> Outcome {
        let mut begun = false;
        loop {
            let view = match self.start_attempt(&mut begun) {
                Ok(view) => view,
                Err(error) => return self.end_failed(error),
            };
            let exchange = Attempt::new(self, view);
            let mut has_data = None;
            match exchange.run(operation, &mut has_data) {
                Ok(()) => return self.end(has_data.unwrap_or_default()),
                Err(Stop::Failed(error)) => return self.end_failed(error),
                Err(Stop::Interrupted) => {}
            }
            match self.await_view(exchange.view.attempt) {
                Err(error) => return self.end_failed(error),
                Ok(is_finished) => {
                    if let (true, Some(writes)) = (is_finished, has_data) {
                        return self.end(writes);
                    }
                }
            }
        }
    }

    /// Waits until the group is not stopped, and returns the view.
    fn start_attempt(&self, begun: &mut bool) -> Result<View> {
        let mut state = self.inbox.state.lock();
        loop {
            if let Some(error) = &state.closed {
                return Err(error.clone());
            }
            if state.stopped.is_none() {
                break;
            }
            self.inbox.changed.wait_for(&mut state, RECHECK);
        }
        if !state.view.is_member(self.slot) {
            return Err(not_active());
        }
        if *begun {
            if let Some(running) = &mut state.running {
                running.has_data = false;
            }
        } else {
            *begun = true;
            state.running = Some(Running { sequence: state.next, has_data: false });
            state.next += 1;
        }
        Ok(state.view.clone())
    }

    /// Waits for the view after an interruption. Returns whether the operation is finished as it is.
    fn await_view(&self, attempt: u32) -> Result<bool> {
        let mut state = self.inbox.state.lock();
        loop {
            if let Some(error) = &state.closed {
                return Err(error.clone());
            }
            if state.view.attempt != attempt && state.stopped.is_none() {
                let sequence = state.running.map_or(0, |running| running.sequence);
                let has_data = state.running.is_some_and(|running| running.has_data);
                return Ok(has_data && sequence.cast_signed() <= state.view.finished);
            }
            self.inbox.changed.wait_for(&mut state, RECHECK);
        }
    }

    fn end(&self, writes: Writes) -> Outcome {
        for (target, bytes) in writes {
            target.write(&bytes);
        }
        let mut state = self.inbox.state.lock();
        state.running = None;
        state.counters.operations += 1;
        let mut failed_slots = std::mem::take(&mut state.unreported);
        failed_slots.sort_unstable();
        failed_slots.dedup();
        if !failed_slots.is_empty() {
            state.counters.failures += 1;
        }
        Outcome { failed_slots, ..Outcome::default() }
    }

    fn end_failed(&self, error: Error) -> Outcome {
        self.inbox.state.lock().running = None;
        Outcome { error: Some(error), ..Outcome::default() }
    }

    /// Writes messages and their acknowledgements, one after the other.
    fn write_messages(&self) {
        loop {
            let mut state = self.inbox.state.lock();
            let outgoing = loop {
                if state.closed.is_some() {
                    return;
                }
                if let Some(outgoing) = state.messages.outgoing.pop_front() {
                    break outgoing;
                }
                self.inbox.changed.wait_for(&mut state, RECHECK);
            };
            let (to, kind, sequence, step, range) = match outgoing {
                Outgoing::Message { to, tag, id, range } => (to, Kind::Message, id, tag, range),
                Outgoing::Taken { to, id } => (to, Kind::Taken, id, 0, HostRange::EMPTY),
            };
            let Some(member) = state.view.member(to).cloned() else { continue };
            drop(state);
            let is_over = || {
                let state = self.inbox.state.lock();
                state.closed.is_some() || !state.view.is_member(to)
            };
            let Some(link) = self.mesh.link(&member, is_over) else { continue };
            let header = Header {
                kind,
                group: self.id,
                attempt: 0,
                sequence,
                step,
                source: slot_number(self.slot),
                length: range.length() as u64,
            };
            if let Err(error) = link.send(&header, range.bytes()) {
                // The end of the connection is reported by its reader.
                tracing::debug!(rank = member.rank, %error, "a message was not sent");
            }
        }
    }
}

/// One attempt of an operation, in one view.
struct Attempt<'a> {
    core: &'a Core,
    view: View,
    slots: Vec<usize>,
    sequence: u64,
}

impl<'a> Attempt<'a> {
    fn new(core: &'a Core, view: View) -> Self {
        let slots = view.members.iter().map(|member| member.slot).collect();
        let running = core.inbox.state.lock().running;
        Self { core, view, slots, sequence: running.map_or(0, |running| running.sequence) }
    }

    /// Carries out the operation, and waits until all members have their data.
    fn run(&self, operation: &Operation, has_data: &mut Option<Writes>) -> Result<(), Stop> {
        let others = || self.slots.iter().copied().filter(|slot| *slot != self.core.slot);
        let failure = match operation.run(self) {
            Ok(writes) => {
                self.mark_data()?;
                *has_data = Some(writes);
                None
            }
            Err(Stop::Failed(error)) => Some(error),
            Err(Stop::Interrupted) => return Err(Stop::Interrupted),
        };
        let text = failure.as_ref().map(ToString::to_string).unwrap_or_default();
        for slot in others() {
            self.send(slot, DONE, text.as_bytes())?;
        }
        if let Some(error) = failure {
            return Err(Stop::Failed(error));
        }
        for slot in others() {
            let text = self.receive(slot, DONE)?;
            if !text.is_empty() {
                let text = String::from_utf8_lossy(&text).into_owned();
                let error = Error::invalid("the operation failed at another rank");
                return Err(Stop::Failed(error.with("rank", slot).with("error", text)));
            }
        }
        // A change of the view that has begun decides whether the operation is finished.
        let mut state = self.core.inbox.state.lock();
        if self.is_interrupted(&state) {
            return Err(Stop::Interrupted);
        }
        state.running = None;
        Ok(())
    }

    fn mark_data(&self) -> Result<(), Stop> {
        let mut state = self.core.inbox.state.lock();
        if self.is_interrupted(&state) {
            return Err(Stop::Interrupted);
        }
        if let Some(running) = &mut state.running {
            running.has_data = true;
        }
        Ok(())
    }

    fn is_interrupted(&self, state: &State) -> bool {
        state.closed.is_some() || state.stopped.is_some() || state.view.attempt != self.view.attempt
    }
}

impl Exchange for Attempt<'_> {
    fn slots(&self) -> &[usize] {
        &self.slots
    }

    fn own(&self) -> usize {
        self.core.slot
    }

    fn send(&self, slot: usize, step: u32, bytes: &[u8]) -> Result<(), Stop> {
        let member = self.view.member(slot).ok_or(Stop::Interrupted)?;
        let is_over = || self.is_interrupted(&self.core.inbox.state.lock());
        let link = self.core.mesh.link(member, is_over).ok_or(Stop::Interrupted)?;
        let header = Header {
            kind: Kind::Collective,
            group: self.core.id,
            attempt: self.view.attempt,
            sequence: self.sequence,
            step,
            source: slot_number(self.core.slot),
            length: bytes.len() as u64,
        };
        // If the connection has ended, the view will change: its reader has reported it.
        link.send(&header, bytes).map_err(|_| Stop::Interrupted)?;
        self.core.inbox.state.lock().counters.bytes_sent += bytes.len() as u64;
        Ok(())
    }

    fn receive(&self, slot: usize, step: u32) -> Result<Vec<u8>, Stop> {
        let key = (self.view.attempt, self.sequence, step, slot_number(slot));
        let mut state = self.core.inbox.state.lock();
        loop {
            if self.is_interrupted(&state) {
                return Err(Stop::Interrupted);
            }
            if let Some(queue) = state.parts.get_mut(&key)
                && let Some(bytes) = queue.pop_front()
            {
                if queue.is_empty() {
                    state.parts.remove(&key);
                }
                return Ok(bytes);
            }
            self.core.inbox.changed.wait_for(&mut state, RECHECK);
        }
    }
}

fn slot_number(slot: usize) -> u32 {
    u32::try_from(slot).unwrap_or(u32::MAX)
}

fn closed() -> Error {
    Error::closed("the process group is closed")
}

fn not_active() -> Error {
    Error::invalid(
        "this rank is not active in this group: the others have removed it; call join_group",
    )
}
