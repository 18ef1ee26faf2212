//! Tests of the thread of a member: the process ends if the thread or those that it needs end, and the
//! pod of a leader has a label.

use std::{
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpListener},
};

use bytes::BytesMut;
use mooncake_base::{
    Endpoint, Moment,
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
    standby::{Attached, Frames, FromLeader, FromStandby, Start, ViewStart},
};
use tokio::{sync::mpsc, time::timeout};

use super::*;
use crate::{
    addresses::Addresses,
    admin::health_of,
    cluster::{backend::Dialing, channel::Channel, status::ClusterStatus},
    journal::{Disk, LogFile, LogSync, SimulatedDisk, hanging_disk::forward},
    state::Effect,
};

const TTL: Duration = Duration::from_secs(1);

const DEADLINE: Duration = Duration::from_secs(20);

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
    id: MemberId,
    _folder: Option<tempfile::TempDir>,
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
    let directory = Directory::lock(folder.path()).unwrap();
    let dialing = Dialing::default();
    Member { _folder: Some(folder), ..start_member_on(directory, dialing, fault, label, prepare) }
}

fn start_member_on(
    directory: Directory,
    dialing: Dialing,
    fault: Fault,
    label: Option<LeaderLabel>,
    prepare: impl FnOnce(&mut Membership, &mut SimulatedService),
) -> Member {
    let directory = Arc::new(directory);
    let mut member = Membership::open(Arc::clone(&directory)).unwrap();
    let mut service = SimulatedService::new(TTL);
    prepare(&mut member, &mut service);
    let id = MemberId::new(member.member()).unwrap();
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
    let backend = Backend { lease_service: Arc::clone(&service) as _, label, dialing };
    let address = "127.0.0.1:1".to_owned();
    let server = Arc::new(server);
    let handle =
        MemberHandle::start_with(backend, Arc::clone(&server), directory, address).unwrap();
    Member { handle, id, server, service, _folder: None }
}

impl Member {
    async fn serves(&self) {
        let serving = async {
            while self.handle.cluster().status(None).state != "serving" {
                tokio::task::yield_now().await;
            }
        };
        timeout(DEADLINE, serving).await.expect("it leads");
    }

    async fn end(self) {
        let Self { handle, server, .. } = self;
        tokio::task::spawn_blocking(|| drop(handle)).await.unwrap();
        server.kill();
    }
}

