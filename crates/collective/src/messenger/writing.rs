//! Threads that write the messages of a group. One serves all peers; while a peer takes no bytes it stays
//! with that peer, and another thread serves the others.

use std::{cell::Cell, io, sync::Arc};

use mooncake_base::Error;

use super::{BUFFERED_BYTES_MAX, ENTRY_BYTES, Messenger};
use crate::{
    completion::RECHECK,
    inbox::{
        GroupState, announce,
        messages::{Arrived, Messages, Outgoing, Receive},
        part::Part,
    },
    memory::HostRange,
    outcome::Outcome,
    rank_frame::Kind,
};

/// From this size on, a message is lent, not sent: the receiver's thread must wake up to read it.
const LENT_MESSAGE_BYTES_MIN: usize = 256 << 10;

impl Messenger {
    /// Starts a thread that writes messages.
    pub(crate) fn start(self: &Arc<Self>) -> io::Result<()> {
        let messenger = Arc::clone(self);
        self.rank.inbox.state.lock().messages.free_writers += 1;
        let started = self.threads.spawn("mc-pg-send", move || messenger.write());
        if started.is_err() {
            self.rank.inbox.state.lock().messages.free_writers -= 1;
        }
        started
    }

    /// Waits for the threads that write, which end once the group is closed.
    pub(crate) fn join(&self) {
        self.threads.join();
    }

    /// Writes messages and their acknowledgements until the group is closed, or another thread does so.
    fn write(self: &Arc<Self>) {
        while let Some(outgoing) = self.next_outgoing() {
            let target = outgoing.target();
            let is_waiting = Cell::new(false);
            self.write_one(outgoing, &is_waiting);
            let mut ended = Vec::new();
            let mut state = self.rank.inbox.state.lock();
            let messages = &mut state.messages;
            messages.end_writing(target, &mut ended);
            let is_needed = !is_waiting.get() || messages.free_writers == 0;
            messages.free_writers += usize::from(is_waiting.get() && is_needed);
            // Something for the same peer may have waited for its turn.
            let has_outgoing = is_waiting.get() && !messages.outgoing.is_empty();
            drop(state);
            announce(ended);
            if has_outgoing {
                self.rank.inbox.outgoing.notify_all();
            }
            if !is_needed {
                return;
            }
        }
    }

    /// Waits for something to write to a peer to which no other thread writes; `None` at the end of the group.
    fn next_outgoing(&self) -> Option<Outgoing> {
        let mut state = self.rank.inbox.state.lock();
        while state.closed.is_none() {
            if let Some(outgoing) = state.messages.take_outgoing() {
                return Some(outgoing);
            }
            self.rank.inbox.outgoing.wait_for(&mut state, RECHECK);
        }
        None
    }

    fn write_one(self: &Arc<Self>, outgoing: Outgoing, is_waiting: &Cell<bool>) {
        let write =
            |kind, to, id, bytes: &[u8]| self.write_frame(kind, to, id, 0, bytes, is_waiting);
        match outgoing {
            Outgoing::Message { to, tag, id, range } => {
                self.write_message(to, id, tag, range, is_waiting);
            }
            Outgoing::Requested { to, id, range } => {
                self.rank.metrics.add_sent(range.length());
                write(Kind::Requested, to, id, range.bytes());
            }
            Outgoing::Request { to, id } => write(Kind::Request, to, id, &[]),
            Outgoing::Taken { to, id } => write(Kind::Taken, to, id, &[]),
            Outgoing::Withdrawn { to, id } => write(Kind::Withdrawn, to, id, &[]),
            Outgoing::Fetch { receive, arrived } => self.fetch(receive, &arrived, is_waiting),
            Outgoing::Rest(link) => {
                let is_over = || {
                    self.let_others_write(is_waiting);
                    self.rank.inbox.state.lock().closed.is_some()
                };
                if let Err(error) = link.flush(is_over) {
                    tracing::debug!(%error, "the rest of a frame was not sent");
                }
            }
        }
    }

