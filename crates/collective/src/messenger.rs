//! Sends and receives the messages of a group: the calls, and the thread that writes messages and reads
//! those whose memory is lent.

use std::sync::Arc;

use mooncake_base::{Error, Result};

use crate::{
    completion::{Completion, Driver, RECHECK},
    frame_wait::FrameWait,
    inbox::{
        GroupState, announce,
        messages::{Arrived, Messages, Outgoing, Receive, Sent},
        part::Part,
    },
    link::SendProgress,
    memory::HostRange,
    metrics::Recording,
    operation_kind::OperationKind,
    outcome::Outcome,
    own_rank::OwnRank,
    rank_frame::Kind,
};

/// Most sends, and most receives, that wait for their counterpart.
const MESSAGES_MAX: usize = 1 << 16;
/// From this size on, a message is lent, not sent: the receiver's thread must wake up to read it.
const LENT_MESSAGE_BYTES_MIN: usize = 256 << 10;
/// Most memory of a receiver that messages of one sender take in a group before a receive asks for
/// them. Later ones are lent, or only announced: their bytes stay at the sender.
const BUFFERED_BYTES_MAX: usize = 8 << 20;
/// What an entry of a message takes beside its bytes.
const ENTRY_BYTES: usize = 256;
/// Messages up to this size are written by the thread that sends them, if they need not wait.
const DIRECT_BYTES_MAX: usize = 4 << 10;

/// Sends and receives the messages of a group.
#[derive(Debug)]
pub(crate) struct Messenger {
    rank: Arc<OwnRank>,
    frames: Arc<FrameWait>,
}

impl Messenger {
    pub(crate) fn new(rank: Arc<OwnRank>, frames: Arc<FrameWait>) -> Arc<Self> {
        Arc::new(Self { rank, frames })
    }

