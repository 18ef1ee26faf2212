//! The network: messages on their way, and connections between members.

use std::collections::{BTreeMap, VecDeque};

use mooncake_base::Moment;
use mooncake_election::{
    Change, Hold, Lease, Snapshot,
    rules::{Answer, Call as ElectionCall, Request},
};
use mooncake_proto::standby::{FromLeader, FromStandby};

use super::{
    Simulation, TICK,
    client::{Call, Reply},
};

/// A message to a member, the service or a client.
#[derive(Debug, Clone)]
pub(super) enum Message {
    /// From a process to the service.
    ToService { from: usize, boot: u64, call: ServiceCall },
    /// From the service to a process.
    FromService { to: usize, boot: u64, answer: ServiceAnswer },
    /// From a standby to its leader.
    ToLeader { connection: u64, message: FromStandby },
    /// From a leader to its standby.
    ToStandby { connection: u64, message: FromLeader },
    /// A connection between members breaks.
    Broken { connection: u64 },
    /// From a client to the member that it takes for the leader.
    Call { client: usize, to: usize, boot: u64, number: u64, call: Call },
    /// To a client, with the view of the answer.
    Reply { client: usize, number: u64, view: u64, reply: Reply },
}

/// A call of a process to the lease service.
#[derive(Debug, Clone)]
pub(super) enum ServiceCall {
    Election(ElectionCall),
    Change(Change),
    Announce(Lease, String),
    /// Asks for the outcome of a change.
    Read,
}

/// An answer of the lease service.
#[derive(Debug, Clone)]
pub(super) enum ServiceAnswer {
    Election(u64, Answer),
    Changed(Change, Hold),
    Announced(Lease, Hold),
    Read(Snapshot),
    /// A watch tells.
    Watched(Snapshot),
}

/// The messages on their way, by the moment of their arrival.
#[derive(Debug, Default)]
pub(super) struct Wire {
    messages: BTreeMap<(Moment, u64), Message>,
    sent: u64,
    pub(super) connections: BTreeMap<u64, Connection>,
}

/// A connection of a standby. Messages keep their order.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) standby: usize,
    pub(super) leader: usize,
    /// When the last message in either direction arrives.
    last: [Moment; 2],
}

impl Wire {
    fn push(&mut self, at: Moment, message: Message) {
        self.sent += 1;
        self.messages.insert((at, self.sent), message);
    }

    fn pop(&mut self, now: Moment) -> Option<Message> {
        let first = self.messages.first_entry()?;
        first.key().0.has_passed(now).then(|| first.remove())
    }

    /// Returns whether a call has not arrived yet.
    pub(super) fn carries_call(&self, caller: usize, awaited: u64) -> bool {
        self.messages.values().any(|message| is_call(message, caller, awaited))
    }
}

/// Returns whether a message is a certain call.
pub(super) fn is_call(message: &Message, caller: usize, awaited: u64) -> bool {
    matches!(message, Message::Call { client, number, .. } if (*client, *number) == (caller, awaited))
}

impl Simulation {
    /// Opens a connection of a standby to a leader.
    pub(super) fn connect(&mut self, standby: usize, leader: usize) -> u64 {
        self.wire.sent += 1;
        let number = self.wire.sent;
        let last = [self.now; 2];
        self.wire.connections.insert(number, Connection { standby, leader, last });
        number
    }

    /// Closes a connection from the side of the leader: what was sent before still arrives.
    pub(super) fn close_connection(&mut self, connection: u64) {
        let at = self.in_order(connection, 1, self.now + TICK);
        self.wire.push(at, Message::Broken { connection });
    }

