//! A group of one process: carries out its collective operations in order, and sends its messages.

use std::{sync::Arc, time::Duration};

use mooncake_base::{Error, Result};
use mooncake_os::threads::Threads;

use crate::{
    agent::Agent,
    collectives::Operation,
    completion::Completion,
    frame_wait::FrameWait,
    inbox::{GroupState, Inbox},
    memory::{HostRange, Mirror},
    mesh::group_id,
    message::{Answer, Request},
    messenger::Messenger,
    metrics::Counters,
    operation_queue::{OperationQueue, closed},
    operation_runner::OperationRunner,
    own_rank::OwnRank,
};

/// Larger operations are left to the group's thread, so that a wait for one can end at any time.
const CARRIED_OUT_BYTES_MAX: usize = 256 << 10;
/// A group of processes, as one of them sees it.
#[derive(Debug)]
pub struct Group {
    rank: Arc<OwnRank>,
    /// Name of the group at the coordinator.
    key: String,
    queue: Arc<OperationQueue>,
    messenger: Arc<Messenger>,
    agent: Arc<Agent>,
    threads: Threads,
}

impl Group {
    pub(crate) fn start(
        name: &str,
        key: String,
        slot: usize,
        inbox: Arc<Inbox>,
        agent: Arc<Agent>,
    ) -> Result<Self> {
        let mesh = Arc::clone(agent.mesh());
        let frames = FrameWait::new(Arc::clone(&mesh), Arc::clone(&inbox));
        let rank = Arc::new(OwnRank {
            group_name: name.to_owned(),
            group_id: group_id(&key),
            slot,
            inbox,
            mesh,
            metrics: Arc::default(),
        });
        let silence_limit = 2 * agent.heartbeat_timeout();
        let runner = OperationRunner::new(Arc::clone(&rank), silence_limit);
        let queue = OperationQueue::new(runner, Arc::clone(&frames));
        let messenger = Messenger::new(Arc::clone(&rank), frames);
        let working = Arc::clone(&queue);
        let threads = Threads::new(1);
        let failed = |error| Error::internal("a thread did not start").caused_by(error);
        threads.spawn("mc-pg-work", move || working.work()).map_err(failed)?;
        messenger.start().map_err(failed)?;
        rank.show();
        Ok(Self { rank, key, queue, messenger, agent, threads })
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
        self.rank.check_member()?;
        let is_small = operation.source_bytes() <= CARRIED_OUT_BYTES_MAX;
        let completion = if is_small { self.queue.new_completion() } else { Completion::default() };
        self.queue.push(operation, completion.clone())?;
        if !is_small {
            self.queue.start();
        }
        Ok(completion)
    }

    /// Sends a message; done when the receiver has taken it.
    ///
    /// # Errors
    /// This rank is not in the group any more, or the group is closed.
    pub fn send(&self, range: HostRange, to: usize, tag: u32) -> Result<Completion> {
        self.messenger.send(range, to, tag)
    }

    /// Receives a message of a slot, or of any.
    ///
    /// # Errors
    /// This rank is not in the group any more, or the group is closed.
    pub fn receive(&self, range: HostRange, from: Option<usize>, tag: u32) -> Result<Completion> {
        self.messenger.receive(range, from, tag)
    }

    /// Gives up a receive unless bytes are written into its memory, and returns whether it was given up: its
    /// memory is free then, and its message is left to another receive.
    pub fn cancel_receive(&self, completion: &Completion) -> bool {
        self.messenger.cancel_receive(completion)
    }

    /// Withdraws a message unless its receiver has taken it, and returns whether it was withdrawn: its memory
    /// is free then. A receiver that takes it at this moment may have got it nevertheless.
    pub fn cancel_send(&self, completion: &Completion) -> bool {
        self.messenger.cancel_send(completion)
    }

    /// Returns the highest active slot + 1; before this rank has joined, the declared size.
    pub fn size(&self) -> usize {
        let state = self.rank.inbox.state.lock();
        if state.progress.view.is_isolated { state.declared } else { state.progress.view.size() }
    }

