//! Tests of dummy clients that come and go while the master does not answer: what stays behind.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Duration,
};

use mooncake_base::{ClientId, Clock as _, Error, ErrorCode, SystemClock, TenantId};
use mooncake_daemon::{Listeners, Relay, RelayLimits, RelaySettings};
use mooncake_proto::{
    native_frame::DaemonGreeting,
    v1::{self, request::Call, response},
};
use mooncake_store_client::{DaemonLink, InProcessLink, LinkConfig, MasterLink as _};
use mooncake_testkit::until;

const PATIENCE: Duration = Duration::from_secs(20);

/// A daemon whose master answers only while `is_there`, and the clients that unregistered there.
struct World {
    relay: Relay,
    is_there: Arc<AtomicBool>,
    left: mpsc::Receiver<v1::Caller>,
}

impl World {
    fn start(unconnected_max: Duration) -> Self {
        let is_there = Arc::new(AtomicBool::new(true));
        let (sender, left) = mpsc::sync_channel(64);
        let answers = Arc::clone(&is_there);
        let master = InProcessLink::new("a test", move |request| {
            if !answers.load(Ordering::SeqCst) {
                return Err(Error::new(ErrorCode::RPC_FAIL, "away"));
            }
            let answer = match request.call.unwrap() {
                Call::Register(_) => response::Call::Register(v1::RegisterResponse::default()),
                Call::Unregister(request) => {
                    sender.send(request.caller.unwrap()).unwrap();
                    response::Call::Unregister(v1::UnregisterResponse {})
                }
                other => panic!("{other:?}"),
            };
            Ok(v1::Response { call: Some(answer), ..v1::Response::default() })
        });
        let settings = RelaySettings {
            limits: RelayLimits { unconnected_max, ..RelayLimits::default() },
            link: Arc::new(master),
            daemon: DaemonGreeting::default(),
            host: "127.0.0.1".to_owned(),
            tenant: TenantId::default(),
            rpc_timeout: PATIENCE,
        };
        let relay = Relay::start(Listeners::bind(0).unwrap(), settings).unwrap();
        Self { relay, is_there, left }
    }

    fn connect(&self) -> DummyClient {
        let address = self.relay.address().to_string();
        let link = DaemonLink::connect(&address, LinkConfig::default(), PATIENCE).unwrap();
        let client = ClientId::random().to_bytes().to_vec().into();
        DummyClient { link, caller: v1::Caller { client, tenant: String::new() } }
    }

    fn await_clients(&self, count: usize) {
        let has_count = || (self.relay.dummy_clients() == count).then_some(());
        until(PATIENCE, "the number of clients", has_count);
    }
}

/// A client of this process, which lives on when the client is dropped.
struct DummyClient {
    link: DaemonLink,
    caller: v1::Caller,
}

impl DummyClient {
    fn call(&self, call: Call) -> bool {
        let request = v1::Request { call: Some(call), ..Default::default() };
        let answer = self.link.call(request, SystemClock.now() + PATIENCE);
        answer.is_ok_and(|answer| !matches!(answer.call, Some(response::Call::Failure(_))))
    }

    fn register(&self) -> bool {
        let caller = Some(self.caller.clone());
        self.call(Call::Register(v1::RegisterRequest { caller, ..Default::default() }))
    }

    fn unregister(&self) -> bool {
        let caller = Some(self.caller.clone());
        self.call(Call::Unregister(v1::UnregisterRequest { caller }))
    }
}

const LONG: Duration = Duration::from_secs(3600);

#[test]
fn client_that_could_not_register_leaves_nothing() {
    let world = World::start(LONG);
    world.is_there.store(false, Ordering::SeqCst);
    let client = world.connect();
    assert!(!client.register());
    assert_eq!(world.relay.dummy_clients(), 1);
    drop(client);
    world.await_clients(0);
    world.is_there.store(true, Ordering::SeqCst);
    let next = world.connect();
    assert!(next.register() && next.unregister());
    assert_eq!(world.left.recv_timeout(PATIENCE), Ok(next.caller.clone()), "only this one");
}

#[test]
fn client_that_registers_later_is_served() {
    let world = World::start(LONG);
    world.is_there.store(false, Ordering::SeqCst);
    let client = world.connect();
    assert!(!client.register());
    world.is_there.store(true, Ordering::SeqCst);
    assert!(client.register());
    assert_eq!(world.relay.dummy_clients(), 1);
    assert!(client.unregister());
    assert_eq!(world.relay.dummy_clients(), 0);
}

#[test]
fn client_that_leaves_an_absent_master_is_released_once() {
    let world = World::start(LONG);
    let client = world.connect();
    assert!(client.register());
    world.is_there.store(false, Ordering::SeqCst);
    assert!(!client.unregister());
    assert_eq!(world.relay.dummy_clients(), 0);
    let caller = client.caller.clone();
    drop(client);
    world.is_there.store(true, Ordering::SeqCst);
    assert_eq!(world.left.recv_timeout(PATIENCE), Ok(caller), "the daemon tries again");
    let next = world.connect();
    assert!(next.register() && next.unregister());
    assert_eq!(world.left.recv_timeout(PATIENCE), Ok(next.caller.clone()), "nothing between");
}

#[test]
fn client_that_comes_back_is_not_released() {
    let world = World::start(LONG);
    let client = world.connect();
    assert!(client.register());
    world.is_there.store(false, Ordering::SeqCst);
    assert!(!client.unregister() && !client.register());
    let other = world.connect();
    assert!(!other.register() && !other.unregister());
    world.is_there.store(true, Ordering::SeqCst);
    assert!(client.register());
    assert_eq!(world.left.recv_timeout(PATIENCE), Ok(other.caller.clone()), "the other only");
}

#[test]
fn client_without_connection_is_forgotten() {
    let world = World::start(Duration::from_millis(50));
    let (gone, other) = (world.connect(), world.connect());
    assert!(gone.register() && other.register());
    drop(gone);
    world.await_clients(1);
    assert!(other.unregister());
    let left = world.left.recv_timeout(PATIENCE);
    assert_eq!(left, Ok(other.caller.clone()), "one whose process may still write is not released");
}
