//! The connections of a client to the master: calls that are not answered hold one each, and further
//! calls wait for one, in no order.

use std::collections::BTreeSet;

use crate::{
    call::{CallMessage, CallRequest},
    fault::network,
    simulator::{Event, Simulator},
};

/// The connections of one process.
#[derive(Debug)]
pub(crate) struct Connections {
    limit: usize,
    /// The attempts that hold a connection.
    busy: BTreeSet<u64>,
    waiting: Vec<CallMessage>,
}

impl Connections {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, busy: BTreeSet::new(), waiting: Vec::new() }
    }
}

impl Simulator {
    /// Sends a request with a timeout, as soon as a connection is free.
    pub(crate) fn send_request(&mut self, caller: (u64, u64), request: CallRequest) {
        let attempt = self.next_number();
        let Some(process) = self.processes.get_mut(&caller.0) else { return };
        if let Some(running) = process.running.get_mut(&caller.1) {
            running.attempt = attempt;
        }
        self.after(self.plan.call_timeout, Event::Reply { caller, attempt, message: None });
        let has_own = request.call.is_about_session() && self.plan.has_heartbeat_connection();
        let message = CallMessage { caller, attempt, request };
        let Some(process) = self.processes.get_mut(&caller.0) else { return };
        let connections = &mut process.connections;
        if has_own {
            self.transmit(message);
        } else if connections.busy.len() < connections.limit {
            connections.busy.insert(attempt);
            self.transmit(message);
        } else {
            connections.waiting.push(message);
            self.outcome.starved += 1;
        }
    }

    /// Frees the connection of an attempt that was answered or given up, for a call that waits.
    pub(crate) fn release_connection(&mut self, process: u64, attempt: u64) {
        let Some(found) = self.processes.get_mut(&process) else { return };
        let connections = &mut found.connections;
        connections.waiting.retain(|message| message.attempt != attempt);
        if !connections.busy.remove(&attempt) || connections.waiting.is_empty() {
            return;
        }
        let next = self.random.below(connections.waiting.len() as u64);
        let message = connections.waiting.swap_remove(next as usize);
        connections.busy.insert(message.attempt);
        self.transmit(message);
    }

    fn transmit(&mut self, message: CallMessage) {
        let process = message.caller.0;
        let is_about_session = message.request.call.is_about_session();
        let partitioned_until = self.processes.get(&process).map(|it| it.partitioned_until);
        if partitioned_until.is_none_or(|until| !until.has_passed(self.now)) {
            return;
        }
        let delays = network::deliveries(&mut self.random, &self.plan.faults);
        if is_about_session {
            self.impair_by(process, &delays);
        }
        for delay in delays {
            self.after(delay, Event::Call(message.clone()));
        }
    }
}