    /// Sends a message, which may be late or lost.
    pub(super) fn send(&mut self, message: Message) {
        let (late, lost) = (self.plan.faults.late, self.plan.faults.lost);
        let is_late = late > 0 && self.chance(late);
        let is_lost = lost > 0 && self.chance(lost);
        let at = self.now + self.milliseconds(if is_late { 400 } else { 30 });
        let at = match &message {
            Message::ToLeader { connection, .. } => self.in_order(*connection, 0, at),
            Message::ToStandby { connection, .. } => self.in_order(*connection, 1, at),
            Message::Broken { .. } => at,
            Message::ToService { from: node, .. } | Message::FromService { to: node, .. } => {
                let is_cut = !self.nodes[*node].service_cut_until.has_passed(self.now)
                    || !self.service_away_until.has_passed(self.now);
                if is_lost || is_cut {
                    return;
                }
                // A call that was given up may still be carried out.
                if is_late { at + self.milliseconds(2000) } else { at }
            }
            Message::Call { .. } | Message::Reply { .. } => {
                if is_lost {
                    return;
                }
                at
            }
        };
        if let Message::ToService { from, boot, call: ServiceCall::Change(change) } = &message
            && late > 0
            && self.chance(late)
        {
            // Sent twice, by whatever lies between.
            let call = ServiceCall::Change(change.clone());
            let again = Message::ToService { from: *from, boot: *boot, call };
            let later = at + self.milliseconds(1000);
            self.wire.push(later, again);
        }
        let damaged = self.plan.faults.damaged;
        let message =
            if damaged > 0 && self.chance(damaged) { self.damage(message) } else { message };
        self.wire.push(at, message);
    }

    /// Returns when the next message of a connection arrives: not before the earlier ones, and not
    /// while a partition holds it up.
    fn in_order(&mut self, number: u64, direction: usize, at: Moment) -> Moment {
        let Some(connection) = self.wire.connections.get_mut(&number) else { return at };
        let held = self.nodes[connection.standby].cut_until[connection.leader];
        let at = at.max(connection.last[direction]).max(held);
        connection.last[direction] = at;
        at
    }

    /// Hands over everything that has arrived.
    pub(super) fn deliver(&mut self) {
        while let Some(message) = self.wire.pop(self.now) {
            match message {
                Message::ToService { from, boot, call } => self.serve_election(from, boot, call),
                Message::FromService { to, boot, .. } => {
                    if self.nodes[to].boots == boot {
                        self.nodes[to].accept(message);
                    }
                }
                Message::ToLeader { connection, .. } => {
                    if let Some(found) = self.wire.connections.get(&connection) {
                        self.nodes[found.leader].accept(message);
                    }
                }
                Message::ToStandby { connection, .. } => {
                    if let Some(found) = self.wire.connections.get(&connection) {
                        self.nodes[found.standby].accept(message);
                    }
                }
                Message::Broken { connection } => drop(self.wire.connections.remove(&connection)),
                Message::Call { to, boot, .. } => {
                    if self.nodes[to].boots == boot {
                        self.nodes[to].accept(message);
                    }
                }
                Message::Reply { client, number, view, reply } => {
                    self.clients[client].inbox.push_back((number, view, reply));
                }
            }
        }
    }

    fn serve_election(&mut self, from: usize, boot: u64, call: ServiceCall) {
        let now = self.now;
        let before = self.service.snapshot(now);
        let answer = match call {
            ServiceCall::Election(call) => {
                let answer = match &call.request {
                    Request::Read => Answer::Snapshot(self.read_service(from)),
                    request => self.service.carry_out(request, now),
                };
                ServiceAnswer::Election(call.number, answer)
            }
            ServiceCall::Change(change) => {
                let hold = self.service.change(&change, now);
                self.outcome.set_changes += u64::from(hold == Hold::Held);
                ServiceAnswer::Changed(change, hold)
            }
            ServiceCall::Announce(lease, address) => {
                let hold = self.service.announce(&lease, &address, now);
                ServiceAnswer::Announced(lease, hold)
            }
            ServiceCall::Read => ServiceAnswer::Read(self.read_service(from)),
        };
        self.send(Message::FromService { to: from, boot, answer });
        if self.service.snapshot(now) != before {
            self.record_set();
            for to in 0..self.nodes.len() {
                self.tell(to);
            }
        }
    }

    /// Tells a process what the service holds, as a watch does.
    pub(super) fn tell(&mut self, to: usize) {
        let answer = ServiceAnswer::Watched(self.read_service(to));
        let boot = self.nodes[to].boots;
        self.send(Message::FromService { to, boot, answer });
    }
}

/// The messages that a process has not read yet.
pub(super) type Inbox = VecDeque<Message>;
