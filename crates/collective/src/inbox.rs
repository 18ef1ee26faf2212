//! The state of one group in one process: its view, how far it is, and what has arrived for it.

use std::{
    collections::VecDeque,
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

use crate::{
    call::Call,
    collectives::{ANNOUNCED, DONE},
    completion::Completion,
    link::{Link, SendProgress},
    memory::{HostRange, Mirror},
    message::{Commit, Member},
    outcome::Outcome,
    peer_memory::{Loan, LoanToken},
    progress::Progress,
    rank_frame::{Header, Kind, slot_number},
};

/// How long a change of the view may take before a rank that cannot be reached is named.
const CHANGE_LIMIT: Duration = Duration::from_secs(2);

/// A part of a collective: attempt, sequence, step, source.
pub(crate) type PartKey = (u32, u64, u32, u32);

/// What a member sent.
#[derive(Debug)]
pub(crate) enum Part {
    Bytes(Vec<u8>),
    /// Memory of another process of this host.
    Lent {
        process: u32,
        loan: Loan,
    },
    /// Memory of a process of another host, which is read through a fabric.
    Remote {
        address: u64,
        length: u64,
    },
    /// Bytes that wait at their sender until they are requested.
    Offered(u64),
}

impl Part {
    /// Returns what a frame of a link to `process` brings; `None` if its payload does not fit its kind.
    fn decode(kind: Kind, payload: Vec<u8>, process: Option<u32>) -> Option<Self> {
        match kind {
            Kind::CollectiveLoan | Kind::MessageLoan => {
                Some(Self::Lent { process: process?, loan: Loan::decode(&payload)? })
            }
            Kind::Offer => {
                payload.as_slice().try_into().ok().map(u64::from_le_bytes).map(Self::Offered)
            }
            Kind::CollectiveFetch => match payload.as_chunks() {
                ([address, length], []) => Some(Self::Remote {
                    address: u64::from_le_bytes(*address),
                    length: u64::from_le_bytes(*length),
                }),
                _ => None,
            },
            _ => Some(Self::Bytes(payload)),
        }
    }

    pub(crate) fn length(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Lent { loan, .. } => loan.length,
            Self::Remote { length, .. } | Self::Offered(length) => *length,
        }
    }
}

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

/// Messages of `send` and `recv`.
#[derive(Debug, Default)]
pub(crate) struct Messages {
    pub(crate) receives: Vec<Receive>,
    pub(crate) arrived: VecDeque<Arrived>,
    pub(crate) sent: FxHashMap<u64, Sent>,
    /// Memory that messages take at each receiver.
    pub(crate) buffered: FxHashMap<usize, usize>,
    /// Receives whose bytes were requested, by source and number of the message.
    pub(crate) requested: FxHashMap<(usize, u64), Receive>,
    pub(crate) next_id: u64,
    /// What the group's thread for messages has to write.
    pub(crate) outgoing: VecDeque<Outgoing>,
    /// Whether a message is on its way to a socket: a later one must not overtake it.
    pub(crate) is_writing: bool,
}

/// A message that its receiver has not taken yet.
#[derive(Debug)]
pub(crate) struct Sent {
    pub(crate) to: usize,
    pub(crate) completion: Completion,
    pub(crate) range: HostRange,
    /// Memory of the receiver that the message takes.
    pub(crate) buffered: usize,
    /// Ends the loan of its memory.
    pub(crate) loan_token: Box<LoanToken>,
}

#[derive(Debug)]
pub(crate) struct Receive {
    pub(crate) source: Option<usize>,
    pub(crate) tag: u32,
    pub(crate) range: HostRange,
    pub(crate) completion: Completion,
}

#[derive(Debug)]
pub(crate) struct Arrived {
    pub(crate) source: usize,
    tag: u32,
    pub(crate) id: u64,
    pub(crate) payload: Part,
}

#[derive(Debug)]
pub(crate) enum Outgoing {
    Message {
        to: usize,
        tag: u32,
        id: u64,
        range: HostRange,
    },
    /// A message that its receiver has requested.
    Requested {
        to: usize,
        id: u64,
        range: HostRange,
    },
    Request {
        to: usize,
        id: u64,
    },
    Taken {
        to: usize,
        id: u64,
    },
    /// Read a message from the memory of its sender.
    Fetch {
        receive: Receive,
        arrived: Arrived,
    },
    /// The rest of a frame that was sent in part.
    Rest(Arc<Link>),
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
                taken = state.add_arrived(Arrived { source, tag, id, payload }, &mut ended);
            }
            Kind::Request => {
                let (to, id) = (source, header.sequence);
                if let Some(sent) = state.messages.sent.get(&id).filter(|sent| sent.to == to) {
                    let range = sent.range;
                    state.messages.outgoing.push_back(Outgoing::Requested { to, id, range });
                }
            }
            Kind::Requested => {
                taken = state.take_requested(source, header.sequence, &payload, &mut ended);
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
        state.fail_messages(&mut ended);
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
        let failed = || Outcome { error: Some(error.clone()), ..Outcome::default() };
        let messages = std::mem::take(&mut state.messages);
        ended.extend(messages.receives.into_iter().map(|it| (it.completion, failed())));
        ended.extend(messages.requested.into_values().map(|it| (it.completion, failed())));
        for sent in messages.sent.into_values() {
            sent.loan_token.end();
            ended.push((sent.completion, failed()));
        }
        for outgoing in messages.outgoing {
            if let Outgoing::Fetch { receive, .. } = outgoing {
                ended.push((receive.completion, failed()));
            }
        }
        state.mirror = None;
        state.parts.clear();
        self.announce_change(state);
        self.outgoing.notify_all();
        announce(ended);
    }
}

