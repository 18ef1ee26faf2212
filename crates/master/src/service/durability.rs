//! The service and its log: recovery from the log, and answers that wait until all that they rest on
//! is in it.

use std::{
    panic::{self, AssertUnwindSafe},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use mooncake_base::sync::MutexGuard;
use mooncake_base::{Clock, Error, Moment, Result, SegmentId};
use mooncake_proto::v1::{self, request::Call, response};

use super::{Origin, Service, admission, shared_state::SharedState, state_guard};
use crate::{
    journal::{Journal, JournalStatus, RecoveredJournal, StateOwner},
    state::{Restored, Rules, State},
};

/// The thread on which a call is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnsweringThread {
    /// A thread of the runtime, which must not wait for the disk.
    Runtime,
    /// The dedicated thread of a connection.
    Dedicated,
}

/// The answer to a call that was executed, before the log was waited for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Executed {
    pub(super) response: v1::Response,
    /// The log position that the answer waits for.
    pub(super) position: u64,
}

/// The log position of an answer that waits for nothing.
pub(super) const NO_POSITION: u64 = 0;

impl From<v1::Response> for Executed {
    /// An answer that waits for nothing.
    fn from(response: v1::Response) -> Self {
        Self { response, position: NO_POSITION }
    }
}

impl Service {
    /// Creates a service over the state recovered from the log. All recovered segments are
    /// unclaimed until their owners announce them.
    pub(crate) fn from_log(
        rules: Rules,
        clock: Arc<dyn Clock>,
        recovered: RecoveredJournal,
    ) -> (Self, Restored) {
        let unix_time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let booted = unix_time.saturating_sub(clock.now().since_boot());
        let rules = Rules { booted, ..rules };
        let (seed, _) = SegmentId::random().halves();
        // Writers that got memory through changes missing from the log may continue writing for
        // this long.
        let quiet = if recovered.may_lack_end { rules.late_end() } else { Duration::ZERO };
        let (state, restored) = State::restore(rules, seed, clock.now(), recovered.image, quiet);
        let service =
            Self::with_state(state, clock, Some(recovered.journal), restored.segments > 0);
        // Dropping the guard logs the objects that were dropped because of conflicts, before
        // anything else.
        drop(service.shared.lock());
        (service, restored)
    }

    /// Executes one call as [`dispatch`](Self::dispatch) does, without blocking the runtime on a
    /// slow disk. A large call runs on its own thread, because a blocked runtime thread blocks all
    /// connections that wait for the thread. `permit` is dropped when the call has been executed,
    /// before the wait for the log: a disk that hangs takes no permit from calls that need no disk.
    ///
    /// Not cancel-safe: if the future is dropped, the call may or may not have been executed.
    pub async fn answer(
        self: &Arc<Self>,
        request: v1::Request,
        origin: &Origin,
        permit: impl Sized,
        thread: AnsweringThread,
    ) -> v1::Response {
        self.record_arrival(request.call.as_ref(), origin);
        let executed = self.execute_for(request, origin, permit).await;
        self.answer_from_log(executed, thread).await
    }

    /// Executes a call whose arrival is recorded, like [`answer`](Self::answer). Returns its answer
    /// before the log was waited for.
    pub(super) async fn execute_for(
        self: &Arc<Self>,
        request: v1::Request,
        origin: &Origin,
        permit: impl Sized,
    ) -> Executed {
        let executed = if request.call.as_ref().is_some_and(admission::is_large) {
            let (service, origin) = (Arc::clone(self), origin.clone());
            let executed =
                tokio::task::spawn_blocking(move || service.execute_logged(request, &origin)).await;
            executed.unwrap_or_else(|source| refusal(&panicked().caused_by(source)).into())
        } else if let (Some(Call::FetchOffloads(r)), None) =
            (&request.call, self.shared.fatal().get())
        {
            // Waits for objects, and must keep no other call waiting meanwhile. The wait is none of the
            // call's time.
            drop(permit);
            let (answer, position) = self.disks.fetch_offloads_when_there_are(r).await;
            let response = self.end_call(None, answer.map(response::Call::FetchOffloads));
            return Executed { response, position };
        } else if matches!(request.call, Some(Call::PutStart(_))) {
            self.answer_put_start(request).await
        } else {
            self.execute_logged(request, origin)
        };
        drop(permit);
        executed
    }

    /// Waits until an answer may be given.
    ///
    /// Cancel-safe.
    pub(super) async fn answer_from_log(
        &self,
        executed: Executed,
        thread: AnsweringThread,
    ) -> v1::Response {
        let Executed { response, position } = executed;
        let outcome = match (self.shared.journal(), thread) {
            (None, _) => Ok(()),
            (Some(journal), AnsweringThread::Runtime) => journal.durable(position).await,
            // Writes the log itself, which is faster than to wake another thread for it.
            (Some(journal), AnsweringThread::Dedicated) => journal.wait_durable(position),
        };
        self.finished(response, outcome)
    }

