//! Tests of killed dummy clients: which calls reach the master, and how soon. The dummy client is
//! this test binary, run as a child process.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that fails should stop")]

use std::{
    env::current_exe,
    io::{BufRead as _, BufReader},
    process::{Child, Command, Stdio},
    sync::{Arc, mpsc},
    time::Duration,
};

use mooncake_base::{
    ClientId, Clock as _, Endpoint, ErrorCode, SystemClock, TenantId, exposition::Exposition,
};
use mooncake_daemon::{Listeners, Relay, RelayLimits, RelaySettings};
use mooncake_proto::{
    native_frame::DaemonGreeting,
    v1::{self, request::Call, response},
};
use mooncake_store_client::{DaemonLink, InProcessLink, LinkConfig, MasterLink as _};

const PATIENCE: Duration = Duration::from_secs(30);

/// Prefix of the argument that makes the binary a child; it looks like a test name filter.
const CHILD: &str = "dummy-of-";

/// A master that grants a fence of one minute and passes on the requests it receives.
fn link(asked: mpsc::SyncSender<v1::Request>) -> Arc<InProcessLink> {
    Arc::new(InProcessLink::new("a test", move |request| {
        let located = v1::LocatedColumns {
            fences: vec![7],
            versions: vec![9],
            objects: vec![3],
            ..Default::default()
        };
        let answer = match &request.call {
            Some(Call::Locate(_)) => response::Call::Locate(v1::LocateResponse {
                columns: Some(located),
                fence_ms: 60_000,
                ..Default::default()
            }),
            _ => response::Call::Unregister(v1::UnregisterResponse {}),
        };
        asked.send(request).unwrap();
        Ok(v1::Response { call: Some(answer), ..v1::Response::default() })
    }))
}

/// The child: locates an object, reports that and stays alive.
fn read_on(address: &str) {
    let link = DaemonLink::connect(address, LinkConfig::default(), PATIENCE).unwrap();
    let caller = v1::Caller {
        client: ClientId::random().to_bytes().to_vec().into(),
        tenant: "not its own".to_owned(),
    };
    let locate = v1::LocateRequest { caller: Some(caller), fence: true, ..Default::default() };
    let request = v1::Request { call: Some(Call::Locate(locate)), ..Default::default() };
    link.call(request, SystemClock.now() + PATIENCE).unwrap();
    println!("reading");
    std::thread::park_timeout(4 * PATIENCE);
}

/// A dummy client in its own process that holds a read fence, and its daemon.
struct DummyProcess {
    process: Child,
    caller: v1::Caller,
    relay: Relay,
    asked: mpsc::Receiver<v1::Request>,
}

impl DummyProcess {
    /// Starts both on behalf of `test`. Returns `None` in the child process.
    fn start(test: &str) -> Option<Self> {
        if let Some(address) =
            std::env::args().find_map(|a| Some(a.strip_prefix(CHILD)?.to_owned()))
        {
            read_on(&address);
            return None;
        }
        let (sender, asked) = mpsc::sync_channel(16);
        let settings = RelaySettings {
            limits: RelayLimits::default(),
            link: link(sender),
            daemon: DaemonGreeting::default(),
            host: "127.0.0.1".to_owned(),
            tenant: TenantId::new("t"),
            rpc_timeout: PATIENCE,
        };
        let relay = Relay::start(Listeners::bind(0).unwrap(), settings).unwrap();
        let address = Endpoint::new("127.0.0.1", relay.address().port());
        let mut process = Command::new(current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .arg(format!("{CHILD}{address}"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().ends_with("reading")));
        let Some(Call::Locate(located)) = asked.recv_timeout(PATIENCE).unwrap().call else {
            panic!("unexpected call");
        };
        Some(Self { process, caller: located.caller.unwrap(), relay, asked })
    }
}

impl Drop for DummyProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn killed_dummy_client_is_released_at_once() {
    let test = "killed_dummy_client_is_released_at_once";
    let Some(mut dummy) = DummyProcess::start(test) else { return };
    assert_eq!(dummy.caller.tenant, "t", "the tenant is the daemon's");
    assert!(dummy.asked.try_recv().is_err(), "a live client is left alone");
    dummy.process.kill().unwrap();
    dummy.process.wait().unwrap();
    let received = dummy.asked.recv_timeout(PATIENCE).unwrap();
    let caller = Some(dummy.caller.clone());
    assert_eq!(received.call, Some(Call::Unregister(v1::UnregisterRequest { caller })));
    let fence = v1::FenceRelease { fence: 7, versions: vec![9], objects: vec![3] };
    assert_eq!(received.released_fences, [fence]);
    assert_eq!(dummy.relay.dummy_clients(), 0);
    let mut metrics = Exposition::default();
    dummy.relay.metrics()(&mut metrics);
    for line in ["mooncake_daemon_calls_total 1", "mooncake_daemon_dead_guests_total 1"] {
        assert!(metrics.text().lines().any(|found| found == line), "{}", metrics.text());
    }
}

#[test]
fn other_process_cannot_use_id_of_dummy_client() {
    let test = "other_process_cannot_use_id_of_dummy_client";
    let Some(dummy) = DummyProcess::start(test) else { return };
    let address = dummy.relay.address().to_string();
    let link = DaemonLink::connect(&address, LinkConfig::default(), PATIENCE).unwrap();
    let ask = |caller: v1::Caller| {
        let call = Some(Call::Status(v1::StatusRequest { caller: Some(caller) }));
        let request = v1::Request { call, ..Default::default() };
        link.call(request, SystemClock.now() + PATIENCE).unwrap().call
    };
    match ask(dummy.caller.clone()) {
        Some(response::Call::Failure(failure)) => {
            assert_eq!(failure.code, ErrorCode::ILLEGAL_CLIENT.number(), "{failure:?}");
        }
        other => panic!("{other:?}"),
    }
    assert!(dummy.asked.try_recv().is_err(), "the master was not asked");
    assert_eq!(dummy.relay.dummy_clients(), 1);
    let own = ClientId::random().to_bytes().to_vec().into();
    let answer = ask(v1::Caller { client: own, tenant: String::new() });
    assert!(!matches!(answer, Some(response::Call::Failure(_))), "with its own id: {answer:?}");
}