    /// Lets another thread write to other peers: the calling one waits for a peer.
    fn let_others_write(self: &Arc<Self>, is_waiting: &Cell<bool>) {
        if is_waiting.replace(true) {
            return;
        }
        let mut state = self.rank.inbox.state.lock();
        state.messages.free_writers -= 1;
        let is_last = state.messages.free_writers == 0 && state.closed.is_none();
        drop(state);
        if is_last && let Err(error) = self.start() {
            tracing::debug!(%error, "messages to other ranks wait for one that takes none");
        }
    }

    /// Sends a message while its receiver has room for it; else lends it, or announces it.
    fn write_message(
        self: &Arc<Self>,
        to: usize,
        id: u64,
        tag: u32,
        range: HostRange,
        is_waiting: &Cell<bool>,
    ) {
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
        let write = |kind, bytes: &[u8]| self.write_frame(kind, to, id, tag, bytes, is_waiting);
        match loan {
            Some(loan) => {
                self.rank.metrics.add_sent(range.length());
                write(Kind::MessageLoan, &loan.encode());
            }
            None if has_room => {
                self.rank.metrics.add_sent(range.length());
                write(Kind::Message, range.bytes());
            }
            None => {
                // Its receiver waits for the answer to its request.
                self.frames.attend(&completion);
                let length = range.length() as u64;
                write(Kind::Offer, &length.to_le_bytes());
            }
        }
    }

    fn write_frame(
        self: &Arc<Self>,
        kind: Kind,
        to: usize,
        id: u64,
        tag: u32,
        bytes: &[u8],
        is_waiting: &Cell<bool>,
    ) {
        let member = self.rank.inbox.state.lock().progress.view.member(to).cloned();
        let Some(member) = member else { return };
        // Frames that bring, or promise, bytes of this process.
        let is_of_send =
            matches!(kind, Kind::Message | Kind::MessageLoan | Kind::Offer | Kind::Requested);
        let is_over = || {
            self.let_others_write(is_waiting);
            let state = self.rank.inbox.state.lock();
            state.closed.is_some()
                || !state.progress.view.is_member(to)
                || (is_of_send && !state.messages.sent.contains_key(&id))
        };
        let Some(link) = self.rank.mesh.link(&member, is_over) else { return };
        let header = self.rank.message_header(kind, id, tag, bytes.len());
        if let Err(error) = link.send(&header, bytes, is_over) {
            // The end of the connection is reported by its reader.
            tracing::debug!(rank = member.rank, %error, "a message was not sent");
        }
    }

    /// Reads a message from the memory of its sender into that of a receive.
    fn fetch(self: &Arc<Self>, receive: Receive, arrived: &Arrived, is_waiting: &Cell<bool>) {
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
                _ => return self.receive_again(receive, arrived.source),
            }
        }
        // The sender goes on first: it waits longer.
        self.write_frame(Kind::Taken, arrived.source, arrived.id, 0, &[], is_waiting);
        receive.completion.complete(outcome);
    }

    /// Lets a receive wait again whose message is not lent any more: its sender has withdrawn it, has ended,
    /// or does not count this rank as a member. In the last two cases this rank learns of the loss.
    fn receive_again(&self, receive: Receive, source: usize) {
        let mut ended = Vec::new();
        let mut state = self.rank.inbox.state.lock();
        let failed = match &state.closed {
            Some(error) => Some(Outcome { error: Some(error.clone()), ..Outcome::default() }),
            None if state.progress.view.is_member(source) => None,
            None => Some(Outcome { failed_slots: vec![source], ..Outcome::default() }),
        };
        match failed {
            Some(outcome) => ended.push((receive.completion, outcome)),
            None => state.messages.return_receive(receive, &mut ended),
        }
        drop(state);
        announce(ended);
    }
}
