//! Messages of `send` and `recv` in one group: those that wait here, and what has to be written.

use std::{collections::VecDeque, sync::Arc};

use mooncake_base::Error;
use rustc_hash::FxHashMap;

use super::{Ended, part::Part};
use crate::{
    completion::Completion, link::Link, memory::HostRange, outcome::Outcome,
    peer_memory::LoanToken, progress::Progress,
};

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
    pub(super) tag: u32,
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

impl Messages {
    /// Takes in a receive: it gets the first message that fits, or waits. Returns the sender and the
    /// number of a message that was taken.
    pub(crate) fn add_receive(
        &mut self,
        receive: Receive,
        ended: &mut Ended,
    ) -> Option<(usize, u64)> {
        let found = self.arrived.iter().position(|arrived| receive.fits(arrived));
        let Some(arrived) = found.and_then(|index| self.arrived.remove(index)) else {
            self.receives.push(receive);
            return None;
        };
        let source = arrived.source;
        self.hand_over(receive, arrived, ended).map(|id| (source, id))
    }

    /// Takes in a message: the first receive that fits gets it, or it waits. Returns the number of a
    /// message that was taken.
    pub(super) fn add_arrived(&mut self, arrived: Arrived, ended: &mut Ended) -> Option<u64> {
        match self.receives.iter().position(|receive| receive.fits(&arrived)) {
            Some(index) => {
                let receive = self.receives.remove(index);
                self.hand_over(receive, arrived, ended)
            }
            None => {
                self.arrived.push_back(arrived);
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
                self.outgoing.push_back(Outgoing::Fetch { receive, arrived });
                return None;
            }
            Part::Offered(_) => {
                self.outgoing.push_back(Outgoing::Request { to, id });
                self.requested.insert((to, id), receive);
                return None;
            }
        }
        ended.push((receive.completion, outcome));
        Some(id)
    }

    /// Returns how many bytes of messages wait here for a receive.
    pub(crate) fn buffered_bytes(&self) -> u64 {
        let buffered = self.arrived.iter().map(|arrived| match &arrived.payload {
            Part::Bytes(bytes) => bytes.len() as u64,
            Part::Lent { .. } | Part::Remote { .. } | Part::Offered(_) => 0,
        });
        buffered.sum()
    }

    /// Hands the bytes of a message to the receive that requested them, and returns its number.
    pub(super) fn take_requested(
        &mut self,
        source: usize,
        id: u64,
        payload: &Part,
        ended: &mut Ended,
    ) -> Option<u64> {
        let Part::Bytes(bytes) = payload else { return None };
        let receive = self.requested.remove(&(source, id))?;
        receive.range.write(bytes);
        ended.push((receive.completion, Outcome { source: Some(source), ..Outcome::default() }));
        Some(id)
    }

    /// Ends sends to, and receives from, slots that are not in the view.
    pub(super) fn fail_lost(&mut self, progress: &Progress, ended: &mut Ended) {
        let Progress { view, slot, .. } = progress;
        let slot = *slot;
        self.arrived.retain(|arrived| view.is_member(arrived.source));
        let lost = |slot: usize| Outcome { failed_slots: vec![slot], ..Outcome::default() };
        self.outgoing.retain(|outgoing| match outgoing {
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
        self.receives.retain(|receive| {
            let is_lost = receive.source.map_or(!others, |source| !view.is_member(source));
            if is_lost {
                ended.push((receive.completion.clone(), lost(receive.source.unwrap_or(slot))));
            }
            !is_lost
        });
        self.buffered.retain(|to, _| view.is_member(*to));
        self.requested.retain(|(source, _), receive| {
            let is_member = view.is_member(*source);
            if !is_member {
                ended.push((receive.completion.clone(), lost(*source)));
            }
            is_member
        });
        self.sent.retain(|_, sent| {
            let is_member = view.is_member(sent.to);
            if !is_member {
                sent.loan_token.end();
                ended.push((sent.completion.clone(), lost(sent.to)));
            }
            is_member
        });
    }

    /// Ends all sends and receives with an error: the group is closed.
    pub(super) fn fail_all(self, error: &Error, ended: &mut Ended) {
        let failed = || Outcome { error: Some(error.clone()), ..Outcome::default() };
        ended.extend(self.receives.into_iter().map(|it| (it.completion, failed())));
        ended.extend(self.requested.into_values().map(|it| (it.completion, failed())));
        for sent in self.sent.into_values() {
            sent.loan_token.end();
            ended.push((sent.completion, failed()));
        }
        for outgoing in self.outgoing {
            if let Outgoing::Fetch { receive, .. } = outgoing {
                ended.push((receive.completion, failed()));
            }
        }
    }
}

impl Receive {
    fn fits(&self, arrived: &Arrived) -> bool {
        arrived.tag == self.tag && self.source.is_none_or(|source| source == arrived.source)
    }
}
