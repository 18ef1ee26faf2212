//! Tests of the thread of a member: the process ends if the thread or those that it needs end, and the
//! pod of a leader has a label.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpListener,
};

use bytes::BytesMut;
use mooncake_base::{
    Moment,
    sync::{Condvar, Mutex},
};
use mooncake_election::{
    Acquisition, Basis, Bid, Change, Hold, InSyncSet, Lease, LeaseService, OwnerToken,
    SimulatedService, Snapshot,
    kubernetes::{ApiServer, LeaderLabel},
    rules::{Answer, Request},
};
use mooncake_proto::{
    native_frame::{self, ServerGreeting},
    standby::{Attached, FromLeader, FromStandby, Start, ViewStart},
};
use tokio::{sync::mpsc, time::timeout};

use super::*;
use crate::{addresses::Addresses, admin::health_of, cluster::channel::Channel};

const TTL: Duration = Duration::from_secs(1);

/// The call of the lease service that panics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Never,
    /// A call of the thread of the member.
    Announce,
    /// A call of a thread of the election.
    Acquire,
}

/// A lease service in memory of which one call panics.
#[derive(Debug)]
struct FaultyService {
    fault: Fault,
    service: Mutex<SimulatedService>,
    is_closed: Mutex<bool>,
    closed: Condvar,
}

impl FaultyService {
    fn carry_out(&self, request: &Request) -> Answer {
        self.service.lock().carry_out(request, SystemClock.now())
    }

    fn panic_at(&self, fault: Fault) {
        assert!(self.fault != fault, "planted");
    }
}

impl LeaseService for FaultyService {
    fn address(&self) -> String {
        "memory".to_owned()
    }

    fn read(&self, _: Moment) -> Result<Snapshot> {
        Ok(self.service.lock().snapshot(SystemClock.now()))
    }

    fn acquire(&self, bid: &Bid, _: Moment) -> Result<Acquisition> {
        self.panic_at(Fault::Acquire);
        match self.carry_out(&Request::Acquire(bid.clone())) {
            Answer::Acquisition(acquisition) => Ok(acquisition),
            other => {
                Err(Error::internal("not an acquisition").with("answer", format!("{other:?}")))
            }
        }
    }

    fn renew(&self, lease: &Lease, _: Moment) -> Result<Hold> {
        match self.carry_out(&Request::Renew(*lease)) {
            Answer::Hold(hold) => Ok(hold),
            other => Err(Error::internal("not a renewal").with("answer", format!("{other:?}"))),
        }
    }

    fn announce(&self, lease: &Lease, address: &str, _: Moment) -> Result<Hold> {
        self.panic_at(Fault::Announce);
        Ok(self.service.lock().announce(lease, address, SystemClock.now()))
    }

    fn change_in_sync(&self, change: &Change, _: Moment) -> Result<Hold> {
        Ok(self.service.lock().change(change, SystemClock.now()))
    }

    fn mark_lost(&self, lost: &InSyncSet, _: Moment) -> Result<()> {
        self.carry_out(&Request::MarkLost(lost.clone()));
        Ok(())
    }

    fn release(&self, lease: &Lease, _: Moment) -> Result<()> {
        self.carry_out(&Request::Release(*lease));
        Ok(())
    }

    fn watch(&self, _: &Snapshot, deadline: Moment) -> Result<Snapshot> {
        let mut is_closed = self.is_closed.lock();
        while !*is_closed && !deadline.has_passed(SystemClock.now()) {
            self.closed.wait_for(&mut is_closed, deadline.left(SystemClock.now()));
        }
        Ok(self.service.lock().snapshot(SystemClock.now()))
    }

    fn close(&self) {
        *self.is_closed.lock() = true;
        self.closed.notify_all();
    }
}

/// A member that is elected, with the lease service of its own.
struct Member {
    handle: MemberHandle,
    server: Arc<Server>,
    service: Arc<FaultyService>,
    _folder: tempfile::TempDir,
}

fn start_member(fault: Fault, label: Option<LeaderLabel>) -> Member {
    start_member_with(fault, label, |member, service| {
        service.set_in_sync(InSyncSet::founded_by(&MemberId::new(member.member()).unwrap()));
    })
}

fn start_member_with(
    fault: Fault,
    label: Option<LeaderLabel>,
    prepare: impl FnOnce(&mut Membership, &mut SimulatedService),
) -> Member {
    let folder = tempfile::tempdir().unwrap();
    let directory = Arc::new(Directory::lock(folder.path()).unwrap());
    let mut member = Membership::open(Arc::clone(&directory)).unwrap();
    let mut service = SimulatedService::new(TTL);
    prepare(&mut member, &mut service);
    let service = Arc::new(FaultyService {
        fault,
        service: Mutex::new(service),
        is_closed: Mutex::default(),
        closed: Condvar::new(),
    });
    let mut config = MasterConfig::embedded();
    config.cluster.lease_ttl = TTL;
    let rpc = ([127, 0, 0, 1], 1).into();
    let addresses = Addresses { rpc, admin: None, metadata: None, events: None };
    let server = Server::new(config, SystemClock::shared(), addresses, "".into(), None);
    let backend = Backend { lease_service: Arc::clone(&service) as _, label };
    let address = "127.0.0.1:1".to_owned();
    let server = Arc::new(server);
    let handle =
        MemberHandle::start_with(backend, Arc::clone(&server), directory, address).unwrap();
    Member { handle, server, service, _folder: folder }
}