    /// Returns the number of the view.
    pub fn epoch(&self) -> u64 {
        self.rank.inbox.state.lock().progress.view.epoch
    }

    /// Returns which slots are active.
    pub fn active(&self) -> Vec<bool> {
        self.rank.inbox.state.lock().progress.view.active.clone()
    }

    /// Shows the active slots of this and each later view in the mirror.
    pub fn set_mirror(&self, mirror: Mirror) {
        let mut state = self.rank.inbox.state.lock();
        mirror.show(&state.progress.view.active);
        state.mirror = Some(mirror);
    }

    /// Returns for each slot whether its rank is reachable and active, or waits for activation.
    pub fn peers(&self) -> Vec<bool> {
        self.rank.inbox.state.lock().peers.clone()
    }

    /// Returns what the group did.
    pub fn counters(&self) -> Counters {
        self.rank.counters()
    }

    /// Makes ranks that wait in [`Self::wait_joined`] members. If the answer is
    /// [`Status::NotReady`](crate::Status::NotReady), another try may succeed after [`Self::wait_peers`].
    ///
    /// # Errors
    /// The coordinator has not answered in time.
    pub fn activate(&self, slots: Vec<usize>, limit: Duration) -> Result<Answer> {
        let group = self.key.clone();
        self.agent.ask(limit, |id| Request::Activate { group, slots, id })
    }

    /// Returns a number that grows when the state of a peer changes.
    pub fn peers_version(&self) -> u64 {
        self.rank.inbox.state.lock().peers_version
    }

    /// Waits at most `time` and returns whether the state of a peer has changed since `version`.
    ///
    /// # Errors
    /// The group is closed.
    pub fn wait_peers(&self, version: u64, time: Duration) -> Result<bool> {
        let mut state = self.rank.inbox.state.lock();
        if state.closed.is_none() && state.peers_version == version {
            self.rank.inbox.changed.wait_for(&mut state, time);
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
        let group = self.key.clone();
        self.agent.ask(limit, |id| Request::Deactivate { group, slots, id })
    }

    /// Returns whether the members have agreed on a loss since the last call.
    ///
    /// # Errors
    /// The coordinator has not answered in time.
    pub fn synchronize(&self, limit: Duration) -> Result<Answer> {
        let group = self.key.clone();
        self.agent.ask(limit, |id| Request::Synchronize { group, id })
    }

    /// Asks to become a member.
    ///
    /// # Errors
    /// This rank is a member, or the group is closed.
    pub fn begin_join(&self) -> Result<()> {
        let state = self.rank.inbox.state.lock();
        if let Some(error) = &state.closed {
            return Err(error.clone());
        }
        if state.progress.has_joined() {
            return Err(Error::invalid("this rank is a member of the group already"));
        }
        drop(state);
        self.agent.tell(&Request::Join { group: self.key.clone() })
    }

    /// Waits at most `time` and returns whether this rank is a member.
    ///
    /// # Errors
    /// The group is closed.
    pub fn wait_joined(&self, time: Duration) -> Result<bool> {
        let mut state = self.rank.inbox.state.lock();
        let is_member = |state: &GroupState| state.progress.has_joined();
        if state.closed.is_none() && !is_member(&state) {
            self.rank.inbox.changed.wait_for(&mut state, time);
        }
        match &state.closed {
            Some(error) => Err(error.clone()),
            None => Ok(is_member(&state)),
        }
    }

    /// Ends the group: operations that are not done fail, its threads end. Harmless if repeated.
    pub fn close(&self) {
        let has_ended = self.threads.stop(|| {
            self.rank.hide();
            self.agent.leave(&self.key);
            self.rank.inbox.close(&closed());
            self.queue.close();
            self.messenger.join();
        });
        if has_ended {
            self.rank.mesh.forget(self.rank.group_id);
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.close();
    }
}
