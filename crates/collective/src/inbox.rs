//! The state of one group in one process: its view, how far it is, and what has arrived for it.

pub(crate) mod messages;
pub(crate) mod part;

use std::{
    future::{Future, poll_fn},
    sync::Arc,
    task::{Poll, Waker},
    time::{Duration, Instant},
};

use mooncake_base::{
    Error,
    sync::{Condvar, Mutex, MutexGuard},
};
use rustc_hash::FxHashMap;

use self::{
    messages::{Arrived, Messages, Outgoing},
    part::{Part, PartKey},
};
use crate::{
    call::Call,
    collectives::{ANNOUNCED, DONE},
    completion::Completion,
    link::{Link, SendProgress},
    memory::Mirror,
    message::{Commit, Member},
    outcome::Outcome,
    progress::Progress,
    rank_frame::{Header, Kind, slot_number},
};

/// How long a change of the view may take before a rank that cannot be reached is named.
const CHANGE_LIMIT: Duration = Duration::from_secs(2);

/// The state of a group, and the conditions that it has changed.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    pub(crate) state: Mutex<GroupState>,
    pub(crate) changed: Condvar,
    /// The thread for messages has something to write.
    pub(crate) outgoing: Condvar,
}

#[derive(Debug, Default)]
pub(crate) struct GroupState {
    pub(crate) is_made: bool,
    pub(crate) name: String,
    /// Whether the coordinator knows this extension rank.
    pub(crate) is_known: bool,
    pub(crate) progress: Progress,
    pub(crate) capacity: usize,
    pub(crate) declared: usize,
    pub(crate) peers: Vec<bool>,
    /// Counts how often the coordinator has told the states of the peers.
    pub(crate) peers_version: u64,
    pub(crate) mirror: Option<Mirror>,
    /// Slots that failed, and that no operation has reported yet.
    pub(crate) unreported: Vec<usize>,
    pub(crate) refusal: Option<String>,
    pub(crate) closed: Option<Error>,
    /// What has arrived, and what its sender has called.
    pub(crate) parts: FxHashMap<PartKey, (Part, Call)>,
    pub(crate) running_call: Option<RunningCall>,
    /// The part that the operation waits for.
    pub(crate) awaited: Option<PartKey>,
    /// The thread that goes on with the operation.
    pub(crate) waker: Option<Waker>,
    pub(crate) messages: Messages,
}

/// What this rank has called, and which member has called something else there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunningCall {
    attempt: u32,
    sequence: u64,
    call: Call,
    pub(crate) other: Option<(usize, Call)>,
}

/// Operations that ended, to be announced after the lock is released.
pub(crate) type Ended = Vec<(Completion, Outcome)>;

impl Inbox {
    /// Waits until `look` finds something in the state, which [`Self::announce_change`] announces.
    pub(crate) fn find<T>(
        &self,
        mut look: impl FnMut(&mut GroupState) -> Option<T> + Send,
    ) -> impl Future<Output = T> + Send {
        poll_fn(move |context| {
            let mut state = self.state.lock();
            if let Some(found) = look(&mut state) {
                return Poll::Ready(found);
            }
            state.waker = Some(context.waker().clone());
            Poll::Pending
        })
    }