/// A member that is elected ends with an error, and its lease is given back.
async fn check(fault: Fault) {
    let Member { handle, server, service, _folder } = start_member(fault, None);
    let error = timeout(Duration::from_secs(20), handle.cluster().ended()).await;
    let error = error.expect("the process ends");
    assert!(error.to_string().contains("panicked"), "{error}");
    let end = tokio::task::spawn_blocking(|| drop(handle));
    end.await.unwrap();
    server.kill();
    drop(server);
    let leader = service.service.lock().snapshot(SystemClock.now()).leader;
    assert!(leader.is_none(), "the lease is given back: {leader:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn panic_of_a_members_thread_ends_the_process() {
    check(Fault::Announce).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn panic_of_an_elections_thread_ends_the_process() {
    check(Fault::Acquire).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn health_of_a_leader_names_its_address_and_view() {
    let Member { handle, server, service: _service, _folder } = start_member(Fault::Never, None);
    let serving = async {
        while handle.cluster().status(None).state != "serving" {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(20), serving).await.expect("it leads");
    let health = health_of(&server);
    assert_eq!(health["role"], "leader", "{health}");
    assert_eq!(health["leader_address"], "127.0.0.1:1", "{health}");
    assert_eq!(health["view_version"], 1, "{health}");
    assert_eq!(health["log"], "healthy", "{health}");
    tokio::task::spawn_blocking(|| drop(handle)).await.unwrap();
    assert_eq!(health_of(&server)["role"], "standby");
    server.kill();
}

/// Answers changes of a pod, one connection at a time, and passes their bodies on.
fn serve_pods(listener: &TcpListener, bodies: &mpsc::Sender<serde_json::Value>) {
    for stream in listener.incoming() {
        let mut reader = BufReader::new(stream.unwrap());
        let mut length = 0;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
            if line.trim().is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        let head = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}";
        reader.get_mut().write_all(head).unwrap();
        if bodies.blocking_send(serde_json::from_slice(&body).unwrap()).is_err() {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pod_has_the_label_while_its_master_serves() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (sender, mut bodies) = mpsc::channel(8);
    std::thread::spawn(move || serve_pods(&listener, &sender));
    let api = ApiServer::new(&url, "default", None, None).unwrap();
    let label = LeaderLabel::start(api, "m-0").unwrap();
    let member = start_member(Fault::Never, Some(label));
    let mut next = async || {
        let body = timeout(Duration::from_secs(20), bodies.recv()).await.unwrap().unwrap();
        body["metadata"]["labels"]["mooncake.io/store-role"].clone()
    };
    // The first change removes what an earlier process has left, unless it leads by then.
    let mut present = next().await;
    if present.is_null() {
        present = next().await;
    }
    assert_eq!(present, "leader");
    let Member { handle, server, .. } = member;
    tokio::task::spawn_blocking(|| drop(handle)).await.unwrap();
    server.kill();
    assert!(next().await.is_null());
}

/// Takes the next standby's connection as a leader of view 1 whose log is another one.
fn accept_as_old_leader(listener: &TcpListener) -> Channel {
    let (stream, _) = listener.accept().unwrap();
    let mut channel = Channel::over(stream, BytesMut::new()).unwrap();
    channel.receive_exact::<12>().unwrap();
    let version = native_frame::VERSION;
    channel.send(&ServerGreeting { version, ..ServerGreeting::default() }).unwrap();
    channel.begin_checksums();
    let first: FromStandby = channel.receive().unwrap();
    assert!(first.attach.is_some());
    let start = Start::FirstFrame.into();
    let timeline_id = vec![7; 16];
    let attached = Attached { view: 1, timeline_id, start, end_frame: 1, ..Attached::default() };
    channel.send(&FromLeader { attached: Some(attached), ..FromLeader::default() }).unwrap();
    channel
}

#[tokio::test(flavor = "multi_thread")]
async fn standby_does_not_follow_a_leader_of_an_earlier_view() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let member = start_member_with(Fault::Never, None, |member, service| {
        member.lead(ViewStart { view: 6, first_frame: 1 }).unwrap();
        let set = InSyncSet::founded_by(&MemberId::new("other").unwrap());
        let bid = Bid { owner: OwnerToken::new(1), basis: Basis::Founder, set };
        let now = SystemClock.now();
        let Answer::Acquisition(Acquisition::Acquired(view)) =
            service.carry_out(&Request::Acquire(bid.clone()), now)
        else {
            panic!("nobody leads");
        };
        service.announce(&bid.lease(view), &address, now);
    });
    let ended = tokio::task::spawn_blocking(move || {
        accept_as_old_leader(&listener).receive::<FromStandby>().unwrap_err()
    });
    timeout(Duration::from_secs(20), ended).await.unwrap().unwrap();
    let Member { handle, server, _folder, .. } = member;
    tokio::task::spawn_blocking(|| drop(handle)).await.unwrap();
    server.kill();
    drop(server);
    let directory = Arc::new(Directory::lock(_folder.path()).unwrap());
    let views = Membership::open(directory).unwrap().views();
    assert_eq!(views, [ViewStart { view: 6, first_frame: 1 }], "its log was not replaced");
}
