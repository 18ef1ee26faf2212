//! The thread of a group that writes its messages, and reads those whose memory is lent.

use mooncake_base::Error;

use crate::{
    completion::Outcome,
    group::{Core, RECHECK, slot_number},
    inbox::{Arrived, Outgoing, Part, Receive},
    memory::HostRange,
    mesh::{Header, Kind},
};

/// From this size on, a message is lent, not sent: the receiver's thread must wake up to read it.
const LENT_MESSAGE_BYTES_MIN: usize = 256 << 10;

impl Core {
    /// Writes messages and their acknowledgements, one after the other, until the group is closed.
    pub(crate) fn write_messages(&self) {
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
            drop(state);
            match outgoing {
                Outgoing::Message { to, tag, id, range } => self.write_message(to, tag, id, range),
                Outgoing::Taken { to, id } => {
                    self.write_frame(Kind::Taken, to, (id, 0), HostRange::EMPTY.bytes());
                }
                Outgoing::Fetch { receive, arrived } => self.fetch(receive, &arrived),
            }
        }
    }

    fn write_message(&self, to: usize, tag: u32, id: u64, range: HostRange) {
        let state = self.inbox.state.lock();
        let Some(member) = state.view.member(to) else { return };
        let may_lend = range.length() >= LENT_MESSAGE_BYTES_MIN && self.mesh.may_lend(member);
        let sent = state.messages.sent.get(&id).filter(|_| may_lend);
        let loan = sent.map(|sent| sent.cell.lend(range.bytes()));
        drop(state);
        self.metrics.add_sent(range.length());
        match loan {
            Some(loan) => self.write_frame(Kind::MessageLoan, to, (id, tag), &loan.encode()),
            None => self.write_frame(Kind::Message, to, (id, tag), range.bytes()),
        }
    }

    fn write_frame(&self, kind: Kind, to: usize, (sequence, step): (u64, u32), bytes: &[u8]) {
        let member = self.inbox.state.lock().view.member(to).cloned();
        let Some(member) = member else { return };
        let is_over = || {
            let state = self.inbox.state.lock();
            state.closed.is_some() || !state.view.is_member(to)
        };
        let Some(link) = self.mesh.link(&member, is_over) else { return };
        let header = Header {
            kind,
            group: self.id,
            attempt: 0,
            sequence,
            step,
            source: slot_number(self.slot),
            length: bytes.len() as u64,
        };
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
