//! Calls to the master: typed, numbered where that is needed, repeated after failures, and counted.
//! [`batch`] splits batches into messages, [`response`] converts what the master answers.

pub(crate) mod batch;
pub(crate) mod response;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use mooncake_base::sync::Mutex;
use mooncake_base::{
    ClientId, Clock, Error, ErrorCode, ErrorKind, Moment, Result, SystemClock, TenantId,
};
use mooncake_os::call_limit;
use mooncake_proto::{
    calls::{Method, Repetition, Rpc},
    convert::Caller,
    v1::{self, request::Call, response::Call as Reply},
};

use self::response::protocol_error;
use crate::{
    fences::PendingReleases,
    lifetime::Lifetime,
    link::MasterLink,
    metrics::Metrics,
    protocol::{CallKind, CallNumbers, CallRetry, RetryPatience},
};

/// The calls of one client to its master.
pub(crate) struct MasterRpc {
    link: Arc<dyn MasterLink>,
    client: ClientId,
    /// The caller field of every request.
    caller: v1::Caller,
    /// Time limit of a call, or of all calls of a batch.
    timeout: Duration,
    /// How long an ordinary call is repeated.
    patience: RetryPatience,
    /// Whether the master has answered a call: only such a master is awaited.
    has_answered: AtomicBool,
    numbers: Mutex<CallNumbers>,
    pending_releases: Arc<PendingReleases>,
    lifetime: Arc<Lifetime>,
    metrics: Arc<Metrics>,
}

impl MasterRpc {
    pub(crate) fn new(
        link: Arc<dyn MasterLink>,
        client: ClientId,
        tenant: TenantId,
        timeout: Duration,
        patience: RetryPatience,
        lifetime: &Arc<Lifetime>,
        metrics: &Arc<Metrics>,
    ) -> Self {
        Self {
            link,
            client,
            caller: (&Caller { client, tenant }).into(),
            timeout,
            patience,
            has_answered: AtomicBool::new(false),
            numbers: Mutex::default(),
            pending_releases: Arc::default(),
            lifetime: Arc::clone(lifetime),
            metrics: Arc::clone(metrics),
        }
    }

    /// Returns the caller field of a request.
    pub(crate) fn caller(&self) -> Option<v1::Caller> {
        Some(self.caller.clone())
    }

    /// Returns the address of the master.
    pub(crate) fn address(&self) -> String {
        self.link.address()
    }

    /// Returns the queue of fences that are handed back with the next call.
    pub(crate) fn pending_releases(&self) -> &Arc<PendingReleases> {
        &self.pending_releases
    }

    /// Returns the deadline of an operation that begins now.
    pub(crate) fn deadline(&self) -> Moment {
        call_limit::capped(SystemClock.now() + self.timeout)
    }

    /// Closes the link.
    pub(crate) fn close(&self) {
        self.link.close();
    }

    /// Makes a call with the configured RPC time-out.
    pub(crate) fn call<R: Rpc>(&self, request: R) -> Result<R::Answer> {
        let now = SystemClock.now();
        self.call_at(request, now, now + self.timeout)
    }

    /// Makes a call with an explicit deadline.
    pub(crate) fn call_until<R: Rpc>(&self, request: R, deadline: Moment) -> Result<R::Answer> {
        self.call_at(request, SystemClock.now(), deadline)
    }

    /// Makes a call with an explicit deadline, for callers that already have the current time.
    pub(crate) fn call_at<R: Rpc>(
        &self,
        request: R,
        sent: Moment,
        deadline: Moment,
    ) -> Result<R::Answer> {
        self.lifetime.check_open()?;
        self.exchange(request, sent, deadline, |_| {})
    }

    /// Makes a call that is changed by `prepare` before it is sent again.
    pub(crate) fn call_repeating<R: Rpc>(
        &self,
        request: R,
        deadline: Moment,
        prepare: impl Fn(&mut Call),
    ) -> Result<R::Answer> {
        self.lifetime.check_open()?;
        self.exchange(request, SystemClock.now(), deadline, prepare)
    }

