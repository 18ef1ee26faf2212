//! Connections between the ranks: one per pair, opened by the higher rank, read by a thread each.

pub(crate) mod waiting;

use std::{
    collections::HashMap,
    hash::{Hash, Hasher},
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    slice,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use mooncake_base::{
    Clock, Endpoint, SystemClock, Token,
    sync::{Condvar, Mutex},
    token::{Nonce, PROOF_BYTES, Proof, hex},
};
use mooncake_os::{
    acceptor::{Acceptor, ConnectionLimits, ConnectionPlace, pause_accepting},
    dial::dial,
    threads::Threads,
};
use rustc_hash::FxHasher;

use crate::{
    auth,
    buffers::Buffers,
    fabric::Fabric,
    inbox::{Inbox, announce},
    link::{Access, Link, WRITE_LIMIT},
    message::Member,
    peer_memory::{self, Secret},
    rank_frame::{Frame, Kind, read_frame},
    ring::{Rings, Wake},
    shared_futex::SharedFutex,
    staging::{StagingMemory, peer_buffers::PeerBuffers},
};

/// Most groups of which frames are held before the group is made here.
const GROUPS_MAX: usize = 4096;
const DIAL_LIMIT: Duration = Duration::from_secs(10);
/// Connections that have greeted are bounded by their threads.
const LIMITS: ConnectionLimits = ConnectionLimits::of_greetings(1024, DIAL_LIMIT);
/// Most connections, each of which has a thread.
const THREADS_MAX: usize = 16_384;

/// Returns the number of a group on the wire.
pub(crate) fn group_id(name: &str) -> u64 {
    let mut hasher = FxHasher::default();
    name.hash(&mut hasher);
    hasher.finish()
}

/// All connections of this process, and the inboxes of its groups.
#[derive(Debug)]
pub(crate) struct Mesh {
    rank: u32,
    incarnation: u64,
    token: Option<Token>,
    secret: Secret,
    buffers: Arc<Buffers>,
    staging_memory: Arc<StagingMemory>,
    state: Mutex<MeshState>,
    changed: Condvar,
    /// Where a thread sleeps until a peer has written a frame into a ring.
    futex: Option<Arc<SharedFutex>>,
    /// Held by that thread.
    sleeper: Mutex<()>,
    lost: Mutex<Vec<(u32, u64)>>,
    lost_changed: Condvar,
    is_closing: AtomicBool,
    /// One for each connection.
    threads: Threads,
}

#[derive(Debug, Default)]
struct MeshState {
    links: HashMap<u32, Arc<Link>>,
    dialing: Vec<(u32, u64)>,
    inboxes: HashMap<u64, Arc<Inbox>>,
    /// Connections with a ring.
    polled: Arc<[Arc<Link>]>,
    /// How many [`Attention`]s there are.
    attentions: usize,
    /// Whether a thread sleeps on the futex.
    has_sleeper: bool,
}

impl MeshState {
    fn list_polled(&mut self) {
        let links = self.links.values().filter(|link| link.rings.is_some());
        self.polled = links.map(Arc::clone).collect();
        self.want_wakes();
    }

    /// Tells the peers how this process is woken for their frames.
    fn want_wakes(&self) {
        let wake = match (self.has_sleeper, self.attentions) {
            (true, _) => Wake::Futex,
            (false, 0) => Wake::None,
            (false, _) => Wake::Socket,
        };
        for rings in self.polled.iter().filter_map(|link| link.rings.as_ref()) {
            rings.want_wake(wake);
        }
    }

    fn open_link(&self, member: &Member) -> Option<Arc<Link>> {
        let link = self.links.get(&member.rank)?;
        let is_open =
            link.incarnation == member.incarnation && link.is_alive.load(Ordering::SeqCst);
        is_open.then(|| Arc::clone(link))
    }
}

impl Mesh {
    pub(crate) fn new(
        rank: u32,
        incarnation: u64,
        token: Option<Token>,
        fabric: Option<Arc<dyn Fabric>>,
    ) -> Arc<Self> {
        Self::with_threads(rank, incarnation, token, fabric, THREADS_MAX)
    }

    fn with_threads(
        rank: u32,
        incarnation: u64,
        token: Option<Token>,
        fabric: Option<Arc<dyn Fabric>>,
        threads_max: usize,
    ) -> Arc<Self> {
        Arc::new(Self {
            rank,
            incarnation,
            token,
            secret: Secret::default(),
            buffers: Arc::default(),
            staging_memory: Arc::new(StagingMemory::new(fabric)),
            state: Mutex::new(MeshState::default()),
            changed: Condvar::default(),
            futex: SharedFutex::create()
                .inspect_err(|error| tracing::debug!(%error, "peers wake over sockets"))
                .map(Arc::new)
                .ok(),
            sleeper: Mutex::default(),
            lost: Mutex::new(Vec::new()),
            lost_changed: Condvar::default(),
            is_closing: AtomicBool::new(false),
            threads: Threads::new(threads_max),
        })
    }

    /// Returns the inbox of a group, which may not be made here yet.
    pub(crate) fn inbox(&self, group: u64) -> Option<Arc<Inbox>> {
        let mut state = self.state.lock();
        if state.inboxes.len() >= GROUPS_MAX && !state.inboxes.contains_key(&group) {
            return None;
        }
        let inbox = state.inboxes.entry(group).or_insert_with(|| Arc::new(Inbox::default()));
        Some(Arc::clone(inbox))
    }

    /// Returns the buffers of this process.
    pub(crate) fn buffers(&self) -> &Arc<Buffers> {
        &self.buffers
    }

    /// Returns the memory of this process for contributions.
    pub(crate) fn staging_memory(&self) -> &Arc<StagingMemory> {
        &self.staging_memory
    }

    /// Returns whether a member can read memory of this process.
    pub(crate) fn may_lend(&self, member: &Member) -> bool {
        self.state
            .lock()
            .links
            .get(&member.rank)
            .is_some_and(|link| link.incarnation == member.incarnation && link.access.is_reader)
    }

    /// Returns whether a member reads memory of this process through a fabric, from another host.
    pub(crate) fn may_fetch(&self, member: &Member) -> bool {
        let link = self.open_link(member);
        link.is_some_and(|link| link.segment.is_some() && !link.access.is_reader)
    }

    /// Returns the connection to a member if it is there.
    pub(crate) fn open_link(&self, member: &Member) -> Option<Arc<Link>> {
        self.state.lock().open_link(member)
    }

    /// Returns all inboxes.
    pub(crate) fn inboxes(&self) -> Vec<Arc<Inbox>> {
        self.state.lock().inboxes.values().map(Arc::clone).collect()
    }

    /// Forgets a group that was destroyed.
    pub(crate) fn forget(&self, group: u64) {
        self.state.lock().inboxes.remove(&group);
    }

    /// Accepts connections of higher ranks until the mesh is closed.
    pub(crate) fn accept(self: &Arc<Self>, listener: TcpListener) {
        let acceptor = Acceptor::new(listener, LIMITS);
        while let Some((stream, place)) = acceptor.next(|| self.is_closing()) {
            let mesh = Arc::clone(self);
            let serving = self.threads.spawn("mc-pg-link", move || {
                if let Err(error) = mesh.greet_caller(stream, place) {
                    tracing::debug!(%error, "a connection was refused");
                }
            });
            if let Err(error) = serving {
                tracing::warn!(%error, "a connection is refused: no thread can serve it");
                pause_accepting();
            }
        }
    }

    /// Opens connections to the members of lower rank that have none.
    pub(crate) fn connect(self: &Arc<Self>, members: &[Member]) {
        for member in members.iter().filter(|member| member.rank < self.rank) {
            let key = (member.rank, member.incarnation);
            let mut state = self.state.lock();
            let is_linked = state.links.get(&member.rank).is_some_and(|link| {
                link.incarnation == member.incarnation && link.is_alive.load(Ordering::SeqCst)
            });
            if is_linked || state.dialing.contains(&key) {
                continue;
            }
            state.dialing.push(key);
            drop(state);
            let mesh = Arc::clone(self);
            let called = member.clone();
            let dialing =
                self.threads.spawn("mc-pg-link", move || match mesh.greet_member(&called) {
                    Ok(link) => {
                        mesh.end_dialing(key);
                        mesh.read(&link);
                    }
                    Err(error) => mesh.cannot_reach(key, &error),
                });
            if let Err(error) = dialing {
                self.cannot_reach(key, &error);
            }
        }
    }

    fn end_dialing(&self, key: (u32, u64)) {
        self.state.lock().dialing.retain(|dialed| *dialed != key);
    }

    /// Tells that a member cannot be reached. It is dialed again when it is needed.
    fn cannot_reach(&self, key: (u32, u64), error: &io::Error) {
        self.end_dialing(key);
        self.report_lost(key);
        self.log_unreached(key.0, error);
    }

    /// Logs that a rank cannot be reached: as a warning, unless it has left the groups that it shared with
    /// this process.
    fn log_unreached(&self, rank: u32, error: &io::Error) {
        let has_left = self.is_closing() || !self.inboxes().iter().any(|inbox| inbox.needs(rank));
        if has_left {
            tracing::debug!(rank, %error, "a rank that has left cannot be reached");
        } else {
            tracing::warn!(rank, %error, "a rank cannot be reached");
        }
    }

    /// Returns the connection to a member, once it is there, unless `is_over` says to give up.
    pub(crate) fn link(
        self: &Arc<Self>,
        member: &Member,
        is_over: impl Fn() -> bool,
    ) -> Option<Arc<Link>> {
        loop {
            if let Some(link) = self.open_link(member) {
                return Some(link);
            }
            // No lock is held: it looks at a group, whose threads look for connections.
            if self.is_closing() || is_over() {
                return None;
            }
            let mut state = self.state.lock();
            if state.open_link(member).is_none() {
                // The end of the wait is not announced here: it is looked for.
                self.changed.wait_for(&mut state, Duration::from_millis(20));
            }
            drop(state);
            // The connection may have ended before this rank was in a view with the member.
            self.connect(slice::from_ref(member));
        }
    }

    /// Closes the connection to a rank that is in no view any more.
    pub(crate) fn drop_link(&self, rank: u32, incarnation: u64) {
        let mut state = self.state.lock();
        // Its successor may have connected already.
        if state.links.get(&rank).is_some_and(|link| link.incarnation == incarnation)
            && let Some(link) = state.links.remove(&rank)
        {
            state.list_polled();
            link.close();
        }
    }

    /// Waits for ranks whose connections ended, at most `time`.
    pub(crate) fn wait_lost(&self, time: Duration) -> Vec<(u32, u64)> {
        let mut lost = self.lost.lock();
        if lost.is_empty() && !self.is_closing() {
            self.lost_changed.wait_for(&mut lost, time);
        }
        std::mem::take(&mut *lost)
    }

    /// Begins the end: connections close, waits end.
    pub(crate) fn begin_close(&self) {
        self.is_closing.store(true, Ordering::SeqCst);
        let state = self.state.lock();
        for link in state.links.values() {
            link.close();
        }
        self.changed.notify_all();
        drop(state);
        let _lost = self.lost.lock();
        self.lost_changed.notify_all();
    }

    /// Waits for the threads of connections; they end once their sockets are closed.
    pub(crate) fn join(&self) {
        self.threads.join();
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::SeqCst)
    }

    fn greet_member(&self, member: &Member) -> io::Result<Arc<Link>> {
        let endpoint: Endpoint = member.address.parse().map_err(io::Error::other)?;
        let deadline = SystemClock.now() + DIAL_LIMIT;
        let mut stream = dial(&endpoint, deadline).map_err(io::Error::other)?;
        auth::dial(&stream, deadline, self.token.as_ref())?;
        stream.write_all(&self.rank.to_le_bytes())?;
        stream.write_all(&self.incarnation.to_le_bytes())?;
        let access = self.prove_access(&mut stream)?;
        let rings = access.make_rings(&mut stream)?;
        let shared = self.share(&mut stream, access, rings)?;
        self.add(stream, member.rank, member.incarnation, shared)
    }

    fn greet_caller(
        self: &Arc<Self>,
        mut stream: TcpStream,
        place: ConnectionPlace,
    ) -> io::Result<()> {
        auth::accept(&stream, place.greeting_deadline(), self.token.as_ref())?;
        let mut rank = [0; 4];
        stream.read_exact(&mut rank)?;
        let mut incarnation = [0; 8];
        stream.read_exact(&mut incarnation)?;
        let (rank, incarnation) = (u32::from_le_bytes(rank), u64::from_le_bytes(incarnation));
        let access = self.prove_access(&mut stream)?;
        let rings = access.open_rings(&mut stream)?;
        let shared = self.share(&mut stream, access, rings)?;
        let link = self.add(stream, rank, incarnation, shared)?;
        drop(place);
        self.read(&link);
        Ok(())
    }

    /// Finds out who of the two sides can read the other's memory. Each side shows a keyed hash of
    /// a secret that it reads there, and nothing if it cannot.
    fn prove_access(&self, stream: &mut TcpStream) -> io::Result<Access> {
        let keyed = |secret: &[u8]| -> Proof {
            Token::new(&hex(secret)).map_or([0; PROOF_BYTES], |key| key.proof(&[b"memory"]))
        };
        stream.set_read_timeout(Some(DIAL_LIMIT))?;
        let is_same_host = stream.peer_addr()?.ip() == stream.local_addr()?.ip();
        stream.write_all(&std::process::id().to_le_bytes())?;
        let (mut process, mut address) = ([0; 4], [0; 8]);
        stream.read_exact(&mut process)?;
        let process = u32::from_le_bytes(process);
        if is_same_host {
            // Before the peer knows where to read.
            peer_memory::allow_reading(process);
        }
        stream.write_all(&self.secret.address().to_le_bytes())?;
        stream.read_exact(&mut address)?;
        let mut seen = Nonce::default();
        let is_read = is_same_host
            && peer_memory::read(process, u64::from_le_bytes(address), &mut seen).is_ok();
        stream.write_all(&if is_read { keyed(&seen) } else { [0; PROOF_BYTES] })?;
        let mut shown = [0; PROOF_BYTES];
        stream.read_exact(&mut shown)?;
        let is_reader = is_same_host && shown == keyed(self.secret.bytes());
        Ok(Access { process: is_read.then_some(process), is_reader })
    }

    /// Exchanges what both sides tell each other alike.
    fn share(
        &self,
        stream: &mut TcpStream,
        access: Access,
        rings: Option<Rings>,
    ) -> io::Result<SharedMeans> {
        let futex = access.exchange_futexes(stream, self.futex.as_deref())?;
        Ok(SharedMeans { access, rings, futex, segment: self.exchange_segments(stream)? })
    }

    /// Tells the peer the name under which it reads memory of this process through a fabric, and
    /// returns the peer's, if both sides have one.
    fn exchange_segments(&self, stream: &mut TcpStream) -> io::Result<Option<String>> {
        let own = self.staging_memory.fabric().map_or("", |fabric| fabric.segment());
        let length = u16::try_from(own.len()).map_err(io::Error::other)?;
        stream.write_all(&length.to_le_bytes())?;
        stream.write_all(own.as_bytes())?;
        let mut length = [0; 2];
        stream.read_exact(&mut length)?;
        let mut name = vec![0; usize::from(u16::from_le_bytes(length))];
        stream.read_exact(&mut name)?;
        let name = String::from_utf8(name).map_err(io::Error::other)?;
        Ok((!own.is_empty() && !name.is_empty()).then_some(name))
    }

    fn add(
        &self,
        stream: TcpStream,
        rank: u32,
        incarnation: u64,
        SharedMeans { access, rings, futex, segment }: SharedMeans,
    ) -> io::Result<Arc<Link>> {
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(Some(WRITE_LIMIT))?;
        stream.set_nodelay(true)?;
        let link = Arc::new(Link {
            rank,
            incarnation,
            stream,
            access,
            rings,
            futex,
            segment,
            staged: PeerBuffers::default(),
            outgoing: Mutex::default(),
            frame_ended: Condvar::default(),
            next_delivered: Mutex::default(),
            is_alive: AtomicBool::new(true),
        });
        let mut state = self.state.lock();
        if self.is_closing() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        if let Some(old) = state.links.insert(rank, Arc::clone(&link)) {
            old.close();
        }
        state.list_polled();
        self.changed.notify_all();
        drop(state);
        self.poll_all();
        for inbox in self.inboxes() {
            inbox.announce_change(inbox.state.lock());
        }
        Ok(link)
    }

    /// Delivers frames until the connection ends.
    fn read(&self, link: &Arc<Link>) {
        let mut stream = io::BufReader::with_capacity(64 << 10, &link.stream);
        while let Ok(frame) = read_frame(&mut stream) {
            if let Err(error) = self.deliver(link, Some(frame)) {
                tracing::warn!(rank = link.rank, %error, "the connection to a rank ends");
                break;
            }
        }
        // The peer may have ended between a frame in the ring and the one that wakes.
        let _ = self.deliver(link, None);
        let was_alive = link.is_alive.swap(false, Ordering::SeqCst);
        {
            let mut state = self.state.lock();
            if state.links.get(&link.rank).is_some_and(|it| Arc::ptr_eq(it, link)) {
                state.links.remove(&link.rank);
                state.list_polled();
            }
        }
        let _ = link.stream.shutdown(Shutdown::Both);
        if was_alive && !self.is_closing() {
            self.report_lost((link.rank, link.incarnation));
        }
    }

    /// Delivers the frames in the ring, and one of the socket in its place between them.
    fn deliver(&self, link: &Arc<Link>, frame: Option<Frame>) -> io::Result<()> {
        let mut ended = Vec::new();
        let mut next = link.next_delivered.lock();
        let mut frame = frame;
        loop {
            let (header, payload) = match link.take_record(*next)? {
                Some((header, _, payload)) => (header, payload),
                // Its writer has written all frames before it into the ring.
                None => match frame.take() {
                    Some((header, number, payload)) if number == *next => (header, payload),
                    Some(_) => return Err(io::Error::other("the peer has left out a frame")),
                    None => break,
                },
            };
            *next += 1;
            if header.kind == Kind::Wake {
                continue;
            }
            let Some(inbox) = self.inbox(header.group) else { continue };
            let (done, answer) = inbox.deliver(&header, payload, link.access.process);
            ended.extend(done);
            if let Some(answer) = answer {
                // The sender goes on first: it waits longer.
                inbox.acknowledge(header.source as usize, &answer, Some(link));
            }
        }
        drop(next);
        announce(ended);
        Ok(())
    }

    fn report_lost(&self, key: (u32, u64)) {
        self.lost.lock().push(key);
        self.lost_changed.notify_all();
    }
}

