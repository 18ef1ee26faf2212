//! A disk that hangs holds up the calls that must be logged, and no other.

use std::sync::Arc;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::timeout,
};

use super::*;
use crate::{
    LogSync,
    journal::{Directory, Maintenance, hanging_disk::HangingDisk},
};

const DEADLINE: Duration = Duration::from_secs(30);

/// Answers a call on the runtime, as a connection does.
fn answer(tasks: &mut JoinSet<response::Call>, service: &Arc<Service>, call: Call) {
    answer_numbered(tasks, service, 0, call);
}

fn answer_numbered(
    tasks: &mut JoinSet<response::Call>,
    service: &Arc<Service>,
    call_number: u64,
    call: Call,
) {
    let service = service.clone();
    let request = v1::Request { call: Some(call), call_number, ..Default::default() };
    tasks.spawn(async move {
        let origin = Origin::in_process();
        let answer = service.answer(request, &origin, (), AnsweringThread::Runtime).await;
        answer.call.expect("an answer")
    });
}

async fn next(tasks: &mut JoinSet<response::Call>) -> response::Call {
    let answered = timeout(DEADLINE, tasks.join_next()).await.expect("answered in time");
    answered.expect("a task").unwrap()
}

/// Length of an object that fills half of the segment of `lend`.
const BYTES: u64 = 1 << 19;

fn put(id: ClientId, key: &str, length: u64) -> Call {
    Call::PutStart(put_start(id, &[(key, length)]))
}

fn locate(id: ClientId, keys: usize) -> Call {
    let keys = Some(v1::KeyColumn::pack(vec!["a"; keys]));
    Call::Locate(v1::LocateRequest { caller: caller(id), keys, fence: true, ..Default::default() })
}

/// Puts the object "a", so that it can be read.
fn put_whole(service: &Service, id: ClientId) {
    let (_, started) = started(service, put_start(id, &[("a", BYTES)]));
    assert_eq!(failures(&ask(service, put_end(id, &started.versions))), 0);
}

/// Starts a service with a log on the disk.
fn start(disk: &Arc<HangingDisk>, sync: LogSync) -> (Arc<Service>, Maintenance<Service>) {
    let opened = Journal::open(Directory::on(disk.clone()), sync).unwrap();
    let (service, _) = Service::from_log(Rules::default(), SystemClock::shared(), opened);
    let service = Arc::new(service);
    let maintenance = Maintenance::start(&service).unwrap();
    (service, maintenance)
}

/// One thread: a call that held it would stop all others.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn hanging_disk_holds_no_runtime_thread() {
    let interval = LogSync::Interval(Duration::from_millis(10));
    for sync in [LogSync::Always, interval, LogSync::Never] {
        let disk = Arc::new(HangingDisk::default());
        let (service, maintenance) = start(&disk, sync);
        let id = lend(&service);
        put_whole(&service, id);
        let expired = service.totals().counters.clients_expired;
        disk.hang(true);
        let (mut changes, mut others) = (JoinSet::new(), JoinSet::new());
        for nth in 0..50 {
            answer(&mut changes, &service, put(id, &nth.to_string(), 64));
        }
        while !disk.is_hanging() {
            tokio::task::yield_now().await;
        }
        for _ in 0..100 {
            let heartbeat = v1::HeartbeatRequest { caller: caller(id), ..Default::default() };
            answer(&mut others, &service, Call::Heartbeat(heartbeat));
            let beat = next(&mut others).await;
            assert!(matches!(beat, response::Call::Heartbeat(beat) if beat.is_known));
            answer(&mut others, &service, locate(id, 1));
            let located = next(&mut others).await;
            assert!(matches!(located, response::Call::Locate(_)), "{located:?}");
            service.advance();
        }
        assert_eq!(service.totals().counters.clients_expired, expired);
        assert!(changes.try_join_next().is_none(), "acknowledged, not logged");
        disk.hang(false);
        for _ in 0..50 {
            assert!(matches!(next(&mut changes).await, response::Call::PutStart(_)));
        }
        drop(maintenance);
    }
}

/// How a disk hangs, and the log over it.
type Hang = (LogSync, fn(&HangingDisk, bool));

const HANGS: [Hang; 4] = [
    (LogSync::Always, HangingDisk::hang),
    (LogSync::Interval(Duration::from_millis(10)), HangingDisk::hang),
    (LogSync::Never, HangingDisk::hang),
    (LogSync::Always, HangingDisk::hang_syncs),
];

/// A service over a disk that can hang, and the calls that wait.
struct Hanging {
    disk: Arc<HangingDisk>,
    hang: fn(&HangingDisk, bool),
    service: Arc<Service>,
    _maintenance: Maintenance<Service>,
    calls: JoinSet<response::Call>,
}

impl Hanging {
    fn new((sync, hang): Hang) -> Self {
        let disk = Arc::new(HangingDisk::default());
        let (service, maintenance) = start(&disk, sync);
        lend(&service);
        let other = v1::RegisterRequest { caller: caller(OTHER), ..Default::default() };
        ask(&service, Call::Register(other));
        Self { disk, hang, service, _maintenance: maintenance, calls: JoinSet::new() }
    }