    /// Makes a call even if the client is already closing.
    pub(crate) fn exchange<R: Rpc>(
        &self,
        request: R,
        sent: Moment,
        deadline: Moment,
        prepare: impl Fn(&mut Call),
    ) -> Result<R::Answer> {
        // The deadline may be capped already.
        let is_limited = call_limit::deadline().is_some_and(|limit| limit <= deadline);
        let deadline = call_limit::capped(deadline);
        if deadline.has_passed(sent) {
            let text = "the time limit passed before the call was sent";
            return Err(
                Error::new(ErrorCode::RPC_TIMEOUT, text).with("master", self.link.address())
            );
        }
        let call = request.into_call();
        let mut retry = CallRetry::new(
            kind(&call),
            deadline,
            self.patience_of(R::METHOD),
            self.client.bits() as u64 ^ u64::from(sent.since_boot().subsec_nanos()),
        );
        let (call_number, answered_below) = if R::METHOD.repetition() == Repetition::Numbered {
            self.numbers.lock().begin()
        } else {
            (0, 0)
        };
        let released_fences = self.pending_releases.take();
        let request = v1::Request {
            call: Some(call),
            released_fences,
            call_number,
            answered_below,
            ..v1::Request::default()
        };
        let response = self.call_with_retries(request, sent, &mut retry, prepare);
        let is_limit_over = call_limit::is_over() || (is_limited && retry.is_out_of_time());
        let response =
            response.map_err(|error| if is_limit_over { timed_out(error) } else { error });
        if call_number != 0 {
            self.numbers.lock().end(call_number);
        }
        self.metrics.count_call(R::METHOD, response.is_ok(), SystemClock.now().since(sent));
        match response?.call {
            Some(Reply::Failure(failure)) => Err((&failure).into()),
            Some(answer) => R::answer(answer)
                .ok_or_else(|| protocol_error("the response belongs to another call")),
            None => Err(protocol_error("the response is empty")),
        }
    }

    /// Returns how long the call is repeated. A master that has never answered is not awaited: its
    /// address may be wrong.
    fn patience_of(&self, method: Method) -> RetryPatience {
        let awaits_connection = self.patience.awaits_connection
            && method.repetition() != Repetition::Probe
            && self.has_answered.load(Ordering::Relaxed);
        RetryPatience { awaits_connection, ..self.patience }
    }

    /// Sends a request until it is answered or given up.
    fn call_with_retries(
        &self,
        mut request: v1::Request,
        sent: Moment,
        retry: &mut CallRetry,
        prepare: impl Fn(&mut Call),
    ) -> Result<v1::Response> {
        let mut now = sent;
        loop {
            let failure = match self.link.call(request, retry.attempt_deadline(now)) {
                Ok(response) => {
                    if !self.has_answered.load(Ordering::Relaxed) {
                        self.has_answered.store(true, Ordering::Relaxed);
                    }
                    return Ok(response);
                }
                Err(failure) => *failure,
            };
            now = SystemClock.now();
            let (Some(again), Some(pause)) =
                (failure.request, retry.after_failure(failure.kind, now))
            else {
                return Err(failure.error);
            };
            if call_limit::is_over() {
                return Err(failure.error);
            }
            tracing::debug!(client = self.lifetime.name(), error = %failure.error, ?pause, "repeating a call");
            if !pause.is_zero() {
                if !self.lifetime.sleep_or_closed(pause) {
                    return Err(failure.error);
                }
                now = SystemClock.now();
            }
            request = again;
            request.call.as_mut().into_iter().for_each(&prepare);
        }
    }
}

/// Returns the failure as a time-out: without the limit of its caller, the call would have been
/// repeated, or would have waited for a connection.
fn timed_out(error: Error) -> Error {
    if error.kind() != ErrorKind::Unavailable {
        return error;
    }
    Error::new(ErrorCode::RPC_TIMEOUT, "the time limit of the call passed").caused_by(error)
}

