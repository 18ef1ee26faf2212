//! A call that is repeated as the store client decides, and the check that the master executes a
//! numbered call once.

use std::{collections::HashMap, ops::Range, time::Duration};

use mooncake_base::ClientId;
use mooncake_store_client::protocol::{AttemptFailure, CallKind, CallRetry, RetryPatience};

use crate::{
    actor::client::Input,
    audit::allocation_model::Change,
    audit::history::History,
    call::{Call, CallNumber, CallRequest, Reply, ReplyMessage},
    plan::Bug,
    simulator::Simulator,
};

/// The time limit of a call with its repetitions.
const TIME_LIMIT: Duration = Duration::from_secs(6);

/// A call in progress.
#[derive(Debug)]
pub(crate) struct RepeatedCall {
    request: Box<CallRequest>,
    retry: CallRetry,
}

/// The progress of a call after an input of its operation.
#[derive(Debug)]
pub(crate) enum Progress {
    /// The call waits for its reply, or for its next repetition.
    Waiting,
    Answered(ReplyMessage),
    GivenUp,
}

impl RepeatedCall {
    /// Sends a call for the first time.
    pub(crate) fn send(simulator: &mut Simulator, caller: (u64, u64), call: Call) -> Self {
        let kind = match call {
            Call::PutEnd { .. } | Call::PutRevoke { .. } => CallKind::ClosesPut,
            _ => CallKind::Repeatable,
        };
        let retry = CallRetry::new(
            kind,
            simulator.clock(caller.0) + TIME_LIMIT,
            RetryPatience { time: Duration::from_secs(2), awaits_connection: true },
            simulator.random.next(),
        );
        let request = simulator.request(caller.0, call);
        simulator.send_request(caller, request.clone());
        Self { request: Box::new(request), retry }
    }

    /// Handles an input of the operation that waits for this call.
    pub(crate) fn step(
        &mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        input: Input,
    ) -> Progress {
        match input {
            Input::Reply(message) => {
                self.end(simulator, caller);
                Progress::Answered(message)
            }
            Input::TimedOut => {
                let now = simulator.clock(caller.0);
                let pause = self.retry.after_failure(AttemptFailure::Broken, now);
                let Some(pause) = pause else {
                    self.end(simulator, caller);
                    return Progress::GivenUp;
                };
                simulator.input_after(pause, caller, Input::Again);
                Progress::Waiting
            }
            Input::Again => {
                if let Call::PutEnd { has_keys, .. } = &mut self.request.call {
                    *has_keys = true;
                }
                simulator.send_request(caller, (*self.request).clone());
                Progress::Waiting
            }
            Input::Begin
            | Input::Wrote { .. }
            | Input::Silent { .. }
            | Input::Read(_)
            | Input::Loaded(_) => Progress::Waiting,
        }
    }

    /// Ends a numbered call: it was answered or given up.
    fn end(&self, simulator: &mut Simulator, caller: (u64, u64)) {
        if let Some(process) = simulator.processes.get_mut(&caller.0) {
            process.call_numbers.end(self.request.number.number);
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
    ) -> Result<Option<Self>, String> {
        let Some(sent) = &mut self.sent else {
            self.sent = Some(RepeatedCall::send(simulator, caller, self.call.clone()));
            return Ok(Some(self));
        };
        match sent.step(simulator, caller, input) {
            Progress::Waiting => Ok(Some(self)),
            Progress::Answered(message) => {
                simulator.request_answered(caller.0, &self.call, message)?;
                Ok(None)
            }
            Progress::GivenUp => Ok(None),
        }
    }
}

impl Simulator {
    /// Makes a request of a process, with a number if the call needs one.
    pub(crate) fn request(&mut self, process: u64, call: Call) -> CallRequest {
        let is_report = matches!(call, Call::MountDisk { .. } | Call::ReportRecords(_));
        let is_unnumbered = self.plan.has(Bug::RepeatsUnnumberedCalls)
            || is_report && self.plan.has(Bug::ReportsUnnumbered);
        let is_numbered = call.is_numbered() && !is_unnumbered;
        let mut request =
            CallRequest { call, number: CallNumber::default(), sequence: 0, released: Vec::new() };
        let Some(process) = self.processes.get_mut(&process) else { return request };
        if is_numbered {
            let (number, answered_below) = process.call_numbers.begin();
            request.number = CallNumber { number, answered_below };
        }
        if request.call.is_about_segments() {
            request.sequence = process.session.next_announcement();
        }
        let now = self.now + process.clock_ahead;
        request.released = process.fence_releases.take(now).collect();
        request
    }

    fn request_answered(
        &mut self,
        process: u64,
        call: &Call,
        message: ReplyMessage,
    ) -> Result<(), String> {
        match message.reply {
            Reply::Done if call.is_removal() => {
                self.outcome.removals += 1;
                self.history.acknowledge(self.now, message.entries);
            }
            Reply::Done => self.outcome.views += u64::from(!call.is_about_tasks()),
            Reply::Viewed(viewed) => {
                self.outcome.views += 1;
                self.outcome.views_in_sweep += u64::from(viewed.gone > 0);
                let may_lack_tags = self.plan.adopts_records();
                return self.history.check_view(&viewed, may_lack_tags);
            }
            Reply::Task(_) => self.outcome.tasks += 1,
            Reply::Job(_) => self.outcome.drains += 1,
            Reply::Failed(code) => self.handle_refusal(process, code),
            _ => {}
        }
        Ok(())
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

    pub(crate) fn forget(&mut self, client: ClientId) {
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
