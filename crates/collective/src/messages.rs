//! The thread of a group that writes its messages, and reads those whose memory is lent.

use mooncake_base::Error;

use crate::{
    call::Call,
    completion::Outcome,
    frame::{Header, Kind},
    group::{Core, RECHECK, slot_number},
    inbox::{Arrived, Messages, Outgoing, Part, Receive, State},
    link::Progress,
    memory::HostRange,
};

/// From this size on, a message is lent, not sent: the receiver's thread must wake up to read it.
const LENT_MESSAGE_BYTES_MIN: usize = 256 << 10;
/// Most memory of a receiver that messages of one sender take in a group before a receive asks for
/// them. Later ones are lent, or only announced: their bytes stay at the sender.
pub(crate) const BUFFERED_BYTES_MAX: usize = 8 << 20;
/// What an entry of a message takes beside its bytes.
const ENTRY_BYTES: usize = 256;
/// Messages up to this size are written by the thread that sends them, if they need not wait.
pub(crate) const DIRECT_BYTES_MAX: usize = 4 << 10;

impl Core {
    /// Writes messages and their acknowledgements, one after the other, until the group is closed.
    pub(crate) fn write_messages(&self) {
        loop {
            let mut state = self.inbox.state.lock();
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
                self.inbox.outgoing.wait_for(&mut state, RECHECK);
            };
            drop(state);
            match outgoing {
                Outgoing::Message { to, tag, id, range } => self.write_message(to, tag, id, range),
                Outgoing::Requested { to, id, range } => {
                    self.metrics.add_sent(range.length());
                    self.write_frame(Kind::Requested, to, (id, 0), range.bytes());
                }
                Outgoing::Request { to, id } => self.write_frame(Kind::Request, to, (id, 0), &[]),
                Outgoing::Taken { to, id } => {
                    self.write_frame(Kind::Taken, to, (id, 0), HostRange::EMPTY.bytes());
                }
                Outgoing::Fetch { receive, arrived } => self.fetch(receive, &arrived),
                Outgoing::Rest(link) => {
                    if let Err(error) = link.flush() {
                        tracing::debug!(%error, "the rest of a frame was not sent");
                    }
                }
            }
            self.inbox.state.lock().messages.is_writing = false;
        }
    }

    /// Sends a small message at once, without the thread for messages, if nothing else must be sent
    /// before it and the socket has room. Otherwise the thread for messages sends it.
    pub(crate) fn send_small(&self, to: usize, tag: u32, id: u64, range: HostRange) {
        let is_sent = self.try_send_small(to, tag, id, range);
        let messages = &mut self.inbox.state.lock().messages;
        messages.is_writing = false;
        // If the view has changed meanwhile, the message has ended.
        if let (false, Some(sent)) = (is_sent, messages.sent.get_mut(&id)) {
            if let Some(taken) = messages.buffered.get_mut(&to) {
                *taken -= std::mem::take(&mut sent.buffered);
            }
            messages.outgoing.push_front(Outgoing::Message { to, tag, id, range });
        }
        if !messages.outgoing.is_empty() {
            self.inbox.outgoing.notify_all();
        }
    }

    /// Returns whether the message was sent, or begun.
    fn try_send_small(&self, to: usize, tag: u32, id: u64, range: HostRange) -> bool {
        let bytes = range.length() + ENTRY_BYTES;
        let mut state = self.inbox.state.lock();
        let State { progress, messages, .. } = &mut *state;
        let link = progress.view.member(to).and_then(|member| self.mesh.open_link(member));
        let (Some(link), Some(sent)) = (link, messages.sent.get_mut(&id)) else { return false };
        let taken = messages.buffered.entry(to).or_default();
        if *taken + bytes > BUFFERED_BYTES_MAX {
            return false;
        }
        *taken += bytes;
        sent.buffered = bytes;
        drop(state);
        let header = self.header_of(Kind::Message, (id, tag), range.length());
        let progress = link.try_send(&header, range.bytes()).unwrap_or(Progress::Nothing);
        if progress == Progress::Begun {
            self.inbox.state.lock().messages.outgoing.push_front(Outgoing::Rest(link));
        }
        if progress != Progress::Nothing {
            self.metrics.add_sent(range.length());
        }
        progress != Progress::Nothing
    }

    pub(crate) fn header_of(
        &self,
        kind: Kind,
        (sequence, step): (u64, u32),
        length: usize,
    ) -> Header {
        Header {
            kind,
            group: self.id,
            attempt: 0,
            sequence,
            step,
            source: slot_number(self.slot),
            length: length as u64,
            call: Call::NONE,
        }
    }

    /// Sends a message while its receiver has room for it; else lends it, or announces it.
    fn write_message(&self, to: usize, tag: u32, id: u64, range: HostRange) {
        let mut state = self.inbox.state.lock();
        let State { progress, messages, .. } = &mut *state;
        let Some(member) = progress.view.member(to) else { return };
        let may_lend = self.mesh.may_lend(member);
        let is_large = range.length() >= LENT_MESSAGE_BYTES_MIN;
        let Messages { sent, buffered, .. } = messages;
        let Some(sent) = sent.get_mut(&id) else { return };
        let taken = buffered.entry(to).or_default();
        let bytes = range.length().saturating_add(ENTRY_BYTES);
        let has_room = taken.saturating_add(bytes) <= BUFFERED_BYTES_MAX;
        let loan = (may_lend && (is_large || !has_room)).then(|| sent.cell.lend(range.bytes()));
        let completion = sent.completion.clone();
        if loan.is_none() && has_room {
            sent.buffered = bytes;
            *taken += bytes;
        }
        drop(state);
        match loan {
            Some(loan) => {
                self.metrics.add_sent(range.length());
                self.write_frame(Kind::MessageLoan, to, (id, tag), &loan.encode());
            }
            None if has_room => {
                self.metrics.add_sent(range.length());
                self.write_frame(Kind::Message, to, (id, tag), range.bytes());
            }
            None => {
                // Its receiver waits for the answer to its request.
                completion.attend(self);
                let length = range.length() as u64;
                self.write_frame(Kind::Offer, to, (id, tag), &length.to_le_bytes());
            }
        }
    }

    fn write_frame(&self, kind: Kind, to: usize, (sequence, step): (u64, u32), bytes: &[u8]) {
        let member = self.inbox.state.lock().progress.view.member(to).cloned();
        let Some(member) = member else { return };
        let is_over = || {
            let state = self.inbox.state.lock();
            state.closed.is_some() || !state.progress.view.is_member(to)
        };
        let Some(link) = self.mesh.link(&member, is_over) else { return };
        let header = self.header_of(kind, (sequence, step), bytes.len());
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
        self.write_frame(Kind::Taken, arrived.source, (arrived.id, 0), &[]);
        receive.completion.complete(outcome);
    }
}
