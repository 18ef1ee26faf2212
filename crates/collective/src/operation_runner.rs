//! Carries out one operation of a group: attempts in one view after the other, until one of them is whole.

use std::{sync::Arc, time::Duration};

use mooncake_base::{Error, Result};

use crate::{
    attempt::Attempt,
    call::Call,
    collectives::{Operation, Stop, Writes},
    contributions::Contributions,
    inbox::GroupState,
    metrics::Recording,
    operation_queue::{CarriedOut, CarryOut},
    outcome::Outcome,
    own_rank::{OwnRank, not_active},
    progress::{RunningState, View},
};

/// What the attempts of a group's operations need.
#[derive(Debug)]
pub(crate) struct OperationRunner {
    rank: Arc<OwnRank>,
    contributions: Contributions,
    /// Time after which a silent rank has left the view.
    silence_limit: Duration,
}

impl OperationRunner {
    pub(crate) fn new(rank: Arc<OwnRank>, silence_limit: Duration) -> Arc<Self> {
        let contributions = Contributions::new(Arc::clone(rank.mesh.staging_memory()));
        Arc::new(Self { rank, contributions, silence_limit })
    }

    /// Attempts an operation, again if the view changes meanwhile, until an attempt is whole or one fails.
    async fn run_until_whole(&self, operation: &Operation) -> Outcome {
        let (mut begun, call) = (false, operation.call());
        loop {
            let view = match self.start_attempt(&mut begun, call).await {
                Ok(view) => view,
                Err(error) => return self.end_failed(error),
            };
            self.contributions.begin_attempt(view.attempt);
            let exchange =
                Attempt::new(&self.rank, &self.contributions, self.silence_limit, view, call);
            let absent_root = operation.root().filter(|root| !exchange.view.is_member(*root));
            let mut has_data = None;
            match exchange.run_announced(operation, &mut has_data).await {
                Ok(()) => return self.end(has_data.unwrap_or_default(), absent_root),
                Err(Stop::Failed(error) | Stop::FailedElsewhere(error)) => {
                    return self.end_failed(error);
                }
                Err(Stop::Interrupted) => {}
            }
            match self.await_view(exchange.view.attempt).await {
                Err(error) => return self.end_failed(error),
                Ok(is_finished) => {
                    if let (true, Some(writes)) = (is_finished, has_data) {
                        return self.end(writes, absent_root);
                    }
                }
            }
        }
    }

    /// Waits until the group is not stopped, and returns the view.
    async fn start_attempt(&self, begun: &mut bool, call: Call) -> Result<View> {
        let find = |state: &mut GroupState| {
            if let Some(error) = &state.closed {
                return Some(Err(error.clone()));
            }
            if state.progress.stopped.is_some() {
                return None;
            }
            if !state.progress.view.is_member(self.rank.slot) {
                return Some(Err(not_active()));
            }
            let sequence = state.progress.begin(*begun);
            *begun = true;
            state.begin_call(state.progress.view.attempt, sequence, call);
            Some(Ok(state.progress.view.clone()))
        };
        self.rank.inbox.find(find).await
    }

    /// Waits for the view after an interruption. Returns whether the operation is finished as it is.
    async fn await_view(&self, attempt: u32) -> Result<bool> {
        let find =
            |state: &mut GroupState| match (&state.closed, state.progress.state_after(attempt)) {
                (Some(error), _) => Some(Err(error.clone())),
                (None, Some(RunningState::Removed)) => Some(Err(not_active())),
                (None, after) => after.map(|after| Ok(after == RunningState::Finished)),
            };
        self.rank.inbox.find(find).await
    }

    /// Ends an operation that is whole. A root that was no member has sent, or got, nothing.
    fn end(&self, writes: Writes, absent_root: Option<usize>) -> Outcome {
        self.contributions.end_loans();
        writes.carry_out();
        let mut state = self.rank.inbox.state.lock();
        state.progress.end();
        let mut failed_slots = std::mem::take(&mut state.unreported);
        failed_slots.extend(absent_root);
        failed_slots.sort_unstable();
        failed_slots.dedup();
        Outcome { failed_slots, ..Outcome::default() }
    }

    fn end_failed(&self, error: Error) -> Outcome {
        self.contributions.end_loans();
        let mut state = self.rank.inbox.state.lock();
        state.progress.end();
        let (attempt, next) = (state.progress.view.attempt, state.progress.next);
        state.parts.retain(|key, _| key.0 > attempt || key.1 >= next);
        drop(state);
        Outcome { error: Some(error), ..Outcome::default() }
    }
}

impl CarryOut for OperationRunner {
    fn carry_out(self: Arc<Self>, operation: Operation) -> CarriedOut {
        Box::pin(async move {
            let (kind, bytes) = (operation.kind(), operation.source_bytes());
            let recording = Recording::begin(&self.rank.metrics, kind, bytes);
            let outcome = self.run_until_whole(&operation).await;
            recording.end(&outcome);
            outcome
        })
    }
}