impl Receive {
    fn fits(&self, arrived: &Arrived) -> bool {
        arrived.tag == self.tag && self.source.is_none_or(|source| source == arrived.source)
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

    /// Takes in a receive: it gets the first message that fits, or waits. Returns the sender and the
    /// number of a message that was taken.
    pub(crate) fn add_receive(
        &mut self,
        receive: Receive,
        ended: &mut Ended,
    ) -> Option<(usize, u64)> {
        let found = self.messages.arrived.iter().position(|arrived| receive.fits(arrived));
        let Some(arrived) = found.and_then(|index| self.messages.arrived.remove(index)) else {
            self.messages.receives.push(receive);
            return None;
        };
        let source = arrived.source;
        self.hand_over(receive, arrived, ended).map(|id| (source, id))
    }

    /// Takes in a message: the first receive that fits gets it, or it waits. Returns the number of a
    /// message that was taken.
    fn add_arrived(&mut self, arrived: Arrived, ended: &mut Ended) -> Option<u64> {
        match self.messages.receives.iter().position(|receive| receive.fits(&arrived)) {
            Some(index) => {
                let receive = self.messages.receives.remove(index);
                self.hand_over(receive, arrived, ended)
            }
            None => {
                self.messages.arrived.push_back(arrived);
                None
            }
        }
    }

    /// Hands a message to a receive, and returns its number; or begins to bring its bytes here.
    fn hand_over(&mut self, receive: Receive, arrived: Arrived, ended: &mut Ended) -> Option<u64> {
        let (to, id) = (arrived.source, arrived.id);
        let length = arrived.payload.length();
        let mut outcome = Outcome { source: Some(to), ..Outcome::default() };
        match &arrived.payload {
            _ if length != receive.range.length() as u64 => {
                outcome.error = Some(
                    Error::invalid("the message has another length than the tensor")
                        .with("message_bytes", length)
                        .with("tensor_bytes", receive.range.length()),
                );
            }
            Part::Bytes(bytes) => receive.range.write(bytes),
            Part::Remote { .. } => {
                outcome.error = Some(Error::invalid("only collective operations read other hosts"));
            }
            Part::Lent { .. } => {
                self.messages.outgoing.push_back(Outgoing::Fetch { receive, arrived });
                return None;
            }
            Part::Offered(_) => {
                self.messages.outgoing.push_back(Outgoing::Request { to, id });
                self.messages.requested.insert((to, id), receive);
                return None;
            }
        }
        ended.push((receive.completion, outcome));
        Some(id)
    }

    /// Returns how many bytes of messages wait here for a receive.
    pub(crate) fn buffered_bytes(&self) -> u64 {
        let buffered = self.messages.arrived.iter().map(|arrived| match &arrived.payload {
            Part::Bytes(bytes) => bytes.len() as u64,
            Part::Lent { .. } | Part::Remote { .. } | Part::Offered(_) => 0,
        });
        buffered.sum()
    }

    /// Hands the bytes of a message to the receive that requested them, and returns its number.
    fn take_requested(
        &mut self,
        source: usize,
        id: u64,
        payload: &Part,
        ended: &mut Ended,
    ) -> Option<u64> {
        let Part::Bytes(bytes) = payload else { return None };
        let receive = self.messages.requested.remove(&(source, id))?;
        receive.range.write(bytes);
        ended.push((receive.completion, Outcome { source: Some(source), ..Outcome::default() }));
        Some(id)
    }

    /// Ends sends to, and receives from, slots that are not in the view.
    fn fail_messages(&mut self, ended: &mut Ended) {
        let Progress { view, slot, .. } = &self.progress;
        let slot = *slot;
        let messages = &mut self.messages;
        messages.arrived.retain(|arrived| view.is_member(arrived.source));
        let lost = |slot: usize| Outcome { failed_slots: vec![slot], ..Outcome::default() };
        messages.outgoing.retain(|outgoing| match outgoing {
            Outgoing::Message { to, .. }
            | Outgoing::Requested { to, .. }
            | Outgoing::Request { to, .. }
            | Outgoing::Taken { to, .. } => view.is_member(*to),
            // Other groups may send on the same connection.
            Outgoing::Rest(_) => true,
            Outgoing::Fetch { receive, arrived } => {
                let is_member = view.is_member(arrived.source);
                if !is_member {
                    ended.push((receive.completion.clone(), lost(arrived.source)));
                }
                is_member
            }
        });
        let others = view.members.iter().any(|member| member.slot != slot);
        messages.receives.retain(|receive| {
            let is_lost = receive.source.map_or(!others, |source| !view.is_member(source));
            if is_lost {
                ended.push((receive.completion.clone(), lost(receive.source.unwrap_or(slot))));
            }
            !is_lost
        });
        messages.buffered.retain(|to, _| view.is_member(*to));
        messages.requested.retain(|(source, _), receive| {
            let is_member = view.is_member(*source);
            if !is_member {
                ended.push((receive.completion.clone(), lost(*source)));
            }
            is_member
        });
        messages.sent.retain(|_, sent| {
            let is_member = view.is_member(sent.to);
            if !is_member {
                sent.loan_token.end();
                ended.push((sent.completion.clone(), lost(sent.to)));
            }
            is_member
        });
    }
}

/// Announces the end of operations. No lock is held: callbacks run in here.
pub(crate) fn announce(ended: Ended) {
    for (completion, outcome) in ended {
        completion.complete(outcome);
    }
}
