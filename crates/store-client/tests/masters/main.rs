//! Links that find the master: in a list, and by the leader's key in a real etcd. Where etcd is not
//! installed its tests count as ignored.
#![allow(clippy::unwrap_used, reason = "tests, also in the functions that they share")]

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use bytes::BytesMut;
use libtest_mimic::Arguments;
use mooncake_base::{
    Clock, Endpoint, ErrorCode, Moment, SystemClock, requirement::trial, sync::Mutex,
};
use mooncake_election::{
    Acquisition, Basis, Bid, ClusterId, InSyncSet, Lease, LeaseService, MemberId, OwnerToken,
    etcd::EtcdLease,
};
use mooncake_kv_client::real_server::{RealServer, etcd, missing};
use mooncake_proto::{
    native_frame::{self, ServerGreeting},
    v1::{self, request::Call},
};
use mooncake_store_client::{LinkConfig, MasterLink, open_link};

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let no_etcd = missing("etcd", "etcd-server");
    let trials = vec![
        trial(None, "list_passes_over_masters_that_are_not_there", list_passes_over_masters),
        trial(None, "list_goes_on_when_its_master_dies", list_goes_on_when_its_master_dies),
        trial(None, "call_goes_over_to_the_next_of_a_list", call_goes_over_to_the_next_of_a_list),
        trial(None, "list_leaves_a_master_that_is_stopped", list_leaves_a_stopped_master),
        trial(None, "call_at_a_slow_master_of_a_list_goes_on", call_at_a_slow_master_goes_on),
        trial(None, "rejects_addresses_of_other_kinds", rejects_addresses_of_other_kinds),
        trial(no_etcd.clone(), "link_follows_the_leader_in_etcd", link_follows_the_leader_in_etcd),
        trial(no_etcd, "call_waits_for_the_first_leader", call_waits_for_the_first_leader),
    ];
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// A server that greets as a master and answers each call with an empty response, or with none.
struct FakeMaster {
    port: u16,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    calls: AtomicUsize,
    is_silent: AtomicBool,
    /// Connections are made, and nothing else happens: the process is stopped.
    is_stopped: AtomicBool,
    is_dead: AtomicBool,
    sockets: Mutex<Vec<TcpStream>>,
}

impl FakeMaster {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::<State>::default();
        let accepting = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming() {
                if accepting.is_dead.load(Ordering::SeqCst) {
                    return;
                }
                let (stream, state) = (stream.unwrap(), Arc::clone(&accepting));
                state.sockets.lock().push(stream.try_clone().unwrap());
                // A client that goes away ends its thread.
                thread::spawn(move || state.serve(stream));
            }
        });
        Self { port, state }
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    fn calls(&self) -> usize {
        self.state.calls.load(Ordering::SeqCst)
    }

    /// Closes the listener and every connection, as a process that is killed does.
    fn kill(&self) {
        self.state.is_dead.store(true, Ordering::SeqCst);
        // Ends the accepting thread, and with it the listener.
        drop(TcpStream::connect(("127.0.0.1", self.port)));
        let begin = SystemClock.now();
        while TcpStream::connect(("127.0.0.1", self.port)).is_ok() {
            assert!(SystemClock.now().since(begin) < Duration::from_secs(20), "it listens on");
            thread::yield_now();
        }
        for socket in self.state.sockets.lock().drain(..) {
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
    }
}

impl State {
    fn serve(&self, mut stream: TcpStream) -> std::io::Result<()> {
        stream.read_exact(&mut [0; 12])?;
        if self.is_stopped.load(Ordering::SeqCst) {
            return stream.read(&mut [0]).map(drop);
        }
        let greeting = ServerGreeting {
            version: native_frame::VERSION,
            master: b"m".to_vec(),
            ..ServerGreeting::default()
        };
        let mut out = BytesMut::new();
        native_frame::encode(&greeting, &mut out).unwrap();
        stream.write_all(&out)?;
        let (mut incoming, mut part) = (BytesMut::new(), [0; 4096]);
        loop {
            let count = stream.read(&mut part)?;
            if count == 0 {
                return Ok(());
            }
            incoming.extend_from_slice(&part[..count]);
            let limit = native_frame::FRAME_BYTES_MAX;
            while native_frame::decode::<v1::Request>(&mut incoming, limit).unwrap().is_some() {
                self.calls.fetch_add(1, Ordering::SeqCst);
                if ![&self.is_silent, &self.is_stopped].iter().any(|it| it.load(Ordering::SeqCst)) {
                    let mut out = BytesMut::new();
                    native_frame::encode(&v1::Response::default(), &mut out).unwrap();
                    stream.write_all(&out)?;
                }
            }
        }
    }
}