    /// Makes the call while the disk hangs, and then others that rest on what it did. Returns the
    /// answers to all of them, which come when the disk does not hang any more.
    async fn while_hanging(&mut self, first: Call, later: Vec<(u64, Call)>) -> Vec<response::Call> {
        let before = self.probe().await;
        (self.hang)(&self.disk, true);
        answer(&mut self.calls, &self.service, first);
        // Reads do not wait for the log: they show what the call did.
        while self.probe().await == before {}
        let waiting = 1 + later.len();
        for (number, call) in later {
            answer_numbered(&mut self.calls, &self.service, number, call);
        }
        for _ in 0..100 {
            self.probe().await;
        }
        assert!(self.calls.try_join_next().is_none(), "answered, not logged");
        (self.hang)(&self.disk, false);
        let mut answers = Vec::new();
        for _ in 0..waiting {
            answers.push(next(&mut self.calls).await);
        }
        answers
    }

    /// Makes a call while the log is idle over a disk that hangs.
    async fn while_idle(&self, call: Call) -> response::Call {
        (self.hang)(&self.disk, true);
        let mut calls = JoinSet::new();
        answer(&mut calls, &self.service, call);
        let answered = next(&mut calls).await;
        (self.hang)(&self.disk, false);
        answered
    }

    /// Returns the state of the object "a".
    async fn probe(&self) -> i32 {
        let mut reads = JoinSet::new();
        let keys = vec![Bytes::from_static(b"a")];
        let probe = v1::ProbeRequest { keys, ..Default::default() };
        answer(&mut reads, &self.service, Call::Probe(probe));
        let response::Call::Probe(probed) = next(&mut reads).await else { panic!("a probe") };
        probed.states[0]
    }
}

const OTHER: ClientId = ClientId::from_bits(2);

/// Returns a call that starts a put of "a", with a request id by which the master knows repetitions.
fn start_a(id: ClientId) -> Call {
    Call::PutStart(v1::PutStartRequest { request_id: 7, ..put_start(id, &[("a", 64)]) })
}

fn end_a(id: ClientId, version: u64) -> Call {
    let keys = Some(v1::KeyColumn::pack(["a"]));
    let columns = Some(v1::PutRefColumns { versions: vec![version], keys, ..Default::default() });
    Call::PutEnd(v1::PutEndRequest { caller: caller(id), columns })
}

fn remove_a(id: ClientId) -> Call {
    let keys = vec![Bytes::from_static(b"a")];
    Call::Remove(v1::RemoveRequest { caller: caller(id), keys, force: true, ..Default::default() })
}

