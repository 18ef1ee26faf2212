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
    /// What the group's threads for messages have to write.
    pub(crate) outgoing: VecDeque<Outgoing>,
    /// What is on its way to a socket: nothing later for the same peer must overtake it.
    writing: Vec<Writing>,
    /// How many threads for messages do not wait for a peer.
    pub(crate) free_writers: usize,
}

/// A peer to which something goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    Slot(usize),
    /// A rank, for frames of any group.
    Rank(u32),
}

/// Something on its way to a socket.
#[derive(Debug)]
struct Writing {
    target: Target,
    /// The message whose memory is read meanwhile.
    id: Option<u64>,
    /// The end of that message, once it is known: announced when its memory is not read any more.
    end: Option<(Completion, Outcome)>,
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
    /// Grows in the order of calls.
    pub(crate) number: u64,
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
    /// Whether the bytes of an offer are on their way: the receive that requested them was given up.
    pub(super) is_requested: bool,
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
    /// The sender has given up a message.
    Withdrawn {
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

impl Outgoing {
    pub(crate) fn target(&self) -> Target {
        match self {
            Self::Message { to, .. }
            | Self::Requested { to, .. }
            | Self::Request { to, .. }
            | Self::Taken { to, .. }
            | Self::Withdrawn { to, .. } => Target::Slot(*to),
            Self::Fetch { arrived, .. } => Target::Slot(arrived.source),
            Self::Rest(link) => Target::Rank(link.rank),
        }
    }

    /// Returns the number of the message of this process whose memory is read.
    fn message(&self) -> Option<u64> {
        match self {
            Self::Message { id, .. } | Self::Requested { id, .. } => Some(*id),
            _ => None,
        }
    }
}

impl Messages {
    /// Notes that something is on its way to a peer; returns `false` if something else is already.
    pub(crate) fn begin_writing(&mut self, target: Target, id: Option<u64>) -> bool {
        let is_free = self.writing.iter().all(|writing| writing.target != target);
        if is_free {
            self.writing.push(Writing { target, id, end: None });
        }
        is_free
    }

    /// Notes that what was on its way to a peer has been written, or given up.
    pub(crate) fn end_writing(&mut self, target: Target, ended: &mut Ended) {
        let place = self.writing.iter().position(|writing| writing.target == target);
        ended.extend(place.and_then(|place| self.writing.swap_remove(place).end));
    }

    /// Begins to write to a peer at once, if nothing else must be written to it before.
    pub(crate) fn begin_writing_now(&mut self, target: Target) -> bool {
        self.outgoing.iter().all(|outgoing| outgoing.target() != target)
            && self.begin_writing(target, None)
    }

    /// Takes the first of what is to be written to a peer to which nothing is on its way.
    pub(crate) fn take_outgoing(&mut self) -> Option<Outgoing> {
        let writing = &self.writing;
        let is_free = |it: &Outgoing| writing.iter().all(|writing| writing.target != it.target());
        let place = self.outgoing.iter().position(is_free)?;
        let outgoing = self.outgoing.remove(place)?;
        self.begin_writing(outgoing.target(), outgoing.message());
        Some(outgoing)
    }

    /// Ends a send, at once or when its memory is not read any more.
    fn end_send(writing: &mut [Writing], id: u64, sent: Sent, outcome: Outcome, ended: &mut Ended) {
        sent.loan_token.end();
        match writing.iter_mut().find(|writing| writing.id == Some(id)) {
            Some(writing) => writing.end = Some((sent.completion, outcome)),
            None => ended.push((sent.completion, outcome)),
        }
    }

    /// Withdraws a message that its receiver has not taken. Returns its receiver and its number, if there was
    /// one, and whether the receiver may know of it.
    pub(crate) fn cancel_send(
        &mut self,
        completion: &Completion,
        ended: &mut Ended,
    ) -> Option<(usize, u64, bool)> {
        let mut all = self.sent.iter();
        let (id, _) = all.find(|(_, sent)| sent.completion.is_same(completion))?;
        let id = *id;
        let sent = self.sent.remove(&id)?;
        let to = sent.to;
        if let Some(buffered) = self.buffered.get_mut(&to) {
            *buffered -= sent.buffered;
        }
        let is_it = |it: &Outgoing| it.message() == Some(id);
        let mut queued = self.outgoing.iter().filter(|outgoing| is_it(outgoing));
        let is_known = !queued.any(|outgoing| matches!(outgoing, Outgoing::Message { .. }));
        self.outgoing.retain(|outgoing| !is_it(outgoing));
        let error = Some(Error::invalid("the message was withdrawn: it was not received in time"));
        let outcome = Outcome { error, ..Outcome::default() };
        Self::end_send(&mut self.writing, id, sent, outcome, ended);
        Some((to, id, is_known))
    }

    /// Drops a message that its sender has withdrawn; the receive that it was handed to waits again.
    pub(super) fn drop_withdrawn(&mut self, source: usize, id: u64, ended: &mut Ended) {
        self.arrived.retain(|arrived| arrived.source != source || arrived.id != id);
        let requested = self.requested.remove(&(source, id));
        let receive = requested.or_else(|| {
            let is_it = |it: &Arrived| it.source == source && it.id == id;
            self.take_fetch(|_, arrived| is_it(arrived)).map(|(receive, _)| receive)
        });
        if let Some(receive) = receive {
            self.return_receive(receive, ended);
        }
    }

    /// Lets a receive wait again in its place, or gives it another message.
    pub(crate) fn return_receive(&mut self, receive: Receive, ended: &mut Ended) {
        if let Some((to, id)) = self.add_receive(receive, ended) {
            self.outgoing.push_back(Outgoing::Taken { to, id });
        }
    }

    /// Takes back what would have read a message from the memory of its sender.
    fn take_fetch(
        &mut self,
        is_it: impl Fn(&Receive, &Arrived) -> bool,
    ) -> Option<(Receive, Arrived)> {
        let place = self.outgoing.iter().position(|outgoing| {
            matches!(outgoing, Outgoing::Fetch { receive, arrived } if is_it(receive, arrived))
        })?;
        match self.outgoing.remove(place)? {
            Outgoing::Fetch { receive, arrived } => Some((receive, arrived)),
            _ => None,
        }
    }

    /// Takes in a receive: it gets the first message that fits, or waits. Returns the sender and the
    /// number of a message that was taken.
    pub(crate) fn add_receive(
        &mut self,
        receive: Receive,
        ended: &mut Ended,
    ) -> Option<(usize, u64)> {
        let found = self.arrived.iter().position(|arrived| receive.fits(arrived));
        let Some(arrived) = found.and_then(|index| self.arrived.remove(index)) else {
            let place = self.receives.partition_point(|it| it.number < receive.number);
            self.receives.insert(place, receive);
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
                if !arrived.is_requested {
                    self.outgoing.push_back(Outgoing::Request { to, id });
                }
                self.requested.insert((to, id), receive);
                return None;
            }
        }
        ended.push((receive.completion, outcome));
        Some(id)
    }

    /// Takes back a receive into which no bytes are written. A message that it has got already, but not
    /// its bytes, waits for another receive.
    pub(crate) fn cancel_receive(&mut self, completion: &Completion) -> Option<Receive> {
        let is_it = |receive: &Receive| receive.completion.is_same(completion);
        if let Some(place) = self.receives.iter().position(is_it) {
            return Some(self.receives.remove(place));
        }
        let key = self.requested.iter().find(|(_, receive)| is_it(receive)).map(|(key, _)| *key);
        if let Some((source, id)) = key {
            let receive = self.requested.remove(&(source, id))?;
            let payload = Part::Offered(receive.range.length() as u64);
            let (tag, is_requested) = (receive.tag, true);
            self.return_arrived(Arrived { source, tag, id, payload, is_requested });
            return Some(receive);
        }
        let (receive, arrived) = self.take_fetch(|receive, _| is_it(receive))?;
        self.return_arrived(arrived);
        Some(receive)
    }

    /// Lets a message wait in its place among those of its sender.
    fn return_arrived(&mut self, arrived: Arrived) {
        let is_later = |it: &Arrived| it.source == arrived.source && it.id > arrived.id;
        let place = self.arrived.iter().position(is_later).unwrap_or(self.arrived.len());
        self.arrived.insert(place, arrived);
    }

    /// Returns how many bytes of messages wait here for a receive.
    pub(crate) fn buffered_bytes(&self) -> u64 {
        let buffered = self.arrived.iter().map(|arrived| match &arrived.payload {
            Part::Bytes(bytes) => bytes.len() as u64,
            Part::Lent { .. } | Part::Remote { .. } | Part::Offered(_) => 0,
        });
        buffered.sum()
    }

    /// Hands the bytes of a message to the receive that requested them, and returns its number. If that
    /// was given up, they wait for another.
    pub(super) fn take_requested(
        &mut self,
        source: usize,
        id: u64,
        payload: Part,
        ended: &mut Ended,
    ) -> Option<u64> {
        let Part::Bytes(bytes) = &payload else { return None };
        let Some(receive) = self.requested.remove(&(source, id)) else {
            let mut arrived = self.arrived.iter_mut();
            let waiting = arrived.find(|it| it.source == source && it.id == id && it.is_requested);
            waiting?.payload = payload;
            return None;
        };
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
            | Outgoing::Taken { to, .. }
            | Outgoing::Withdrawn { to, .. } => view.is_member(*to),
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
        let writing = &mut self.writing;
        for (id, sent) in self.sent.extract_if(|_, sent| !view.is_member(sent.to)) {
            let outcome = lost(sent.to);
            Self::end_send(writing, id, sent, outcome, ended);
        }
    }

    /// Ends all sends and receives with an error: the group is closed.
    pub(super) fn fail_all(&mut self, error: &Error, ended: &mut Ended) {
        let failed = || Outcome { error: Some(error.clone()), ..Outcome::default() };
        ended.extend(self.receives.drain(..).map(|it| (it.completion, failed())));
        ended.extend(self.requested.drain().map(|(_, it)| (it.completion, failed())));
        for (id, sent) in self.sent.drain() {
            Self::end_send(&mut self.writing, id, sent, failed(), ended);
        }
        self.arrived.clear();
        for outgoing in self.outgoing.drain(..) {
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