fn soon() -> Moment {
    SystemClock.now() + Duration::from_secs(20)
}

fn dead_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn call(link: &dyn MasterLink) -> Result<(), mooncake_base::Error> {
    link.call(v1::Request::default(), soon()).map(drop).map_err(|failure| failure.error)
}

fn list_passes_over_masters() {
    let master = FakeMaster::start();
    // A port without a listener, and a listener that greets nobody.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = silent.local_addr().unwrap();
    let list = format!("127.0.0.1:{},{silent},{}", dead_port(), master.address());
    let config =
        LinkConfig { connect_timeout: Duration::from_millis(600), ..LinkConfig::default() };
    let link = open_link(&list, config).unwrap();
    call(&*link).unwrap();
    assert_eq!((link.address(), master.calls()), (master.address(), 1));
    let nobody = format!("127.0.0.1:{},127.0.0.1:{}", dead_port(), dead_port());
    let link = open_link(&nobody, LinkConfig::default()).unwrap();
    let error = call(&*link).unwrap_err();
    assert_eq!(error.code(), ErrorCode::RPC_FAIL);
    assert!(error.to_string().contains(&nobody), "{error}");
    link.close();
    assert!(call(&*link).unwrap_err().to_string().contains("closed"));
}

fn list_goes_on_when_its_master_dies() {
    let (first, second) = (FakeMaster::start(), FakeMaster::start());
    let list = format!("{},{}", first.address(), second.address());
    let link = open_link(&list, LinkConfig::default()).unwrap();
    call(&*link).unwrap();
    assert_eq!(link.address(), first.address());
    first.kill();
    // The caller repeats a call that failed.
    while call(&*link).is_err() {}
    assert_eq!((link.address(), second.calls()), (second.address(), 1));
}

fn call_goes_over_to_the_next_of_a_list() {
    let (first, second) = (FakeMaster::start(), FakeMaster::start());
    let list = format!("{},{}", first.address(), second.address());
    let link = open_link(&list, LinkConfig::default()).unwrap();
    call(&*link).unwrap();
    first.kill();
    // Such a call is sent only over a connection that has not been closed.
    let start = Call::PutStart(v1::PutStartRequest::default());
    let request = v1::Request { call: Some(start), ..v1::Request::default() };
    link.call(request, soon()).unwrap();
    assert_eq!((link.address(), second.calls()), (second.address(), 1));
}

/// Two masters in a list, and a call that waits for an answer of the first one.
fn hanging_call(
    cause: fn(&State) -> &AtomicBool,
    seconds: u64,
) -> (FakeMaster, FakeMaster, Arc<dyn MasterLink>, thread::JoinHandle<ErrorCode>) {
    let (first, second) = (FakeMaster::start(), FakeMaster::start());
    let list = format!("{},{}", first.address(), second.address());
    let config =
        LinkConfig { connect_timeout: Duration::from_millis(600), ..LinkConfig::default() };
    let link = open_link(&list, config).unwrap();
    call(&*link).unwrap();
    cause(&first.state).store(true, Ordering::SeqCst);
    let hanging = {
        let (link, limit) = (Arc::clone(&link), SystemClock.now() + Duration::from_secs(seconds));
        thread::spawn(move || link.call(v1::Request::default(), limit).unwrap_err().error.code())
    };
    let begin = SystemClock.now();
    while first.calls() < 2 {
        assert!(SystemClock.now().since(begin) < Duration::from_secs(20), "it does not arrive");
        thread::yield_now();
    }
    let limit = SystemClock.now() + Duration::from_millis(50);
    link.call(v1::Request::default(), limit).unwrap_err();
    (first, second, link, hanging)
}

fn list_leaves_a_stopped_master() {
    let (_first, second, link, hanging) = hanging_call(|state| &state.is_stopped, 20);
    call(&*link).unwrap();
    assert_eq!((link.address(), second.calls()), (second.address(), 1));
    // The caller repeats the call at once.
    assert_eq!(hanging.join().unwrap(), ErrorCode::RPC_FAIL);
}

