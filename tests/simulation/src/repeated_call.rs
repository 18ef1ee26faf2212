//! A call that is repeated as the store client decides.

use std::time::Duration;

use mooncake_store_client::protocol::{AttemptFailure, CallKind, CallRetry};

use crate::{call::Call, client::Input, simulator::Simulator};

/// The time limit of a call with its repetitions.
const TIME_LIMIT: Duration = Duration::from_secs(6);

/// A call in progress.
#[derive(Debug)]
pub(crate) struct RepeatedCall {
    call: Call,
    retry: CallRetry,
}

impl RepeatedCall {
    /// Sends a call for the first time.
    pub(crate) fn send(simulator: &mut Simulator, caller: (u64, u64), call: Call) -> Self {
        let kind = match call {
            Call::PutEnd { .. } | Call::PutRevoke { .. } => CallKind::ClosesPut,
            _ => CallKind::Repeatable,
        };
        let retry = CallRetry::new(kind, simulator.now + TIME_LIMIT, simulator.random.next());
        simulator.call(caller, call.clone());
        Self { call, retry }
    }

    /// Decides after an attempt without a reply. Returns whether the call is repeated; then the
    /// operation gets the input [`Input::Again`].
    pub(crate) fn fail(&mut self, simulator: &mut Simulator, caller: (u64, u64)) -> bool {
        let Some(pause) = self.retry.after_failure(AttemptFailure::Broken, simulator.now) else {
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
        simulator.call(caller, self.call.clone());
    }
}