    /// Executes a call that starts puts. It waits for memory on a thread of its own.
    async fn answer_put_start(&self, request: v1::Request) -> Executed {
        if let Some(error) = self.shared.fatal().refusal() {
            return refusal(&error).into();
        }
        let pending = self.begin_call(&request);
        let (answer, position) = match request.call {
            Some(Call::PutStart(r)) => self.objects.put_start_in_parts(r).await,
            _ => (Err(Error::internal("not a call that starts puts")), NO_POSITION),
        };
        let response = self.end_call(pending, answer.map(response::Call::PutStart));
        Executed { response, position }
    }

    /// Returns the answer to a call once the log was waited for, with this outcome, or why it must not
    /// be given: the log failed before, a standby that must have the change has not confirmed it, or
    /// another master leads. A failure of the whole call stays, as it promises nothing: one that panicked
    /// must not be repeated.
    pub(super) fn finished(&self, response: v1::Response, outcome: Result<()>) -> v1::Response {
        let mut response = response;
        if let Some(leadership) = self.shared.leadership() {
            // At this moment, after all that was waited for: another master may lead already.
            if !leadership.is_valid() {
                self.shared.end(leadership.refusal());
            }
            response.view = leadership.view.0;
        }
        if let Some(response::Call::Failure(_)) = &response.call {
            return response;
        }
        match self.shared.fatal().refusal().or_else(|| outcome.err()) {
            Some(error) => refusal(&error),
            None => response,
        }
    }

    /// Panics with a half-changed state.
    #[cfg(test)]
    pub(crate) fn panic_inside_state(&self) {
        let mut state = self.shared.lock();
        let client = mooncake_base::ClientId::from_bits(99);
        let _ = state.register(self.now(), client, "half:1");
        panic!("a fault, for the test");
    }

    /// Waits for the error after which no call is answered any more.
    ///
    /// Cancel-safe.
    pub async fn ended(&self) -> Error {
        self.shared.fatal().raised().await
    }

    /// Returns the status of the log; `None` without a log.
    pub fn journal_status(&self) -> Option<JournalStatus> {
        self.shared.journal().map(Journal::status)
    }

    /// Returns what all calls share.
    pub(crate) fn shared(&self) -> &SharedState {
        &self.shared
    }
}

impl StateOwner for Service {
    fn journal(&self) -> Option<&Journal> {
        self.shared.journal()
    }

    fn lock_state(&self) -> Result<MutexGuard<'_, State>> {
        self.shared.lock_for_journal()
    }

    fn now(&self) -> Moment {
        self.shared.now()
    }
}

/// Runs a call. Returns the log position behind everything that it saw and did, too. The error of a
/// call that panics is that of the call.
pub(super) fn with_log_position<R>(call: impl FnOnce() -> Result<R>) -> (Result<R>, u64) {
    state_guard::reset_log_position();
    // A panic while the state is locked ends the service; any other leaves the state whole.
    let result = panic::catch_unwind(AssertUnwindSafe(call));
    let result = result.unwrap_or_else(|_| Err(panicked()));
    (result, state_guard::seen_log_position())
}

/// Returns whether the answer to a call waits until everything that it rests on is in the log: own
/// changes, and those of others that it has seen. An answer that says less must not be taken for a
/// promise; see `docs/decisions/0024-answers-wait-for-the-log.md`. `starts_unlogged`: puts may start before
/// the log has them.
pub(super) fn waits_for_log(call: &Call, starts_unlogged: bool) -> bool {
    match call {
        // Nothing is promised: what a read shows may be taken back by a restart.
        Call::Locate(_)
        | Call::Verify(_)
        | Call::Probe(_)
        | Call::Describe(_)
        | Call::ListObjects(_)
        | Call::QueryQuotas(_)
        | Call::Status(_)
        // A client must not expire while the disk hangs.
        | Call::Heartbeat(_) => false,
        // A window protects memory in this process, and a restart begins a new one for each put that is in
        // the log.
        Call::PutRenew(_) => starts_unlogged,
        // A node is shut down after its drain has ended.
        Call::ListSegments(_) | Call::QueryTasks(_) | Call::QueryDrainJobs(_) => true,
        // Memory is handed out.
        Call::PutStart(_) | Call::FetchTasks(_) => true,
        // Memory is read under a fence, which is never longer than the log says.
        Call::FetchOffloads(_) => false,
        // A repetition, or a call that finds done what it asks for, promises what another did.
        Call::Register(_)
        | Call::Unregister(_)
        | Call::Mount(_)
        | Call::Unmount(_)
        | Call::PutEnd(_)
        | Call::PutRevoke(_)
        | Call::SetExpiry(_)
        | Call::Remove(_)
        | Call::RemoveMatching(_)
        | Call::CreateTasks(_)
        | Call::EndTasks(_)
        | Call::ClearReplicas(_)
        | Call::MountDisk(_)
        | Call::UnmountDisk(_)
        | Call::ReportRecords(_)
        | Call::CreateDrainJobs(_)
        | Call::CancelDrainJobs(_)
        | Call::SetQuotas(_) => true,
    }
}

/// Returns the answer to a call that failed as a whole.
pub(super) fn refusal(error: &Error) -> v1::Response {
    v1::Response { call: Some(response::Call::Failure(error.into())), ..v1::Response::default() }
}

pub(super) fn panicked() -> Error {
    Error::internal("the call panicked; report the panic in the output of the master")
}