/// What a connection has beside its socket.
struct SharedMeans {
    access: Access,
    rings: Option<Rings>,
    futex: Option<SharedFutex>,
    segment: Option<String>,
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test panics where a step fails")]
mod tests {
    use std::thread;

    use super::*;
    use crate::{
        inbox::part::Part,
        link::SendProgress,
        link::tests::{connected, header, link_of},
        ring::{Rings, Wake, Written},
    };

    /// Sends messages of all sizes over the ring and the socket, while the receiver polls now and
    /// then, and sleeps in between. A message that is left behind would end the test by its limit.
    #[test]
    fn frames_of_ring_and_socket_arrive_in_order() {
        const COUNT: usize = 20_000;
        let (sender, peer) = connected();
        let rings = Rings::create().unwrap();
        let opened = Rings::open(std::process::id(), rings.descriptor()).unwrap();
        let sender = link_of(sender.stream.try_clone().unwrap(), Some(opened));
        let receiver = link_of(peer, Some(rings));
        let mesh = Mesh::new(1, 1, None, None);
        mesh.state.lock().polled = Arc::new([Arc::clone(&receiver)]);
        let inbox = mesh.inbox(0).unwrap();
        let length = |at: usize| [8, 40, 900, 5_000, 17_000][(at * 7 + at / 11) % 5];
        thread::scope(|scope| {
            let (reading, other) = (Arc::clone(&mesh), Arc::clone(&receiver));
            scope.spawn(move || reading.read(&other));
            scope.spawn(|| {
                for at in 0..COUNT {
                    let payload = vec![at.to_le_bytes()[0]; length(at)];
                    let header = header(at as u64, payload.len());
                    if at % 3 == 0 {
                        sender.send(&header, &payload, || false).unwrap();
                        continue;
                    }
                    while sender.try_send(&header, &payload).unwrap() == SendProgress::Nothing {
                        sender.flush(|| false).unwrap();
                        thread::yield_now();
                    }
                    sender.flush(|| false).unwrap();
                    if at % 64 == 0 {
                        thread::yield_now();
                    }
                }
            });
            let mut found = 0;
            let begun = std::time::Instant::now();
            while found < COUNT {
                assert!(begun.elapsed() < Duration::from_secs(60), "found={found}");
                let attention = (found % 3 > 0).then(|| mesh.pay_attention());
                if found % 2 == 0 {
                    let polling = mesh.announce_polling();
                    (0..found % 50).for_each(|_| polling.poll());
                }
                if found % 5 == 0 {
                    // A peer that has sent a frame now wakes the reader, or the frame has been seen.
                    let _attention = mesh.pay_attention();
                    let mut arrived = inbox.state.lock();
                    if arrived.messages.arrived.is_empty() && found > 0 {
                        inbox.outgoing.wait_for(&mut arrived, Duration::from_millis(1));
                    }
                }
                drop(attention);
                for arrived in inbox.state.lock().messages.arrived.drain(..) {
                    assert_eq!(arrived.id, found as u64);
                    let Part::Bytes(bytes) = arrived.payload else { panic!("bytes") };
                    assert!(bytes == vec![found.to_le_bytes()[0]; length(found)]);
                    found += 1;
                }
                thread::yield_now();
            }
            sender.close();
        });
    }