    /// Lets all that waits for a change of the state look again.
    pub(crate) fn announce_change(&self, mut state: MutexGuard<'_, GroupState>) {
        let waker = state.waker.take();
        drop(state);
        self.changed.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Takes in a frame of a link to `process`. Returns what has ended, and the answer to a message
    /// that was taken, for [`Self::acknowledge`].
    pub(crate) fn deliver(
        &self,
        header: &Header,
        payload: Vec<u8>,
        process: Option<u32>,
    ) -> (Ended, Option<Header>) {
        let mut ended = Ended::new();
        let mut taken = None;
        let nothing = (Ended::new(), None);
        let source = header.source as usize;
        let Some(payload) = Part::decode(header.kind, payload, process) else { return nothing };
        let mut state = self.state.lock();
        match header.kind {
            Kind::Collective | Kind::CollectiveLoan | Kind::CollectiveFetch => {
                if state.progress.is_over(header.attempt, header.sequence) {
                    return nothing;
                }
                let key = (header.attempt, header.sequence, header.step, header.source);
                let is_failure = header.step == DONE && payload.length() > 0;
                let compared = state.compare_call(header);
                if compared.is_none() || header.step != ANNOUNCED {
                    state.parts.insert(key, (payload, header.call));
                }
                let is_other = compared == Some(false);
                let is_awaited = is_failure || is_other || state.awaited == Some(key);
                let waker = if is_awaited { state.waker.take() } else { None };
                drop(state);
                if let Some(waker) = waker {
                    waker.wake();
                }
                return nothing;
            }
            Kind::Message | Kind::MessageLoan | Kind::Offer => {
                let (tag, id) = (header.step, header.sequence);
                let arrived = Arrived { source, tag, id, payload, is_requested: false };
                taken = state.messages.add_arrived(arrived, &mut ended);
            }
            Kind::Request => {
                let (to, id) = (source, header.sequence);
                if let Some(sent) = state.messages.sent.get(&id).filter(|sent| sent.to == to) {
                    let range = sent.range;
                    state.messages.outgoing.push_back(Outgoing::Requested { to, id, range });
                }
            }
            Kind::Requested => {
                let id = header.sequence;
                taken = state.messages.take_requested(source, id, payload, &mut ended);
            }
            Kind::Withdrawn => {
                state.messages.drop_withdrawn(source, header.sequence, &mut ended);
            }
            Kind::Wake => return nothing,
            Kind::Taken => {
                if let Some(sent) = state.messages.sent.remove(&header.sequence) {
                    if let Some(buffered) = state.messages.buffered.get_mut(&sent.to) {
                        *buffered -= sent.buffered;
                    }
                    ended.push((sent.completion, Outcome::default()));
                }
            }
        }
        let (kind, source) = (Kind::Taken, slot_number(state.progress.slot));
        let answer = |id| Header { kind, sequence: id, step: 0, source, length: 0, ..*header };
        let has_outgoing = !state.messages.outgoing.is_empty();
        drop(state);
        if has_outgoing {
            self.outgoing.notify_all();
        }
        (ended, taken.map(answer))
    }

    /// Tells a sender that its message was taken: at once, or by the thread for messages if that
    /// would block.
    pub(crate) fn acknowledge(&self, to: usize, answer: &Header, link: Option<&Arc<Link>>) {
        let later = match link.map(|link| (link, link.try_send(answer, &[]))) {
            Some((_, Ok(SendProgress::Whole))) => return,
            Some((link, Ok(SendProgress::Begun))) => Outgoing::Rest(Arc::clone(link)),
            Some((_, Ok(SendProgress::Nothing) | Err(_))) | None => {
                Outgoing::Taken { to, id: answer.sequence }
            }
        };
        self.push_outgoing(later);
    }

    /// Lets the thread for messages write something.
    pub(crate) fn push_outgoing(&self, outgoing: Outgoing) {
        self.state.lock().messages.outgoing.push_back(outgoing);
        self.outgoing.notify_all();
    }

    /// Stops the group for a change of the view, and returns the last operation whose data it has.
    pub(crate) fn prepare(&self, attempt: u32) -> i64 {
        let mut state = self.state.lock();
        let finished = state.progress.prepare(attempt);
        self.announce_change(state);
        finished
    }

    /// Takes in a new view, and returns the ranks that are not in it any more.
    pub(crate) fn commit(&self, commit: Commit) -> Vec<(u32, u64)> {
        let mut ended = Ended::new();
        let mut state = self.state.lock();
        let GroupState { progress, peers, .. } = &mut *state;
        let slot = progress.slot;
        let old = progress.view.members.clone();
        if !progress.commit(&commit) {
            return Vec::new();
        }
        let is_member = progress.view.is_member(slot);
        // A rank that was removed has no connection to the members any more: they have closed theirs.
        let left = old.iter().filter(|old| {
            let is_same = |new: &Member| new.rank == old.rank && new.incarnation == old.incarnation;
            old.slot != slot && !(is_member && commit.members.iter().any(is_same))
        });
        let left = left.map(|member| (member.rank, member.incarnation)).collect();
        // Members are ready. Who takes part no more is not, until the coordinator says so again.
        for old in &old {
            let stays = commit.members.iter().any(|new| new.slot == old.slot);
            if !stays && let Some(is_ready) = peers.get_mut(old.slot) {
                *is_ready = false;
            }
        }
        for new in &commit.members {
            if let Some(is_ready) = peers.get_mut(new.slot) {
                *is_ready = true;
            }
        }
        let attempt = commit.attempt;
        state.parts.retain(|key, _| key.0 >= attempt);
        state.unreported.extend(commit.failed.iter().filter(|failed| **failed != slot));
        if let Some(mirror) = &state.mirror {
            mirror.show(&commit.active);
        }
        let GroupState { progress, messages, .. } = &mut *state;
        messages.fail_lost(progress, &mut ended);
        self.announce_change(state);
        announce(ended);
        left
    }

    /// Returns whether this process and another rank are members of the view.
    pub(crate) fn shares_view_with(&self, rank: u32) -> bool {
        let state = self.state.lock();
        let is_member = |member: &Member| member.rank == rank;
        let Progress { slot, view, .. } = &state.progress;
        view.is_member(*slot) && view.members.iter().any(is_member)
    }

    /// Returns whether this process needs a connection to another rank, or will perhaps: the view changes. A
    /// change that has begun is waited for.
    pub(crate) fn needs(&self, rank: u32) -> bool {
        let end = Instant::now() + CHANGE_LIMIT;
        let mut state = self.state.lock();
        while state.closed.is_none() && state.progress.stopped.is_some() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            self.changed.wait_for(&mut state, left);
        }
        drop(state);
        self.shares_view_with(rank)
    }

