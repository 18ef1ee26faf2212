//! A master that stops, and one that takes its place.

use std::{pin::pin, sync::Arc};

use mooncake_base::clock::ManualClock;
use tokio::time::timeout;

use super::*;
use crate::service::connection::{Connection, ServerContext};

#[test]
fn stopping_master_finds_objects_of_clients_that_hang_up() {
    let (service, id) = lent();
    let (_, columns) = started(&service, put_start(id, &[("a", 1)]));
    assert_eq!(failures(&ask(&service, put_end(id, &columns.versions))), 0);
    let context = ServerContext::for_tests(Arc::new(service), 0);
    let connected = || {
        let connection = Connection::new(&context, true, None);
        let beat = v1::HeartbeatRequest { caller: caller(id), ..Default::default() };
        let request = v1::Request { call: Some(Call::Heartbeat(beat)), ..Default::default() };
        context.service.dispatch(request, &connection.origin);
        connection
    };
    drop(connected());
    assert!(!is_readable(&context.service, "a"), "its client has hung up");
    let mut connection = connected();
    assert!(is_readable(&context.service, "a"));
    context.stop.cancel();
    connection.record_read(&Ok(0));
    drop(connection);
    assert!(is_readable(&context.service, "a"));
}

#[tokio::test]
async fn put_waits_for_memory_that_comes_from_another_master() {
    let clock = Arc::new(ManualClock::default());
    let service = Service::new(Rules::default(), clock.clone());
    let register = |bits: u64, log_mark: Option<v1::LogMark>| {
        let caller = caller(ClientId::from_bits(bits.into()));
        let name = format!("h:{bits}");
        let register = v1::RegisterRequest { caller, name, log_mark, ..Default::default() };
        ask(&service, Call::Register(register));
    };
    let put = Call::PutStart(put_start(ClientId::from_bits(7), &[("a", 64)]));
    let waits = async || {
        let wait = pin!(service.wait_for_owners(Some(&put)));
        timeout(Duration::ZERO, wait).await.is_err()
    };
    register(7, None);
    assert!(!waits().await, "nothing has been here before");
    register(7, Some(v1::LogMark { master: 9, timeline: 9, synced_frame: 9 }));
    assert!(waits().await);
    let mut wait = pin!(service.wait_for_owners(Some(&put)));
    timeout(Duration::ZERO, &mut wait).await.expect_err("there is no memory yet");
    lend(&service);
    timeout(Duration::from_secs(10), wait).await.expect("there is memory");
    assert!(!waits().await);
}

#[tokio::test]
async fn put_does_not_wait_for_ever_for_memory_of_another_master() {
    let clock = Arc::new(ManualClock::default());
    let service = Service::new(Rules::default(), clock.clone());
    let id = ClientId::from_bits(7);
    let put = Call::PutStart(put_start(id, &[("a", 64)]));
    for wait in [Duration::ZERO, Rules::default().resume_grace] {
        let log_mark = Some(v1::LogMark { master: 9, timeline: 9, synced_frame: 9 });
        let name = "h:7".to_owned();
        let register =
            v1::RegisterRequest { caller: caller(id), name, log_mark, ..Default::default() };
        ask(&service, Call::Register(register));
        clock.advance(wait);
    }
    let waiting = service.wait_for_owners(Some(&put));
    timeout(Duration::from_secs(10), waiting).await.expect("the grace is over");
}