    #[test]
    fn frame_in_the_ring_is_delivered_when_its_sender_has_died() {
        let (sender, peer) = connected();
        let rings = Rings::create().unwrap();
        let opened = Rings::open(std::process::id(), rings.descriptor()).unwrap();
        let receiver = link_of(peer, Some(rings));
        let mesh = Mesh::new(1, 1, None, None);
        let head = header(5, 3).encode(0);
        assert_eq!(opened.write(&[&head, b"end"]), Written::Yes(Wake::None));
        sender.close();
        mesh.read(&receiver);
        let inbox = mesh.inbox(0).unwrap();
        assert_eq!(inbox.state.lock().messages.arrived[0].id, 5);
    }

    #[test]
    fn member_that_no_thread_can_dial_is_lost_and_dialed_again() {
        let mesh = Mesh::with_threads(1, 1, None, None, 0);
        let member = Member { slot: 0, rank: 0, incarnation: 7, address: String::new() };
        for _ in 0..2 {
            mesh.connect(slice::from_ref(&member));
            assert_eq!(mesh.wait_lost(Duration::ZERO), [(0, 7)]);
        }
    }

    #[test]
    fn end_of_a_wait_is_looked_for_without_a_lock() {
        let mesh = Mesh::new(1, 1, None, None);
        let member = Member { slot: 0, rank: 2, incarnation: 1, address: String::new() };
        let is_free = std::cell::Cell::new(false);
        let link = mesh.link(&member, || {
            is_free.set(mesh.state.try_lock().is_some());
            true
        });
        assert!(link.is_none());
        assert!(
            is_free.get(),
            "a thread that holds the group's lock and looks for a link would wait"
        );
    }
}