/// A member that is elected ends with an error, and its lease is given back.
async fn check(fault: Fault) {
    let Member { handle, server, service, _folder, .. } = start_member(fault, None);
    let error = timeout(DEADLINE, handle.cluster().ended()).await;
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
    let member = start_member(Fault::Never, None);
    member.serves().await;
    let server = Arc::clone(&member.server);
    let health = health_of(&server);
    assert_eq!(health["role"], "leader", "{health}");
    assert_eq!(health["leader_address"], "127.0.0.1:1", "{health}");
    assert_eq!(health["view_version"], 1, "{health}");
    assert_eq!(health["log"], "healthy", "{health}");
    let Member { handle, _folder, .. } = member;
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
        let body = timeout(DEADLINE, bodies.recv()).await.unwrap().unwrap();
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

/// Takes the next standby's connection as a leader whose log is another one.
fn accept_as_stranger(listener: &TcpListener, view: u64) -> Channel {
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
    let attached = Attached { view, timeline_id, start, end_frame: 1, ..Attached::default() };
    channel.send(&FromLeader { attached: Some(attached), ..FromLeader::default() }).unwrap();
    channel
}

/// A member with a log that was written in a view meets the first leader of a set, with another log. The
/// views of the set have a base. Returns the size of the member's log afterwards, in frames, and its views.
async fn meet_stranger(own_view: u64, view_base: u64) -> (u64, Vec<ViewStart>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let disk = SimulatedDisk::default();
    let directory = || Directory::on(Arc::new(disk.clone()));
    let journal = Journal::open(directory(), LogSync::Never).unwrap().journal;
    journal.append(|into| {
        Effect::Quota { tenant: "kept", bytes: Some(7) }.encode(into);
        1
    });
    journal.write_only();
    drop(journal);
    let dialing = Dialing::default();
    let member = start_member_on(directory(), dialing, Fault::Never, None, |member, service| {
        member.lead(ViewStart { view: own_view, first_frame: 1 }).unwrap();
        let_other_lead(service, &address);
        let set = service.in_sync().unwrap().clone();
        service.set_in_sync(InSyncSet { view_base, ..set });
    });
    let ended = tokio::task::spawn_blocking(move || {
        let mut leader = accept_as_stranger(&listener, view_base + 1);
        // One that follows is silent until there are frames.
        let frames = Some(Frames { position: 1, ..Frames::default() });
        let _ = leader.send(&FromLeader { frames, ..FromLeader::default() });
        leader.receive::<FromStandby>()
    });
    let confirmed = timeout(DEADLINE, ended).await.unwrap().unwrap().is_ok();
    member.end().await;
    let directory = Arc::new(directory());
    let views = Membership::open(Arc::clone(&directory)).unwrap().views();
    let log = StandbyLog::open(directory, LogSync::Never).unwrap();
    assert_eq!(confirmed, log.is_empty(), "it confirms what replaces its log");
    (log.place().1, views)
}

#[tokio::test(flavor = "multi_thread")]
async fn member_with_a_log_follows_no_cluster_founded_anew() {
    for own_view in [6, 0] {
        let kept = vec![ViewStart { view: own_view, first_frame: 1 }];
        assert_eq!(meet_stranger(own_view, 0).await, (2, kept), "its log was not replaced");
    }
    // An operator forced a leader whose log is another one.
    assert_eq!(meet_stranger(0, 1 << 32).await, (1, Vec::new()));
}

/// A gate that threads wait at until it is opened.
#[derive(Debug, Default)]
struct Gate {
    /// Whether a thread waits, and whether the gate is open.
    state: Mutex<(bool, bool)>,
    changed: Condvar,
}

impl Gate {
    const fn new() -> Self {
        Self { state: Mutex::new((false, false)), changed: Condvar::new() }
    }

    fn pass(&self) {
        let mut state = self.state.lock();
        state.0 = true;
        self.changed.notify_all();
        let end = SystemClock.now() + 3 * DEADLINE;
        while !state.1 && !end.has_passed(SystemClock.now()) {
            self.changed.wait_for(&mut state, end.left(SystemClock.now()));
        }
        state.0 = false;
    }

    fn has_waiting(&self) -> bool {
        self.state.lock().0
    }

    fn open(&self) {
        self.state.lock().1 = true;
        self.changed.notify_all();
    }

    /// Waits until a thread waits at the gate. `meanwhile` is called again and again.
    async fn reached(&self, meanwhile: impl Fn()) {
        let reached = async {
            while !self.has_waiting() {
                meanwhile();
                tokio::task::yield_now().await;
            }
        };
        timeout(DEADLINE, reached).await.expect("a thread comes to the gate");
    }
}

/// Lets another member lead, with an address that clients may be told. Returns its lease.
fn let_other_lead(service: &mut SimulatedService, address: &str) -> Lease {
    let set = InSyncSet::founded_by(&MemberId::new("other").unwrap());
    let bid = Bid { owner: OwnerToken::new(1), basis: Basis::Founder, set };
    let now = SystemClock.now();
    let acquired = service.carry_out(&Request::Acquire(bid.clone()), now);
    let Answer::Acquisition(Acquisition::Acquired(view)) = acquired else {
        panic!("nobody leads: {acquired:?}");
    };
    let lease = bid.lease(view);
    service.announce(&lease, address, now);
    lease
}

static RESOLVER: Gate = Gate::new();

fn resolve_late(_: &Endpoint, _: Moment) -> Result<Vec<SocketAddr>> {
    RESOLVER.pass();
    Err(Error::closed("the gate was opened"))
}

#[tokio::test(flavor = "multi_thread")]
async fn standby_takes_over_while_a_name_is_resolved() {
    let directory = Directory::on(Arc::new(SimulatedDisk::default()));
    let dialing = Dialing { resolve: resolve_late, timeout: Duration::from_secs(3600) };
    let mut lease = None;
    let member = start_member_on(directory, dialing, Fault::Never, None, |_, service| {
        lease = Some(let_other_lead(service, "slow.invalid:50051"));
    });
    let lease = lease.unwrap();
    // The other one leads until the standby waits for its address.
    RESOLVER.reached(|| drop(member.service.carry_out(&Request::Renew(lease)))).await;
    member.service.service.lock().set_in_sync(InSyncSet::founded_by(&member.id));
    member.service.carry_out(&Request::Release(lease));
    member.serves().await;
    assert!(RESOLVER.has_waiting(), "the name is still being resolved");
    RESOLVER.open();
    member.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn standby_that_is_about_to_join_is_not_in_sync() {
    let member = start_member(Fault::Never, None);
    member.serves().await;
    let service = member.server.service().unwrap();
    let journal = service.shared().journal().unwrap();
    journal.require_standbys(&["b".to_owned()].into());
    let mut status = member.handle.cluster().status(Some(journal));
    assert_eq!(status.in_sync, [member.id.to_string()]);
    status.standbys[0].is_attached = true;
    let shown = |status: &ClusterStatus| {
        (status.to_json()["standbys"][0]["is_in_sync"].clone(), status.standbys_in_sync())
    };
    assert!(status.standbys[0].is_required, "changes wait for it");
    assert_eq!(shown(&status), (false.into(), 0));
    status.in_sync.push("b".to_owned());
    assert_eq!(shown(&status), (true.into(), 1));
    drop(service);
    member.end().await;
}

/// A disk that syncs a snapshot only when its gate is open.
#[derive(Debug, Default)]
struct SlowSnapshots {
    disk: SimulatedDisk,
    gate: Arc<Gate>,
}

#[derive(Debug)]
struct SlowFile(Arc<dyn LogFile>, Arc<Gate>);

impl LogFile for SlowFile {
    fn append(&self, bytes: &[u8]) -> io::Result<()> {
        self.0.append(bytes)
    }

    fn truncate(&self, length: u64) -> io::Result<()> {
        self.0.truncate(length)
    }

    fn sync(&self) -> io::Result<()> {
        self.1.pass();
        self.0.sync()
    }
}

impl Disk for SlowSnapshots {
    forward! {
        list() -> io::Result<Vec<String>>;
        read(name: &str) -> io::Result<Vec<u8>>;
        read_part(name: &str, offset: u64, length: usize) -> io::Result<Vec<u8>>;
        open(name: &str) -> io::Result<Arc<dyn LogFile>>;
        rename(from: &str, to: &str) -> io::Result<()>;
        remove(name: &str) -> io::Result<()>;
        sync_directory() -> io::Result<()>;
        boot_id() -> [u8; 16];
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        let file = self.disk.create(name)?;
        let is_snapshot = name == "snapshot.new";
        Ok(if is_snapshot { Arc::new(SlowFile(file, Arc::clone(&self.gate))) } else { file })
    }
}

/// Writes so long a log that a standby makes a snapshot of it at once.
fn write_long_log(disk: &SimulatedDisk) {
    let directory = Directory::on(Arc::new(disk.clone()));
    let journal = Journal::open(directory, LogSync::Never).unwrap().journal;
    let tenant = "t".repeat(1 << 20);
    for _ in 0..65 {
        journal.append(|into| {
            Effect::Quota { tenant: &tenant, bytes: None }.encode(into);
            1
        });
        journal.write_only();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn standby_takes_over_while_it_writes_a_snapshot() {
    let disk = Arc::new(SlowSnapshots::default());
    write_long_log(&disk.disk);
    let directory = Directory::on(Arc::clone(&disk) as _);
    let dialing = Dialing::default();
    let member = start_member_on(directory, dialing, Fault::Never, None, |_, service| {
        service.set_in_sync(InSyncSet::founded_by(&MemberId::new("other").unwrap()));
    });
    disk.gate.reached(|| ()).await;
    member.service.service.lock().set_in_sync(InSyncSet::founded_by(&member.id));
    member.serves().await;
    assert!(disk.gate.has_waiting(), "the snapshot is still being written");
    let service = member.server.service().unwrap();
    let position = service.shared().journal().unwrap().append(|into| {
        Effect::Quota { tenant: "late", bytes: Some(7) }.encode(into);
        1
    });
    service.shared().journal().unwrap().wait_durable(position).unwrap();
    drop(service);
    disk.gate.open();
    member.end().await;
    let names = disk.disk.list().unwrap();
    assert!(!names.iter().any(|name| name.starts_with("snapshot-")), "it was given up: {names:?}");
}