/// Returns how the call is repeated.
fn kind(call: &Call) -> CallKind {
    match (call.method().repetition(), call) {
        (Repetition::ClosesPut, _) => CallKind::ClosesPut,
        (Repetition::StartsPut, Call::PutStart(start)) if start.request_id == 0 => {
            CallKind::SentOnce
        }
        (
            Repetition::Harmless | Repetition::Numbered | Repetition::Probe | Repetition::StartsPut,
            _,
        ) => CallKind::Repeatable,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use mooncake_os::call_limit::CallLimit;

    use super::*;
    use crate::{link::CallFailure, protocol::AttemptFailure};

    /// Answers each call with the next reply; fails where there is none. Keeps the requests.
    #[derive(Debug)]
    struct ScriptedLink {
        failure: AttemptFailure,
        replies: Mutex<VecDeque<Option<Reply>>>,
        requests: Mutex<Vec<v1::Request>>,
    }

    impl MasterLink for ScriptedLink {
        fn call(&self, request: v1::Request, _: Moment) -> Result<v1::Response, Box<CallFailure>> {
            self.requests.lock().push(request.clone());
            match self.replies.lock().pop_front().flatten() {
                Some(reply) => Ok(v1::Response { call: Some(reply), ..v1::Response::default() }),
                None => Err(Box::new(CallFailure {
                    error: Error::new(ErrorCode::RPC_FAIL, "lost"),
                    kind: self.failure,
                    request: Some(request),
                })),
            }
        }

        fn address(&self) -> String {
            "master:1".to_owned()
        }

        fn close(&self) {}
    }

    fn rpc(replies: impl IntoIterator<Item = Option<Reply>>) -> (MasterRpc, Arc<ScriptedLink>) {
        rpc_failing(AttemptFailure::Broken, replies)
    }

    fn rpc_failing(
        failure: AttemptFailure,
        replies: impl IntoIterator<Item = Option<Reply>>,
    ) -> (MasterRpc, Arc<ScriptedLink>) {
        let replies = Mutex::new(replies.into_iter().collect());
        let link = Arc::new(ScriptedLink { failure, replies, requests: Mutex::default() });
        let lifetime = Arc::new(Lifetime::new("node".to_owned()));
        let (client, tenant, timeout) =
            (ClientId::random(), TenantId::default(), Duration::from_secs(30));
        let patience = RetryPatience { time: Duration::from_secs(2), awaits_connection: true };
        let as_link = Arc::clone(&link) as Arc<dyn MasterLink>;
        let metrics = Arc::default();
        (MasterRpc::new(as_link, client, tenant, timeout, patience, &lifetime, &metrics), link)
    }

    fn removal() -> v1::RemoveRequest {
        v1::RemoveRequest::default()
    }

    #[test]
    fn repetition_carries_the_same_number() {
        let answer = Some(Reply::Remove(v1::RemoveResponse::default()));
        let (rpc, link) = rpc([None, None, answer.clone(), answer]);
        for _ in 0..2 {
            rpc.call(removal()).unwrap();
        }
        let numbers: Vec<_> = link
            .requests
            .lock()
            .iter()
            .map(|request| (request.call_number, request.answered_below))
            .collect();
        assert_eq!(numbers, [(1, 1), (1, 1), (1, 1), (2, 2)]);
    }

    #[test]
    fn lost_connection_is_awaited_but_not_by_probes() {
        let answer = || Some(Reply::Remove(v1::RemoveResponse::default()));
        let replies = [answer(), None, None, answer(), None, answer()];
        let (rpc, link) = rpc_failing(AttemptFailure::Unreachable, replies);
        rpc.call(removal()).unwrap();
        rpc.call(removal()).unwrap();
        assert_eq!(link.requests.lock().len(), 4, "the call was sent again until it was answered");
        let probe = v1::StatusRequest::default();
        assert_eq!(rpc.call(probe).unwrap_err().code(), ErrorCode::RPC_FAIL);
        assert_eq!(link.requests.lock().len(), 5, "a probe fails at once");
    }

    #[test]
    fn master_that_never_answered_is_not_awaited() {
        let (rpc, link) = rpc_failing(AttemptFailure::Unreachable, []);
        rpc.call(removal()).unwrap_err();
        assert_eq!(link.requests.lock().len(), 1);
    }

    #[test]
    fn only_repetitions_are_prepared() {
        let (rpc, link) = rpc([None, Some(Reply::PutEnd(v1::PutEndResponse::default()))]);
        let request = v1::PutEndRequest::default();
        let name_key = |call: &mut Call| {
            let Call::PutEnd(end) = call else { return };
            end.columns.get_or_insert_default().versions.push(7);
        };
        rpc.call_repeating(request, rpc.deadline(), name_key).unwrap();
        let puts = |request: &v1::Request| match &request.call {
            Some(call) => call.items(),
            None => usize::MAX,
        };
        assert_eq!(link.requests.lock().iter().map(puts).collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn limit_of_the_call_ends_it_as_a_time_out() {
        let remove = |deadline: Option<Moment>| {
            let (rpc, link) = rpc([]);
            let limit = CallLimit::new(deadline, false);
            let run = || rpc.call_until(removal(), rpc.deadline());
            let error = limit.run(None, run).unwrap_err();
            assert!(error.to_string().ends_with("lost"), "the cause is told: {error}");
            assert!(!link.requests.lock().is_empty());
            error.kind()
        };
        assert_eq!(remove(Some(SystemClock.now() + Duration::from_millis(20))), ErrorKind::Timeout);
        assert_eq!(remove(None), ErrorKind::Unavailable);
    }

    #[test]
    fn answer_to_another_call_is_an_error() {
        let (rpc, _) = rpc([Some(Reply::Status(v1::StatusResponse::default()))]);
        assert_eq!(rpc.call(removal()).unwrap_err().code(), ErrorCode::RPC_FAIL);
    }

    #[test]
    fn call_is_not_sent_after_its_deadline_or_after_closing() {
        let (rpc, link) = rpc([]);
        let late = rpc.call_until(removal(), Moment::default()).unwrap_err();
        assert_eq!(late.code(), ErrorCode::RPC_TIMEOUT);
        assert!(late.to_string().contains("master=master:1"), "{late}");
        rpc.lifetime.close();
        let closed = rpc.call(removal()).unwrap_err();
        assert_eq!(closed.kind(), ErrorKind::Closed);
        assert!(link.requests.lock().is_empty());
    }
}