    /// Ends the group: operations that are not done fail.
    pub(crate) fn close(&self, error: &Error) {
        let mut ended = Ended::new();
        let mut state = self.state.lock();
        if state.closed.is_none() {
            state.closed = Some(error.clone());
        }
        state.messages.fail_all(error, &mut ended);
        state.mirror = None;
        state.parts.clear();
        self.announce_change(state);
        self.outgoing.notify_all();
        announce(ended);
    }
}

impl GroupState {
    /// Notes what this rank calls, and compares it with what has arrived for the operation.
    pub(crate) fn begin_call(&mut self, attempt: u32, sequence: u64, call: Call) {
        let is_here = |key: &PartKey| key.0 == attempt && key.1 == sequence;
        let mut arrived = self.parts.iter().filter(|(key, _)| is_here(key));
        let other = arrived.find(|(_, (_, other))| *other != call);
        let other = other.map(|(key, (_, other))| (key.3 as usize, *other));
        self.running_call = Some(RunningCall { attempt, sequence, call, other });
        if !self.parts.is_empty() {
            self.parts.retain(|key, _| key.2 != ANNOUNCED || !is_here(key));
        }
    }

    /// Returns whether the sender of a frame has called what this rank carries out; `None` if the frame is
    /// of a later operation.
    fn compare_call(&mut self, header: &Header) -> Option<bool> {
        let running = self.running_call.as_mut()?;
        if running.attempt != header.attempt || running.sequence != header.sequence {
            return None;
        }
        let is_same = running.call == header.call;
        if !is_same {
            running.other.get_or_insert((header.source as usize, header.call));
        }
        Some(is_same)
    }
}

/// Announces the end of operations. No lock is held: callbacks run in here.
pub(crate) fn announce(ended: Ended) {
    for (completion, outcome) in ended {
        completion.complete(outcome);
    }
}
