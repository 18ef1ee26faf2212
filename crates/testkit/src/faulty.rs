//! A link to the master that fails on demand.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_base::{Clock, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_proto::v1::{self, request::Call};
use mooncake_store_client::MasterLink;

/// What happens to a call.
#[derive(Debug, Clone)]
pub enum Fault {
    /// It is lost on the way there: the master never sees it.
    LoseRequest,
    /// The master does it and its answer is lost.
    LoseAnswer,
    /// The master does it, its answer is lost, and the link makes the same call again.
    Repeat,
    /// The master sees it only once the gate is open.
    Hold(Gate),
    /// The answer comes only once the gate is open.
    HoldAnswer(Gate),
    /// It fails so, and the master never sees it.
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

/// A link that hands calls on, but for those that a rule singles out.
pub struct FaultyLink {
    inner: Arc<dyn MasterLink>,
    rules: Mutex<Vec<Rule>>,
}

impl FaultyLink {
    /// A link that does no harm until it is told to.
    pub fn new(inner: Arc<dyn MasterLink>) -> Arc<Self> {
        Arc::new(Self { inner, rules: Mutex::default() })
    }

    /// From now on the next so many calls that are chosen meet the fault.
    pub fn inject(
        &self,
        times: usize,
        fault: Fault,
        choose: impl Fn(&Call) -> bool + Send + 'static,
    ) {
        self.rules.lock().push(Rule { choose: Box::new(choose), times, fault });
    }

    /// Takes every rule back.
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
    fn call(&self, request: v1::Request, deadline: Moment) -> Result<v1::Response> {
        match self.fault_for(&request) {
            None => self.inner.call(request, deadline),
            Some(Fault::LoseRequest) => Err(lost()),
            Some(Fault::LoseAnswer) => {
                self.inner.call(request, deadline)?;
                Err(lost())
            }
            Some(Fault::Repeat) => {
                self.inner.call(request.clone(), deadline)?;
                self.inner.call(request, deadline)
            }
            Some(Fault::Hold(gate)) => {
                gate.pass(deadline)?;
                self.inner.call(request, deadline)
            }
            Some(Fault::HoldAnswer(gate)) => {
                let answer = self.inner.call(request, deadline);
                gate.pass(deadline)?;
                answer
            }
            Some(Fault::Fail(error)) => Err(error),
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
    /// A closed gate.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets everybody through, now and later.
    pub fn open(&self) {
        self.0.state.lock().0 = true;
        self.0.changed.notify_all();
    }

    /// Waits until somebody stands before it.
    ///
    /// # Panics
    /// If nobody comes in time.
    pub fn await_arrival(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut state = self.0.state.lock();
        while state.1 == 0 {
            let timed_out = self.0.changed.wait_until(&mut state, deadline).timed_out();
            assert!(!timed_out || state.1 > 0, "nobody came to the gate within {limit:?}");
        }
    }

    fn pass(&self, deadline: Moment) -> Result<()> {
        let mut state = self.0.state.lock();
        state.1 += 1;
        self.0.changed.notify_all();
        while !state.0 {
            let left = deadline.left(SystemClock.now());
            if left.is_zero() {
                return Err(lost());
            }
            self.0.changed.wait_for(&mut state, left);
        }
        Ok(())
    }
}

/// Time is not really spent: what a test wants to see is what follows.
fn lost() -> Error {
    Error::new(ErrorCode::RPC_TIMEOUT, "a test had this call lost")
}

impl fmt::Debug for FaultyLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultyLink").field("inner", &self.inner).finish_non_exhaustive()
    }
}
