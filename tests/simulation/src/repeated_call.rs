//! A call that is repeated as the store client decides, and the check that the master executes a
//! numbered call once.

use std::{collections::HashMap, ops::Range, time::Duration};

use mooncake_base::ClientId;
use mooncake_master::state::Begun;
use mooncake_store_client::protocol::{AttemptFailure, CallKind, CallRetry};

use crate::{
    allocation_model::Change,
    call::{Call, CallMessage, CallNumber, Reply, ReplyMessage},
    client::{Input, Process},
    history::History,
    plan::Bug,
    simulator::Simulator,
};

/// The time limit of a call with its repetitions.
const TIME_LIMIT: Duration = Duration::from_secs(6);

/// A call in progress.
#[derive(Debug)]
pub(crate) struct RepeatedCall {
    call: Call,
    number: CallNumber,
    retry: CallRetry,
}

impl RepeatedCall {
    /// Sends a call for the first time.
    pub(crate) fn send(simulator: &mut Simulator, caller: (u64, u64), call: Call) -> Self {
        let kind = match call {
            Call::PutEnd { .. } | Call::PutRevoke { .. } => CallKind::ClosesPut,
            _ => CallKind::Repeatable,
        };
        let number = match simulator.processes.get_mut(&caller.0) {
            Some(process)
                if call.is_numbered() && !simulator.plan.has(Bug::RepeatsUnnumberedCalls) =>
            {
                let (number, answered_below) = process.call_numbers.begin();
                CallNumber { number, answered_below }
            }
            _ => CallNumber::default(),
        };
        let retry = CallRetry::new(kind, simulator.now + TIME_LIMIT, simulator.random.next());
        simulator.call_numbered(caller, call.clone(), number);
        Self { call, number, retry }
    }

    /// Decides after an attempt without a reply. Returns whether the call is repeated; then the
    /// operation gets the input [`Input::Again`]. If not, the call has ended.
    pub(crate) fn fail(&mut self, simulator: &mut Simulator, caller: (u64, u64)) -> bool {
        let Some(pause) = self.retry.after_failure(AttemptFailure::Broken, simulator.now) else {
            self.end(simulator, caller);
            return false;
        };
        simulator.input_after(pause, caller, Input::Again);
        true
    }

    /// Sends the call again. The end of a put then names its key.
    pub(crate) fn send_again(&mut self, simulator: &mut Simulator, caller: (u64, u64), key: u64) {
        if let Call::PutEnd { key: named, .. } = &mut self.call {
            *named = Some(key);
        }
        simulator.call_numbered(caller, self.call.clone(), self.number);
    }

    /// Ends a numbered call: it was answered or given up.
    pub(crate) fn end(&self, simulator: &mut Simulator, caller: (u64, u64)) {
        if let Some(process) = simulator.processes.get_mut(&caller.0) {
            process.call_numbers.end(self.number.number);
        }
    }
}

/// An operation of one call: a removal, or a request for a copy, a move or a drain.
#[derive(Debug)]
pub(crate) struct Request {
    call: Call,
    sent: Option<RepeatedCall>,
}

impl Request {
    pub(crate) fn new(call: Call) -> Self {
        Self { call, sent: None }
    }

    pub(crate) fn step(
        mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        input: Input,
    ) -> Option<Self> {
        match (&mut self.sent, input) {
            (None, Input::Begin) => {
                self.sent = Some(RepeatedCall::send(simulator, caller, self.call.clone()));
            }
            (Some(sent), Input::TimedOut) => return sent.fail(simulator, caller).then_some(self),
            (Some(sent), Input::Again) => sent.send_again(simulator, caller, 0),
            (Some(sent), Input::Reply(message)) => {
                sent.end(simulator, caller);
                simulator.request_answered(caller.0, message);
                return None;
            }
            _ => return None,
        }
        Some(self)
    }
}

impl Simulator {
    fn request_answered(&mut self, process: u64, message: ReplyMessage) {
        match message.reply {
            Reply::Done => {
                self.outcome.removals += 1;
                self.history.acknowledge(self.now, message.entries);
            }
            Reply::Task(_) => self.outcome.tasks += 1,
            Reply::Job(_) => self.outcome.drains += 1,
            Reply::Failed(code) => self.handle_refusal(process, code),
            _ => {}
        }
    }

    /// Executes a call, or gives the answer to its first execution.
    pub(crate) fn serve_once(&mut self, message: &CallMessage) -> Result<(), String> {
        let (caller, attempt) = (message.caller, message.attempt);
        let client = Process::new(caller.0).client;
        let CallNumber { number, answered_below } = message.number;
        if number == 0 {
            return self.execute(message).map(drop);
        }
        match self.host.answers.begin(client, number, answered_below) {
            Begun::Execute => {}
            Begun::Repeated(answer) => {
                self.outcome.repetitions += 1;
                self.send_reply(caller, attempt, answer);
                return Ok(());
            }
            // Its client does not wait for a reply.
            Begun::GivenUp => return Ok(()),
            Begun::Running => return Err("a call runs while another is served".to_owned()),
        }
        let Some(answer) = self.execute(message)? else { return Ok(()) };
        match message.call.is_answered_by(&answer.reply) {
            true => self.host.answers.finish(client, number, answer, size_of::<ReplyMessage>()),
            false => self.host.answers.abort(client, number),
        }
        Ok(())
    }

    /// Forgets the calls of clients that expired, as the master does.
    pub(crate) fn forget_expired(&mut self) {
        let expired = self.host.state().map(|state| state.take_expired()).unwrap_or_default();
        for client in expired {
            self.host.answers.forget(client);
            self.executed.forget(client);
        }
    }
}

/// What the operations of clients have made the running master do. Each of them makes one call.
#[derive(Debug, Default)]
pub(crate) struct ExecutedCalls {
    /// The version that a removal has removed, by client, operation and key.
    removed: HashMap<(ClientId, u64), HashMap<Vec<u8>, u64>>,
}

impl ExecutedCalls {
    /// Forgets all removals, because the master has forgotten its answers.
    pub(crate) fn restart(&mut self) {
        self.removed.clear();
    }

    fn forget(&mut self, client: ClientId) {
        self.removed.retain(|(other, _), _| *other != client);
    }

    /// Checks the changes that one execution of a removal has made.
    ///
    /// # Errors
    /// An earlier execution of the same call has removed another version of a key.
    pub(crate) fn check_removal(
        &mut self,
        history: &History,
        operation: (ClientId, u64),
        entries: Range<usize>,
    ) -> Result<(), String> {
        for (key, change) in history.changes(entries) {
            let Change::Gone(version) = change else { continue };
            let removed = self.removed.entry(operation).or_default();
            if let Some(earlier) = removed.insert(key.to_vec(), version) {
                return Err(format!(
                    "one removal was executed twice: it removed version {earlier} of {} and then \
                     version {version}, which was put in between",
                    String::from_utf8_lossy(key)
                ));
            }
        }
        Ok(())
    }
}
