//! A link to the master with fault injection.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_base::{Clock, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_proto::v1::{self, request::Call};
use mooncake_store_client::{CallFailure, MasterLink, protocol::AttemptFailure};

/// A fault that is injected into a call.
#[derive(Debug, Clone)]
pub enum Fault {
    /// The request is lost: the master never receives it.
    LoseRequest,
    /// The master executes the call, and the response is lost.
    LoseAnswer,
    /// The master executes the call, the response is lost, and the link repeats the call.
    Repeat,
    /// The request is delayed until the gate opens.
    Hold(Gate),
    /// The response is delayed until the gate opens.
    HoldAnswer(Gate),
    /// The call fails with this error, and the master never receives it.
    Fail(Error),
}

/// A gate that a test opens by hand.
#[derive(Debug, Clone, Default)]
pub struct Gate(Arc<GateState>);

#[derive(Debug, Default)]
struct GateState {
    state: Mutex<(bool, usize)>,
    changed: Condvar,
}

type Choose = Box<dyn Fn(&Call) -> bool + Send>;

struct Rule {
    choose: Choose,
    times: usize,
    fault: Fault,
}

/// A link that forwards calls, except those that match a rule.
pub struct FaultyLink {
    inner: Arc<dyn MasterLink>,
    rules: Mutex<Vec<Rule>>,
}

impl FaultyLink {
    /// Wraps a link; no faults are injected yet.
    pub fn new(inner: Arc<dyn MasterLink>) -> Arc<Self> {
        Arc::new(Self { inner, rules: Mutex::default() })
    }

    /// Injects the fault into the next `times` calls that `choose` selects.
    pub fn inject(
        &self,
        times: usize,
        fault: Fault,
        choose: impl Fn(&Call) -> bool + Send + 'static,
    ) {
        self.rules.lock().push(Rule { choose: Box::new(choose), times, fault });
    }

    /// Removes all rules.
    pub fn heal(&self) {
        self.rules.lock().clear();
    }

    fn fault_for(&self, request: &v1::Request) -> Option<Fault> {
        let call = request.call.as_ref()?;
        let mut rules = self.rules.lock();
        let rule = rules.iter_mut().find(|rule| rule.times > 0 && (rule.choose)(call))?;
        rule.times -= 1;
        Some(rule.fault.clone())
    }
}

impl MasterLink for FaultyLink {
    fn call(
        &self,
        request: v1::Request,
        deadline: Moment,
    ) -> Result<v1::Response, Box<CallFailure>> {
        match self.fault_for(&request) {
            None => self.inner.call(request, deadline),
            Some(Fault::LoseRequest) => Err(lost(Some(request))),
            Some(Fault::LoseAnswer) => {
                self.inner.call(request.clone(), deadline)?;
                Err(lost(Some(request)))
            }
            Some(Fault::Repeat) => {
                self.inner.call(request.clone(), deadline)?;
                self.inner.call(request, deadline)
            }
            Some(Fault::Hold(gate)) => {
                gate.pass(deadline).map_err(|()| lost(None))?;
                self.inner.call(request, deadline)
            }
            Some(Fault::HoldAnswer(gate)) => {
                let answer = self.inner.call(request, deadline);
                gate.pass(deadline).map_err(|()| lost(None))?;
                answer
            }
            Some(Fault::Fail(error)) => Err(CallFailure::last(error)),
        }
    }

    fn address(&self) -> String {
        self.inner.address()
    }

    fn close(&self) {
        self.inner.close();
    }
}

impl Gate {
    /// Creates a closed gate.
    pub fn new() -> Self {
        Self::default()
    }

    /// Opens the gate for good.
    pub fn open(&self) {
        self.0.state.lock().0 = true;
        self.0.changed.notify_all();
    }

    /// Waits until a call has arrived at the gate.
    ///
    /// # Panics
    /// If no call arrives in time.
    pub fn await_arrival(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut state = self.0.state.lock();
        while state.1 == 0 {
            let timed_out = self.0.changed.wait_until(&mut state, deadline).timed_out();
            assert!(!timed_out || state.1 > 0, "no call arrived at the gate within {limit:?}");
        }
    }

    /// Waits until the gate is open. Fails at the deadline.
    fn pass(&self, deadline: Moment) -> Result<(), ()> {
        let mut state = self.0.state.lock();
        state.1 += 1;
        self.0.changed.notify_all();
        while !state.0 {
            let left = deadline.left(SystemClock.now());
            if left.is_zero() {
                return Err(());
            }
            self.0.changed.wait_for(&mut state, left);
        }
        Ok(())
    }
}

/// Returns the error of a lost call, without waiting for a real timeout.
fn lost(request: Option<v1::Request>) -> Box<CallFailure> {
    let error = Error::new(ErrorCode::RPC_TIMEOUT, "the call was lost by fault injection");
    Box::new(CallFailure { error, kind: AttemptFailure::TimedOut, request })
}

impl fmt::Debug for FaultyLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultyLink").field("inner", &self.inner).finish_non_exhaustive()
    }
}