/// Returns the version of a put that started, or the code of its refusal.
fn outcome(answer: &response::Call) -> Result<u64, i32> {
    let response::Call::PutStart(answer) = answer else { panic!("{answer:?}") };
    let columns = answer.columns.as_ref().expect("columns");
    match &columns.failures[..] {
        [] => Ok(columns.versions[0]),
        [failure, ..] => Err(failure.failure.as_ref().expect("a failure").code),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn answer_waits_for_changes_that_other_calls_made() {
    let id = ClientId::from_bits(1);
    for hang in HANGS {
        let mut hanging = Hanging::new(hang);
        // The memory of a put that a crash takes back goes to another one.
        let started = hanging.while_hanging(start_a(id), vec![(0, start_a(id))]).await;
        let version = outcome(&started[0]).unwrap();
        assert_eq!(outcome(&started[1]), Ok(version), "the same put");
        assert_eq!(outcome(&hanging.while_idle(start_a(id)).await), Ok(version));
        // An object that exists counts as put.
        let later = vec![(0, end_a(id, version)), (0, start_a(OTHER))];
        let ended = hanging.while_hanging(end_a(id, version), later).await;
        let is_end = |answer: &&response::Call| matches!(answer, response::Call::PutEnd(_));
        assert_eq!(ended.iter().filter(is_end).map(failures).sum::<usize>(), 0);
        let exists = ended.iter().find(|answer| !is_end(answer)).map(outcome);
        let already = Err(ErrorCode::OBJECT_ALREADY_EXISTS.number());
        assert_eq!(exists, Some(already));
        assert_eq!(failures(&hanging.while_idle(end_a(id, version)).await), 0);
        assert_eq!(outcome(&hanging.while_idle(start_a(OTHER)).await), already);
        // An object that is absent counts as removed.
        let removed = hanging.while_hanging(remove_a(id), vec![(0, remove_a(OTHER))]).await;
        assert_eq!(removed.iter().map(failures).sum::<usize>(), 1, "one finds it absent");
        assert_eq!(failures(&hanging.while_idle(remove_a(OTHER)).await), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn repetition_of_numbered_call_waits_for_the_first() {
    let id = ClientId::from_bits(1);
    for hang in HANGS {
        let mut hanging = Hanging::new(hang);
        put_whole(&hanging.service, id);
        let before = hanging.probe().await;
        (hang.1)(&hanging.disk, true);
        for _ in 0..2 {
            answer_numbered(&mut hanging.calls, &hanging.service, 1, remove_a(id));
            while hanging.probe().await == before {}
        }
        for _ in 0..100 {
            hanging.probe().await;
        }
        assert!(hanging.calls.try_join_next().is_none(), "answered, not logged");
        (hang.1)(&hanging.disk, false);
        for _ in 0..2 {
            assert_eq!(failures(&next(&mut hanging.calls).await), 0, "the answer to the first");
        }
    }
}

/// Who waits for a drain shuts the node down then.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn end_of_work_is_reported_when_it_is_in_the_log() {
    let id = ClientId::from_bits(1);
    for hang in HANGS {
        let mut hanging = Hanging::new(hang);
        let jobs = v1::QueryDrainJobsRequest { jobs: vec![Bytes::new()], ..Default::default() };
        let tasks = v1::QueryTasksRequest { tasks: vec![Bytes::new()], ..Default::default() };
        let calls = [
            Call::QueryDrainJobs(jobs),
            Call::QueryTasks(tasks),
            Call::ListSegments(v1::ListSegmentsRequest::default()),
        ];
        for call in &calls {
            hanging.while_idle(call.clone()).await;
        }
        let later = calls.into_iter().map(|call| (0, call)).collect();
        hanging.while_hanging(start_a(id), later).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn read_does_not_wait_for_longer_fence_in_log() {
    let disk = Arc::new(HangingDisk::default());
    let (service, maintenance) = start(&disk, LogSync::Always);
    let id = lend(&service);
    put_whole(&service, id);
    let mut reads = JoinSet::new();
    let mut fence = async |keys| {
        answer(&mut reads, &service, locate(id, keys));
        let response::Call::Locate(located) = next(&mut reads).await else { panic!("a locate") };
        located.fence_ms
    };
    let needed = |keys| millis(Rules::default().fence(keys as u64 * BYTES));
    let (few, many) = (2, 1024);
    timeout(DEADLINE, async { while fence(few).await < needed(few) {} }).await.expect("in time");
    disk.hang(true);
    assert_eq!(fence(few).await, needed(few));
    let short = fence(many).await;
    assert!(short < needed(many), "not in the log yet: {short} ms");
    disk.hang(false);
    timeout(DEADLINE, async { while fence(many).await == short {} }).await.expect("in time");
    assert_eq!(fence(many).await, needed(many));
    drop(maintenance);
}

/// Sends an HTTP request and returns the status line.
async fn http(address: std::net::SocketAddr, head: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let length = body.len();
    let request = format!(
        "{head} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut reply = String::new();
    timeout(DEADLINE, stream.read_to_string(&mut reply)).await.expect("in time").unwrap();
    reply.lines().next().unwrap_or_default().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn admin_call_holds_no_runtime_thread() {
    let disk = Arc::new(HangingDisk::default());
    let (service, maintenance) = start(&disk, LogSync::Interval(Duration::from_millis(10)));
    lend(&service);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let context = connection::ServerContext::for_tests(service.clone(), 0);
    let server = crate::server::Server::for_tests(&context);
    let mut tasks = JoinSet::new();
    tasks.spawn(crate::admin::serve(listener, server));
    disk.hang(true);
    let mut drain = JoinSet::new();
    drain.spawn(http(address, "POST /api/v1/drain_jobs", r#"{"segments":["h:1"]}"#));
    while service.work(0).jobs.is_empty() || !disk.is_hanging() {
        assert!(drain.try_join_next().is_none(), "refused");
        tokio::task::yield_now().await;
    }
    assert_eq!(http(address, "GET /health", "").await, "HTTP/1.1 200 OK");
    assert!(drain.try_join_next().is_none(), "acknowledged, not logged");
    disk.hang(false);
    let drained = timeout(DEADLINE, drain.join_next()).await.expect("in time");
    assert_eq!(drained.expect("a task").unwrap(), "HTTP/1.1 200 OK");
    context.stop.cancel();
    tasks.join_next().await.expect("a task").unwrap();
    drop(maintenance);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn probe_that_meets_expired_object_does_not_wait() {
    let disk = Arc::new(HangingDisk::default());
    let (service, _maintenance) = start(&disk, LogSync::Always);
    let id = lend(&service);
    put_whole(&service, id);
    let expiry =
        v1::SetExpiryRequest { caller: caller(id), keys: vec![b"a"[..].into()], ttl_ms: Some(1) };
    ask(&service, Call::SetExpiry(expiry));
    let expired = service.now() + Duration::from_millis(1);
    while !expired.has_passed(service.now()) {
        tokio::task::yield_now().await;
    }
    disk.hang(true);
    let mut tasks = JoinSet::new();
    for lease in [false, true] {
        let probe = v1::ProbeRequest {
            caller: caller(id),
            keys: vec![b"a"[..].into()],
            lease,
            ..Default::default()
        };
        answer(&mut tasks, &service, Call::Probe(probe));
        let probed = next(&mut tasks).await;
        let absent = i32::from(v1::ObjectState::Absent);
        assert!(matches!(&probed, response::Call::Probe(p) if p.states == [absent]), "{probed:?}");
    }
    assert_eq!(service.totals().counters.objects_expired, 1, "the first probe dropped it");
    disk.hang(false);
}
