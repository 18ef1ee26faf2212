//! A pause of the master, in which clients hung up.

use std::{pin::pin, sync::Arc};

use mooncake_base::clock::ManualClock;
use tokio::time::timeout;

use super::*;

#[tokio::test]
async fn call_waits_for_client_that_hung_up_during_pause() {
    let clock = Arc::new(ManualClock::default());
    let service = Service::new(Rules::default(), clock.clone());
    let id = lend(&service);
    let heartbeat = || v1::Request {
        call: Some(Call::Heartbeat(v1::HeartbeatRequest {
            caller: caller(id),
            ..Default::default()
        })),
        ..Default::default()
    };
    let connection = service.open_session(false);
    service.dispatch(heartbeat(), &connection);
    service.advance();
    clock.advance(Duration::from_secs(8));
    service.close_session(&connection, ConnectionEnd::ByPeer);
    let start = put_start(id, &[("a", 64)]);
    let call = Call::PutStart(start.clone());
    let mut waits = pin!(service.wait_for_owners(Some(&call)));
    timeout(Duration::ZERO, &mut waits).await.expect_err("the call waits");
    let connection = service.open_session(false);
    service.dispatch(heartbeat(), &connection);
    timeout(Duration::from_secs(10), waits).await.expect("the client is back");
    assert!(started(&service, start).1.failures.is_empty());
}
