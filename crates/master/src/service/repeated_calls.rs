//! Numbered calls: a repetition gets the response to the first execution, and waits for it while it
//! runs.

use std::time::Duration;

use mooncake_base::sync::Mutex;
use mooncake_base::{ClientId, Error, ErrorCode, Result};
use mooncake_proto::v1::{self, response};
use prost::Message;
use tokio::{
    sync::Notify,
    time::{Instant, timeout_at},
};

use super::durability::{self, Executed};
use crate::state::{Answers, Begun};

/// How long a repetition waits for the end of the first execution.
const WAIT_DEADLINE: Duration = Duration::from_secs(10);

/// The answers to numbered calls.
#[derive(Debug, Default)]
pub(super) struct RepeatedCalls {
    answers: Mutex<Answers<Executed>>,
    /// Notified when a call ends.
    ended: Notify,
}

impl RepeatedCalls {
    /// Executes a numbered call, or returns the response to its first execution.
    pub(super) fn execute_once(
        &self,
        request: v1::Request,
        execute: impl FnOnce(v1::Request) -> Executed,
    ) -> Executed {
        let number = request.call_number;
        let Some(client) = client_of(&request) else { return execute(request) };
        let begun = self.answers.lock().begin(client, number, request.answered_below);
        match begun {
            Begun::Execute => {
                let running = RunningCall { calls: self, client, number };
                let executed = execute(request);
                running.finish(&executed);
                executed
            }
            Begun::Repeated(answered) => answered,
            Begun::Running => refused(
                Error::new(ErrorCode::RPC_FAIL, "the first execution of the call has not ended")
                    .with("call_number", number),
            ),
            Begun::GivenUp => refused(
                Error::invalid("the client gave the call up; call again with a new number")
                    .with("call_number", number),
            ),
        }
    }

    /// Forgets the responses to clients that left or expired.
    pub(super) fn forget(&self, clients: &[ClientId]) {
        if clients.is_empty() {
            return;
        }
        let mut answers = self.answers.lock();
        clients.iter().for_each(|&client| answers.forget(client));
    }

    /// Waits while the first execution of a repeated call runs.
    ///
    /// Cancel-safe.
    ///
    /// # Errors
    /// `RPC_TIMEOUT`: the first execution takes too long.
    pub(super) async fn wait_for_first(&self, request: &v1::Request) -> Result<()> {
        if request.call_number == 0 {
            return Ok(());
        }
        let Some(client) = client_of(request) else { return Ok(()) };
        let is_running = || self.answers.lock().is_running(client, request.call_number);
        if !is_running() {
            return Ok(());
        }
        let deadline = Instant::now() + WAIT_DEADLINE;
        loop {
            let mut ended = std::pin::pin!(self.ended.notified());
            ended.as_mut().enable();
            if !is_running() {
                return Ok(());
            }
            if timeout_at(deadline, ended).await.is_err() {
                let text = "the first execution of the call takes too long; repeat it later";
                return Err(Error::new(ErrorCode::RPC_TIMEOUT, text)
                    .with("call_number", request.call_number));
            }
        }
    }
}

/// A call that is being executed. Dropped by a panic, it may be executed again.
struct RunningCall<'a> {
    calls: &'a RepeatedCalls,
    client: ClientId,
    number: u64,
}

impl RunningCall<'_> {
    fn finish(self, executed: &Executed) {
        let response = &executed.response;
        // A call that failed as a whole changed nothing, and may succeed when it is repeated.
        if !matches!(response.call, Some(response::Call::Failure(_)) | None) {
            let bytes = size_of_val(executed) + response.encoded_len();
            self.calls.answers.lock().finish(self.client, self.number, executed.clone(), bytes);
        }
    }
}

impl Drop for RunningCall<'_> {
    fn drop(&mut self) {
        // Has no effect on a call that has an answer.
        self.calls.answers.lock().abort(self.client, self.number);
        self.calls.ended.notify_waiters();
    }
}

fn client_of(request: &v1::Request) -> Option<ClientId> {
    ClientId::from_bytes(&request.call.as_ref()?.caller()?.client)
}

fn refused(error: Error) -> Executed {
    durability::refusal(&error).into()
}
