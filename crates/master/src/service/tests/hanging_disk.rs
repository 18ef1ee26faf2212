//! A disk that hangs holds up the calls that must be logged, and no other.

use std::sync::Arc;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::{
    LogSync,
    journal::{Directory, Maintenance, hanging_disk::HangingDisk},
};

const DEADLINE: Duration = Duration::from_secs(30);

/// Answers a call on the runtime, as a connection does.
fn answer(tasks: &mut JoinSet<response::Call>, service: &Arc<Service>, call: Call) {
    let service = service.clone();
    let request = v1::Request { call: Some(call), ..Default::default() };
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
    let stop = CancellationToken::new();
    let token = crate::config::Secret::default();
    let settings = crate::admin::Settings { token, has_upstream_metrics: true, hosts: Vec::new() };
    let stopped = stop.clone();
    let mut server = JoinSet::new();
    server.spawn(crate::admin::serve(listener, service.clone(), settings, stopped));
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
    stop.cancel();
    server.join_next().await.expect("a task").unwrap();
    drop(maintenance);
}
