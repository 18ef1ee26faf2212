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

#[tokio::test]
async fn clearing_waits_for_owner_that_hung_up_during_pause() {
    let clock = Arc::new(ManualClock::default());
    let service = Service::new(Rules::default(), clock.clone());
    let id = lend(&service);
    let (_, columns) = started(&service, put_start(id, &[("a", 64)]));
    assert_eq!(failures(&ask(&service, put_end(id, &columns.versions))), 0);
    let heartbeat = || {
        let beat = v1::HeartbeatRequest { caller: caller(id), ..Default::default() };
        v1::Request { call: Some(Call::Heartbeat(beat)), ..Default::default() }
    };
    let connection = service.open_session(false);
    service.dispatch(heartbeat(), &connection);
    service.advance();
    clock.advance(Duration::from_secs(8));
    service.close_session(&connection, ConnectionEnd::ByPeer);
    let keys = vec![Bytes::from_static(b"a")];
    let clear = v1::ClearReplicasRequest { caller: caller(id), keys, segment: String::new() };
    let call = Call::ClearReplicas(clear);
    let mut waits = pin!(service.wait_for_owners(Some(&call)));
    timeout(Duration::ZERO, &mut waits).await.expect_err("the call waits");
    let connection = service.open_session(false);
    service.dispatch(heartbeat(), &connection);
    timeout(Duration::from_secs(10), waits).await.expect("the client is back");
}

/// Each key is looked at once by each call, and once more for each return of an owner.
#[tokio::test]
async fn returning_clients_do_not_make_calls_look_at_all_keys_again() {
    const CLIENTS: usize = 20;
    const KEYS: usize = 200;
    const CALLS: usize = 50;
    let clock = Arc::new(ManualClock::default());
    let service = Arc::new(Service::new(Rules::default(), clock.clone()));
    let id = |client: usize| ClientId::from_bits(client as u128 + 1);
    for client in 0..CLIENTS {
        let name = format!("h:{client}");
        let register =
            v1::RegisterRequest { caller: caller(id(client)), name, ..Default::default() };
        ask(&service, Call::Register(register));
        let id_bytes = Bytes::copy_from_slice(&[client as u8 + 1; 16]);
        let segments = vec![v1::Segment { id: id_bytes, ..segment() }];
        let mount = v1::MountRequest { caller: caller(id(client)), segments, ..Default::default() };
        ask(&service, Call::Mount(mount));
    }
    let keys: Vec<(String, u64)> = (0..KEYS).map(|key| (format!("k{key}"), 64)).collect();
    let (_, columns) = started(&service, put_start(id(0), &keys));
    assert_eq!(failures(&ask(&service, put_end(id(0), &columns.versions))), 0);
    let beat = |client: usize| {
        let caller = caller(id(client));
        let beat = v1::HeartbeatRequest { caller, ..Default::default() };
        v1::Request { call: Some(Call::Heartbeat(beat)), ..Default::default() }
    };
    let connections: Vec<_> = (0..CLIENTS).map(|_| service.open_session(false)).collect();
    for (client, connection) in connections.iter().enumerate() {
        service.dispatch(beat(client), connection);
    }
    service.advance();
    clock.advance(Duration::from_secs(8));
    connections
        .iter()
        .for_each(|connection| service.close_session(connection, ConnectionEnd::ByPeer));
    let names = keys.iter().map(|(key, _)| key);
    let locate = v1::LocateRequest { keys: Some(v1::KeyColumn::pack(names)), ..Default::default() };
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..CALLS {
        let (service, call) = (service.clone(), Call::Locate(locate.clone()));
        waiting.spawn(async move { service.wait_for_owners(Some(&call)).await });
    }
    for client in 0..CLIENTS {
        for _ in 0..2 * CALLS {
            tokio::task::yield_now().await;
        }
        assert!(waiting.try_join_next().is_none(), "an owner is missing");
        service.dispatch(beat(client), &service.open_session(false));
    }
    timeout(Duration::from_secs(30), waiting.join_all()).await.expect("all are back");
    let looks = service.clients.looks();
    assert!(looks <= (CALLS * (KEYS + 8 * CLIENTS)) as u64, "{looks} looks");
}
