//! A disk that hangs holds up the calls that must be logged, and no other.

use std::sync::Arc;

use tokio::{task::JoinSet, time::timeout};

use super::*;
use crate::{
    LogSync,
    journal::{Directory, hanging_disk::HangingDisk},
};

const DEADLINE: Duration = Duration::from_secs(30);

/// Answers a call on the runtime, as a connection does.
fn answer(tasks: &mut JoinSet<response::Call>, service: &Arc<Service>, call: Call) {
    let service = service.clone();
    let request = v1::Request { call: Some(call), ..Default::default() };
    tasks.spawn(async move {
        service.answer(request, &Origin::in_process(), ()).await.call.expect("an answer")
    });
}

async fn next(tasks: &mut JoinSet<response::Call>) -> response::Call {
    let answered = timeout(DEADLINE, tasks.join_next()).await.expect("answered in time");
    answered.expect("a task").unwrap()
}

fn put(id: ClientId, key: &str) -> Call {
    Call::PutStart(v1::PutStartRequest {
        caller: caller(id),
        items: vec![v1::PutItem {
            key: Bytes::copy_from_slice(key.as_bytes()),
            length: 64,
            ..Default::default()
        }],
        ..Default::default()
    })
}

fn locate(id: ClientId) -> Call {
    let keys = vec![Bytes::from_static(b"a")];
    Call::Locate(v1::LocateRequest { caller: caller(id), keys, ..Default::default() })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hanging_disk_delays_only_changes() {
    for sync in [LogSync::Always, LogSync::Interval(Duration::from_millis(10))] {
        let disk = Arc::new(HangingDisk::default());
        let opened = Journal::open(Directory::on(disk.clone()), sync).unwrap();
        let (service, _) = Service::from_log(Rules::default(), SystemClock::shared(), opened);
        let service = Arc::new(service);
        let id = lend(&service);
        let expired = service.totals().counters.clients_expired;
        disk.hang(true);
        let (mut changes, mut others) = (JoinSet::new(), JoinSet::new());
        for nth in 0..50 {
            answer(&mut changes, &service, put(id, &nth.to_string()));
        }
        while !disk.is_hanging() {
            tokio::task::yield_now().await;
        }
        for _ in 0..100 {
            let heartbeat = v1::HeartbeatRequest { caller: caller(id), ..Default::default() };
            answer(&mut others, &service, Call::Heartbeat(heartbeat));
            let beat = next(&mut others).await;
            assert!(matches!(beat, response::Call::Heartbeat(beat) if beat.is_known));
            answer(&mut others, &service, locate(id));
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
    }
}