fn call_at_a_slow_master_goes_on() {
    let (first, second, link, hanging) = hanging_call(|state| &state.is_silent, 2);
    first.state.is_silent.store(false, Ordering::SeqCst);
    call(&*link).unwrap();
    assert_eq!((link.address(), second.calls()), (first.address(), 0));
    assert_eq!(hanging.join().unwrap(), ErrorCode::RPC_TIMEOUT, "its connection is left alone");
}

fn rejects_addresses_of_other_kinds() {
    for bad in ["http://a:1", "etcd://", "k8s://a/b/c", "a:1,b:x", ""] {
        open_link(bad, LinkConfig::default()).unwrap_err();
    }
    let config = LinkConfig { cluster: "no/name".into(), ..LinkConfig::default() };
    let error = open_link("etcd://a", config).unwrap_err();
    assert!(error.to_string().contains("cluster"), "{error}");
}

/// A cluster in etcd, whose leader is written by the election itself.
struct EtcdCluster {
    server: RealServer,
    service: EtcdLease,
    lease: Lease,
}

impl EtcdCluster {
    fn start() -> Self {
        let server = RealServer::start("etcd", etcd, &[]);
        let members = [Endpoint::new("127.0.0.1", server.port)];
        let cluster = ClusterId::new("mooncake_cluster").unwrap();
        let service = EtcdLease::new(&members, &cluster, Duration::from_secs(60)).unwrap();
        let set = InSyncSet::founded_by(&MemberId::new("m").unwrap());
        let lease = acquire(&service, 1, Basis::Founder, set);
        Self { server, service, lease }
    }

    fn url(&self) -> String {
        // The first member is not there.
        format!("etcd://127.0.0.1:{};127.0.0.1:{}", dead_port(), self.server.port)
    }

    fn announce(&self, master: &FakeMaster) {
        self.service.announce(&self.lease, &master.address(), soon()).unwrap();
    }

    fn next_leader(&mut self) {
        self.service.release(&self.lease, soon()).unwrap();
        let set = self.service.read(soon()).unwrap().in_sync.unwrap();
        self.lease = acquire(&self.service, 2, Basis::Member, set);
    }
}

fn acquire(service: &EtcdLease, owner: u64, basis: Basis, set: InSyncSet) -> Lease {
    let bid = Bid { owner: OwnerToken::new(owner), basis, set };
    match service.acquire(&bid, soon()).unwrap() {
        Acquisition::Acquired(view) => bid.lease(view),
        Acquisition::Refused => panic!("nobody else leads"),
    }
}

fn link_follows_the_leader_in_etcd() {
    let mut cluster = EtcdCluster::start();
    let (first, second) = (FakeMaster::start(), FakeMaster::start());
    cluster.announce(&first);
    let link = open_link(&cluster.url(), LinkConfig::default()).unwrap();
    call(&*link).unwrap();
    assert_eq!((link.address(), first.calls()), (first.address(), 1));
    // A call hangs at the first master, which keeps its connections.
    first.state.is_silent.store(true, Ordering::SeqCst);
    let hanging = {
        let link = Arc::clone(&link);
        thread::spawn(move || call(&*link))
    };
    let begin = SystemClock.now();
    while first.calls() < 2 {
        assert!(
            SystemClock.now().since(begin) < Duration::from_secs(20),
            "the call does not arrive"
        );
        thread::yield_now();
    }
    cluster.next_leader();
    cluster.announce(&second);
    // The change ends it long before its deadline, so that its caller repeats it.
    hanging.join().unwrap().unwrap_err();
    assert!(SystemClock.now().since(begin) < Duration::from_secs(15));
    call(&*link).unwrap();
    assert_eq!((link.address(), second.calls()), (second.address(), 1));
    link.close();
    call(&*link).unwrap_err();
}

fn call_waits_for_the_first_leader() {
    let cluster = EtcdCluster::start();
    let master = FakeMaster::start();
    let link = open_link(&cluster.url(), LinkConfig::default()).unwrap();
    // A leader that warms up has no address.
    let limit = SystemClock.now() + Duration::from_millis(300);
    let failure = link.call(v1::Request::default(), limit).unwrap_err();
    assert_eq!(failure.error.code(), ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS);
    let waiting = {
        let link = Arc::clone(&link);
        thread::spawn(move || call(&*link))
    };
    cluster.announce(&master);
    waiting.join().unwrap().unwrap();
    assert_eq!(master.calls(), 1);
}
