//! The service and its log: recovery from the log, and calls that wait until their effects are in it.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use mooncake_base::sync::MutexGuard;
use mooncake_base::{Clock, Error, Moment, SegmentId};
use mooncake_proto::v1::{self, request::Call, response};

use super::{Origin, Service, admission, state_guard};
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
        let quiet = if recovered.may_lack_end { rules.write_end() } else { Duration::ZERO };
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
        let (response, position) = if request.call.as_ref().is_some_and(admission::is_large) {
            let (service, origin) = (Arc::clone(self), origin.clone());
            let executed =
                tokio::task::spawn_blocking(move || service.execute_logged(request, &origin)).await;
            executed.unwrap_or_else(|source| {
                let error = Error::internal("the call panicked").caused_by(source);
                (v1::Response { call: Some(response::Call::Failure((&error).into())) }, 0)
            })
        } else if matches!(request.call, Some(Call::PutStart(_))) {
            self.answer_put_start(request, origin).await
        } else {
            self.execute_logged(request, origin)
        };
        drop(permit);
        match (self.shared.journal(), thread) {
            (None, _) => {}
            (Some(journal), AnsweringThread::Runtime) => journal.durable(position).await,
            // Writes the log itself, which is faster than to wake another thread for it.
            (Some(journal), AnsweringThread::Dedicated) => journal.wait_durable(position),
        }
        response
    }

    /// Executes a call that starts puts. It waits for memory on a thread of its own. Returns the log
    /// position behind its effects, too.
    async fn answer_put_start(&self, request: v1::Request, origin: &Origin) -> (v1::Response, u64) {
        let pending = self.begin_call(&request, origin);
        let (answer, position) = match request.call {
            Some(Call::PutStart(r)) => self.objects.put_start_in_parts(r).await,
            _ => (Err(Error::internal("not a call that starts puts")), 0),
        };
        (self.end_call(pending, answer.map(response::Call::PutStart)), position)
    }

    /// Returns the status of the log; `None` without a log.
    pub fn journal_status(&self) -> Option<JournalStatus> {
        self.shared.journal().map(Journal::status)
    }

    pub(crate) fn set_recovery_time(&self, time: Duration) {
        if let Some(journal) = self.shared.journal() {
            journal.set_recovery_time(time);
        }
    }

    pub(crate) fn has_journal(&self) -> bool {
        self.shared.journal().is_some()
    }
}

impl StateOwner for Service {
    fn journal(&self) -> Option<&Journal> {
        self.shared.journal()
    }

    fn lock_state(&self) -> MutexGuard<'_, State> {
        self.shared.lock_for_journal()
    }

    fn now(&self) -> Moment {
        self.shared.now()
    }
}

/// Runs a call. Returns the log position behind its effects, too.
pub(super) fn with_log_position<R>(call: impl FnOnce() -> R) -> (R, u64) {
    state_guard::reset_log_position();
    let result = call();
    (result, state_guard::log_position())
}