    /// Sends a message; done when the receiver has taken it.
    ///
    /// # Errors
    /// This rank is not in the group any more, or the group is closed.
    pub(crate) fn send(&self, range: HostRange, to: usize, tag: u32) -> Result<Completion> {
        self.rank.check_member()?;
        let completion = self.completion_of(OperationKind::Send, range);
        let mut state = self.rank.inbox.state.lock();
        if to == self.rank.slot || state.progress.view.is_isolated {
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
        let loan_token = Box::default();
        let sent = Sent { to, completion: completion.clone(), range, buffered: 0, loan_token };
        state.messages.sent.insert(id, sent);
        let Messages { outgoing, is_writing, .. } = &mut state.messages;
        let is_direct = range.length() <= DIRECT_BYTES_MAX && outgoing.is_empty() && !*is_writing;
        if !is_direct {
            outgoing.push_back(Outgoing::Message { to, tag, id, range });
            drop(state);
            self.rank.inbox.outgoing.notify_all();
            return Ok(completion);
        }
        *is_writing = true;
        drop(state);
        self.send_small(to, tag, id, range);
        Ok(completion)
    }

    /// Receives a message of a slot, or of any.
    ///
    /// # Errors
    /// This rank is not in the group any more, or the group is closed.
    pub(crate) fn receive(
        &self,
        range: HostRange,
        from: Option<usize>,
        tag: u32,
    ) -> Result<Completion> {
        self.rank.check_member()?;
        let completion = self.completion_of(OperationKind::Receive, range);
        let mut ended = Vec::new();
        let mut state = self.rank.inbox.state.lock();
        if from == Some(self.rank.slot) || state.progress.view.is_isolated {
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
        let taken = state.messages.add_receive(receive, &mut ended);
        let taken = taken.map(|(to, id)| {
            let member = state.progress.view.member(to);
            (to, id, member.and_then(|member| self.rank.mesh.open_link(member)))
        });
        let has_outgoing = !state.messages.outgoing.is_empty();
        drop(state);
        if let Some((to, id, link)) = taken {
            let answer = self.rank.message_header(Kind::Taken, id, 0, 0);
            self.rank.inbox.acknowledge(to, &answer, link.as_ref());
        }
        if has_outgoing {
            self.rank.inbox.outgoing.notify_all();
        }
        announce(ended);
        Ok(completion)
    }

    /// Gives up a receive that has got no message, and returns whether it had got none: its memory is free
    /// then, and a message that comes later stays for another receive.
    pub(crate) fn cancel_receive(&self, completion: &Completion) -> bool {
        let mut state = self.rank.inbox.state.lock();
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

    /// Returns a completion that counts a message when it ends.
    fn completion_of(&self, kind: OperationKind, range: HostRange) -> Completion {
        let recording = Recording::begin(&self.rank.metrics, kind, range.length());
        let frames: Arc<dyn Driver> = Arc::<FrameWait>::clone(&self.frames);
        Completion::driven_by(Arc::downgrade(&frames), Some(recording))
    }

    /// Writes messages and their acknowledgements, one after the other, until the group is closed.
    pub(crate) fn write(&self) {
        loop {
            let mut state = self.rank.inbox.state.lock();
            let outgoing = loop {
                if state.closed.is_some() {
                    return;
                }
                if !state.messages.is_writing
                    && let Some(outgoing) = state.messages.outgoing.pop_front()
                {
                    state.messages.is_writing = true;
                    break outgoing;
                }
                self.rank.inbox.outgoing.wait_for(&mut state, RECHECK);
            };
            drop(state);
            match outgoing {
                Outgoing::Message { to, tag, id, range } => self.write_message(to, tag, id, range),
                Outgoing::Requested { to, id, range } => {
                    self.rank.metrics.add_sent(range.length());
                    self.write_frame(Kind::Requested, to, id, 0, range.bytes());
                }
                Outgoing::Request { to, id } => self.write_frame(Kind::Request, to, id, 0, &[]),
                Outgoing::Taken { to, id } => {
                    self.write_frame(Kind::Taken, to, id, 0, HostRange::EMPTY.bytes());
                }
                Outgoing::Fetch { receive, arrived } => self.fetch(receive, &arrived),
                Outgoing::Rest(link) => {
                    if let Err(error) = link.flush() {
                        tracing::debug!(%error, "the rest of a frame was not sent");
                    }
                }
            }
            self.rank.inbox.state.lock().messages.is_writing = false;
        }
    }

    /// Sends a small message at once, without the thread for messages, if nothing else must be sent
    /// before it and the socket has room. Otherwise the thread for messages sends it.
    fn send_small(&self, to: usize, tag: u32, id: u64, range: HostRange) {
        let is_sent = self.try_send_small(to, tag, id, range);
        let messages = &mut self.rank.inbox.state.lock().messages;
        messages.is_writing = false;
        // If the view has changed meanwhile, the message has ended.
        if let (false, Some(sent)) = (is_sent, messages.sent.get_mut(&id)) {
            if let Some(taken) = messages.buffered.get_mut(&to) {
                *taken -= std::mem::take(&mut sent.buffered);
            }
            messages.outgoing.push_front(Outgoing::Message { to, tag, id, range });
        }
        if !messages.outgoing.is_empty() {
            self.rank.inbox.outgoing.notify_all();
        }
    }

    /// Returns whether the message was sent, or begun.
    fn try_send_small(&self, to: usize, tag: u32, id: u64, range: HostRange) -> bool {
        let bytes = range.length() + ENTRY_BYTES;
        let mut state = self.rank.inbox.state.lock();
        let GroupState { progress, messages, .. } = &mut *state;
        let link = progress.view.member(to).and_then(|member| self.rank.mesh.open_link(member));
        let (Some(link), Some(sent)) = (link, messages.sent.get_mut(&id)) else { return false };
        let taken = messages.buffered.entry(to).or_default();
        if *taken + bytes > BUFFERED_BYTES_MAX {
            return false;
        }
        *taken += bytes;
        sent.buffered = bytes;
        drop(state);
        let header = self.rank.message_header(Kind::Message, id, tag, range.length());
        let progress = link.try_send(&header, range.bytes()).unwrap_or(SendProgress::Nothing);
        if progress == SendProgress::Begun {
            self.rank.inbox.state.lock().messages.outgoing.push_front(Outgoing::Rest(link));
        }
        if progress != SendProgress::Nothing {
            self.rank.metrics.add_sent(range.length());
        }
        progress != SendProgress::Nothing
    }

    /// Sends a message while its receiver has room for it; else lends it, or announces it.
    fn write_message(&self, to: usize, tag: u32, id: u64, range: HostRange) {
        let mut state = self.rank.inbox.state.lock();
        let GroupState { progress, messages, .. } = &mut *state;
        let Some(member) = progress.view.member(to) else { return };
        let may_lend = self.rank.mesh.may_lend(member);
        let is_large = range.length() >= LENT_MESSAGE_BYTES_MIN;
        let Messages { sent, buffered, .. } = messages;
        let Some(sent) = sent.get_mut(&id) else { return };
        let taken = buffered.entry(to).or_default();
        let bytes = range.length().saturating_add(ENTRY_BYTES);
        let has_room = taken.saturating_add(bytes) <= BUFFERED_BYTES_MAX;
        let loan =
            (may_lend && (is_large || !has_room)).then(|| sent.loan_token.lend(range.bytes()));
        let completion = sent.completion.clone();
        if loan.is_none() && has_room {
            sent.buffered = bytes;
            *taken += bytes;
        }
        drop(state);
        match loan {
            Some(loan) => {
                self.rank.metrics.add_sent(range.length());
                self.write_frame(Kind::MessageLoan, to, id, tag, &loan.encode());
            }
            None if has_room => {
                self.rank.metrics.add_sent(range.length());
                self.write_frame(Kind::Message, to, id, tag, range.bytes());
            }
            None => {
                // Its receiver waits for the answer to its request.
                self.frames.attend(&completion);
                let length = range.length() as u64;
                self.write_frame(Kind::Offer, to, id, tag, &length.to_le_bytes());
            }
        }
    }

    fn write_frame(&self, kind: Kind, to: usize, id: u64, tag: u32, bytes: &[u8]) {
        let member = self.rank.inbox.state.lock().progress.view.member(to).cloned();
        let Some(member) = member else { return };
        let is_over = || {
            let state = self.rank.inbox.state.lock();
            state.closed.is_some() || !state.progress.view.is_member(to)
        };
        let Some(link) = self.rank.mesh.link(&member, is_over) else { return };
        let header = self.rank.message_header(kind, id, tag, bytes.len());
        if let Err(error) = link.send(&header, bytes) {
            // The end of the connection is reported by its reader.
            tracing::debug!(rank = member.rank, %error, "a message was not sent");
        }
    }

    /// Reads a message from the memory of its sender into that of a receive.
    fn fetch(&self, receive: Receive, arrived: &Arrived) {
        let mut outcome = Outcome { source: Some(arrived.source), ..Outcome::default() };
        if let Part::Lent { process, loan } = &arrived.payload {
            let read = receive.range.fill(|target| loan.read(*process, 0, target));
            let is_lent = loan.is_current(*process).unwrap_or(false);
            match read {
                Ok(()) if is_lent => {}
                Err(error) if is_lent => {
                    let error = error.to_string();
                    let failure = Error::invalid("the memory of another rank cannot be read");
                    let failure = failure.with("rank", arrived.source).with("reason", error);
                    outcome.error = Some(failure);
                }
                // Its process has ended, or does not count this rank as a member any more.
                _ => outcome.failed_slots = vec![arrived.source],
            }
        }
        // The sender goes on first: it waits longer.
        self.write_frame(Kind::Taken, arrived.source, arrived.id, 0, &[]);
        receive.completion.complete(outcome);
    }
}

fn check_count(messages: usize) -> Result<()> {
    if messages < MESSAGES_MAX {
        return Ok(());
    }
    let error = Error::invalid("too many messages wait: wait for some of them");
    Err(error.with("messages_max", MESSAGES_MAX))
}
