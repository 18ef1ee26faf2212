//! Connections between the ranks: one per pair, opened by the higher rank, read by a thread each.

use std::{
    collections::HashMap,
    hash::{Hash, Hasher},
    io::{self, IoSlice, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    slice,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use mooncake_base::{
    Clock, Endpoint, SystemClock, Token,
    sync::{Condvar, Mutex},
    token::{Nonce, PROOF_BYTES, Proof},
};
use mooncake_os::dial::dial;
use rustc_hash::FxHasher;
use socket2::SockRef;

use crate::{
    auth,
    buffers::Buffers,
    inbox::{Inbox, announce},
    message::Member,
    peer_memory::{self, Secret},
};

/// Most groups of which frames are held before the group is made here.
const GROUPS_MAX: usize = 4096;
/// Memory that is reserved for a payload before its bytes arrive.
const RESERVED_BYTES_MAX: u64 = 64 << 20;
const DIAL_LIMIT: Duration = Duration::from_secs(10);

const HEADER_BYTES: usize = 40;

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A part of a collective operation.
    Collective,
    /// A message of `send`; its step is the tag.
    Message,
    /// The receiver has taken a message.
    Taken,
    /// As `Collective`: the payload says where the bytes are in the sender's memory.
    CollectiveLoan,
    /// As `Message`: the payload says where the bytes are in the sender's memory.
    MessageLoan,
    /// A message waits at its sender; the payload is its length.
    Offer,
    /// The receiver has room for the message of an offer.
    Request,
    /// The bytes of a message that was requested.
    Requested,
}

/// The head of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) group: u64,
    pub(crate) attempt: u32,
    pub(crate) sequence: u64,
    pub(crate) step: u32,
    pub(crate) source: u32,
    pub(crate) length: u64,
}

impl Header {
    fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = self.kind as u8;
        bytes[4..8].copy_from_slice(&self.attempt.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.group.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.step.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.source.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let word = |at: usize| bytes[at..at + 4].try_into().map(u32::from_le_bytes).ok();
        let long = |at: usize| bytes[at..at + 8].try_into().map(u64::from_le_bytes).ok();
        let kind = match bytes[0] {
            0 => Kind::Collective,
            1 => Kind::Message,
            2 => Kind::Taken,
            3 => Kind::CollectiveLoan,
            4 => Kind::MessageLoan,
            5 => Kind::Offer,
            6 => Kind::Request,
            7 => Kind::Requested,
            _ => return None,
        };
        Some(Self {
            kind,
            attempt: word(4)?,
            group: long(8)?,
            sequence: long(16)?,
            step: word(24)?,
            source: word(28)?,
            length: long(32)?,
        })
    }
}

/// Returns the number of a group on the wire.
pub(crate) fn group_id(name: &str) -> u64 {
    let mut hasher = FxHasher::default();
    name.hash(&mut hasher);
    hasher.finish()
}

/// A connection to another rank.
#[derive(Debug)]
pub(crate) struct Link {
    rank: u32,
    incarnation: u64,
    stream: TcpStream,
    access: Access,
    /// The rest of a frame that was sent in part: it goes before any other.
    rest: Mutex<Vec<u8>>,
    is_alive: AtomicBool,
}

/// How much of a frame a call that does not block has sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Nothing: the socket has no room, or another thread writes.
    Nothing,
    /// A part: [`Link::flush`] must be called for the rest.
    Begun,
    /// The whole frame.
    Whole,
}

/// Who of two ranks can read the other's memory.
#[derive(Debug, Clone, Copy, Default)]
struct Access {
    /// The process at the other end, if it is on this host.
    process: Option<u32>,
    /// Whether the peer has proven that it reads this process.
    is_reader: bool,
}

impl Link {
    /// Sends a frame. Blocks until the peer's thread has room for it.
    pub(crate) fn send(&self, header: &Header, payload: &[u8]) -> io::Result<()> {
        let head = header.encode();
        let mut rest = self.rest.lock();
        self.send_rest(&mut rest)?;
        let mut stream = &self.stream;
        let sent = match stream.write_vectored(&[IoSlice::new(&head), IoSlice::new(payload)]) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(sent) => sent,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) => return Err(error),
        };
        if sent < head.len() {
            stream.write_all(&head[sent..])?;
            stream.write_all(payload)
        } else {
            stream.write_all(&payload[sent - head.len()..])
        }
    }

    /// Sends a frame as far as the socket has room for it. Does not block.
    pub(crate) fn try_send(&self, header: &Header, payload: &[u8]) -> io::Result<Progress> {
        let Some(mut rest) = self.rest.try_lock() else { return Ok(Progress::Nothing) };
        if !rest.is_empty() {
            return Ok(Progress::Nothing);
        }
        let head = header.encode();
        let parts = [IoSlice::new(&head), IoSlice::new(payload)];
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        let sent = match SockRef::from(&self.stream).send_vectored_with_flags(&parts, flags) {
            Ok(0) => return Ok(Progress::Nothing),
            Ok(sent) => sent,
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {
                    return Ok(Progress::Nothing);
                }
                _ => return Err(error),
            },
        };
        if sent == head.len() + payload.len() {
            return Ok(Progress::Whole);
        }
        rest.extend_from_slice(head.get(sent..).unwrap_or_default());
        rest.extend_from_slice(&payload[sent.saturating_sub(head.len())..]);
        Ok(Progress::Begun)
    }

    /// Sends the rest of a frame that [`Self::try_send`] has begun. Blocks as [`Self::send`].
    pub(crate) fn flush(&self) -> io::Result<()> {
        self.send_rest(&mut self.rest.lock())
    }

    fn send_rest(&self, rest: &mut Vec<u8>) -> io::Result<()> {
        let mut stream = &self.stream;
        stream.write_all(rest)?;
        rest.clear();
        Ok(())
    }

    fn close(&self) {
        self.is_alive.store(false, Ordering::SeqCst);
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// All connections of this process, and the inboxes of its groups.
#[derive(Debug)]
pub(crate) struct Mesh {
    rank: u32,
    incarnation: u64,
    token: Option<Token>,
    secret: Secret,
    buffers: Arc<Buffers>,
    state: Mutex<State>,
    changed: Condvar,
    lost: Mutex<Vec<(u32, u64)>>,
    lost_changed: Condvar,
    is_closing: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    links: HashMap<u32, Arc<Link>>,
    dialing: Vec<(u32, u64)>,
    inboxes: HashMap<u64, Arc<Inbox>>,
    threads: Vec<JoinHandle<()>>,
}

impl State {
    fn open_link(&self, member: &Member) -> Option<Arc<Link>> {
        let link = self.links.get(&member.rank)?;
        let is_open =
            link.incarnation == member.incarnation && link.is_alive.load(Ordering::SeqCst);
        is_open.then(|| Arc::clone(link))
    }
}

impl Mesh {
    pub(crate) fn new(rank: u32, incarnation: u64, token: Option<Token>) -> Arc<Self> {
        Arc::new(Self {
            rank,
            incarnation,
            token,
            secret: Secret::default(),
            buffers: Arc::default(),
            state: Mutex::new(State::default()),
            changed: Condvar::default(),
            lost: Mutex::new(Vec::new()),
            lost_changed: Condvar::default(),
            is_closing: AtomicBool::new(false),
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

    /// Returns whether a member can read memory of this process.
    pub(crate) fn may_lend(&self, member: &Member) -> bool {
        self.state
            .lock()
            .links
            .get(&member.rank)
            .is_some_and(|link| link.incarnation == member.incarnation && link.access.is_reader)
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
    pub(crate) fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for stream in listener.incoming() {
            if self.is_closing() {
                return;
            }
            let Ok(stream) = stream else { continue };
            let mesh = Arc::clone(self);
            self.spawn("mc-pg-link", move || {
                if let Err(error) = mesh.greet_caller(stream) {
                    tracing::debug!(%error, "a connection was refused");
                }
            });
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
            let member = member.clone();
            self.spawn("mc-pg-link", move || {
                let opened = mesh.greet_member(&member);
                mesh.state.lock().dialing.retain(|dialed| *dialed != key);
                match opened {
                    Ok(link) => mesh.read(&link),
                    Err(error) => {
                        tracing::warn!(rank = member.rank, %error, "a rank cannot be reached");
                        mesh.report_lost(key);
                    }
                }
            });
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
        loop {
            let threads = std::mem::take(&mut self.state.lock().threads);
            if threads.is_empty() {
                return;
            }
            for thread in threads {
                if thread.thread().id() != thread::current().id() {
                    let _ = thread.join();
                }
            }
        }
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::SeqCst)
    }

    fn greet_member(&self, member: &Member) -> io::Result<Arc<Link>> {
        let endpoint: Endpoint = member.address.parse().map_err(io::Error::other)?;
        let deadline = SystemClock.now() + DIAL_LIMIT;
        let mut stream = dial(&endpoint, deadline).map_err(io::Error::other)?;
        auth::dial(&mut stream, self.token.as_ref())?;
        stream.write_all(&self.rank.to_le_bytes())?;
        stream.write_all(&self.incarnation.to_le_bytes())?;
        let access = self.prove_access(&mut stream)?;
        self.add(stream, member.rank, member.incarnation, access)
    }

    fn greet_caller(self: &Arc<Self>, mut stream: TcpStream) -> io::Result<()> {
        auth::accept(&mut stream, self.token.as_ref())?;
        let mut rank = [0; 4];
        stream.read_exact(&mut rank)?;
        let mut incarnation = [0; 8];
        stream.read_exact(&mut incarnation)?;
        let (rank, incarnation) = (u32::from_le_bytes(rank), u64::from_le_bytes(incarnation));
        let access = self.prove_access(&mut stream)?;
        let link = self.add(stream, rank, incarnation, access)?;
        self.read(&link);
        Ok(())
    }

    /// Finds out who of the two sides can read the other's memory. Each side shows a keyed hash of
    /// a secret that it reads there, and nothing if it cannot.
    fn prove_access(&self, stream: &mut TcpStream) -> io::Result<Access> {
        let keyed = |secret: &[u8]| -> Proof {
            let text: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
            Token::new(&text).map_or([0; PROOF_BYTES], |key| key.proof(&[b"memory"]))
        };
        stream.set_read_timeout(Some(DIAL_LIMIT))?;
        let is_same_host = stream.peer_addr()?.ip() == stream.local_addr()?.ip();
        stream.write_all(&std::process::id().to_le_bytes())?;
        stream.write_all(&self.secret.address().to_le_bytes())?;
        let (mut process, mut address) = ([0; 4], [0; 8]);
        stream.read_exact(&mut process)?;
        stream.read_exact(&mut address)?;
        let process = u32::from_le_bytes(process);
        let mut seen = Nonce::default();
        let is_read = is_same_host
            && peer_memory::read(process, u64::from_le_bytes(address), &mut seen).is_ok();
        stream.write_all(&if is_read { keyed(&seen) } else { [0; PROOF_BYTES] })?;
        let mut shown = [0; PROOF_BYTES];
        stream.read_exact(&mut shown)?;
        stream.set_read_timeout(None)?;
        let is_reader = is_same_host && shown == keyed(self.secret.bytes());
        Ok(Access { process: is_read.then_some(process), is_reader })
    }

    fn add(
        &self,
        stream: TcpStream,
        rank: u32,
        incarnation: u64,
        access: Access,
    ) -> io::Result<Arc<Link>> {
        stream.set_nodelay(true)?;
        let link = Arc::new(Link {
            rank,
            incarnation,
            stream,
            access,
            rest: Mutex::default(),
            is_alive: AtomicBool::new(true),
        });
        let mut state = self.state.lock();
        if self.is_closing() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        if let Some(old) = state.links.insert(rank, Arc::clone(&link)) {
            old.close();
        }
        self.changed.notify_all();
        Ok(link)
    }

    /// Delivers frames until the connection ends.
    fn read(&self, link: &Arc<Link>) {
        let mut stream = io::BufReader::with_capacity(64 << 10, &link.stream);
        while let Ok((header, payload)) = read_frame(&mut stream) {
            let Some(inbox) = self.inbox(header.group) else { continue };
            let (ended, answer) = inbox.deliver(&header, payload, link.access.process);
            if let Some(answer) = answer {
                // The sender goes on first: it waits longer.
                inbox.acknowledge(header.source as usize, &answer, Some(link));
            }
            announce(ended);
        }
        let was_alive = link.is_alive.swap(false, Ordering::SeqCst);
        {
            let mut state = self.state.lock();
            if state.links.get(&link.rank).is_some_and(|it| Arc::ptr_eq(it, link)) {
                state.links.remove(&link.rank);
            }
        }
        let _ = link.stream.shutdown(Shutdown::Both);
        if was_alive && !self.is_closing() {
            self.report_lost((link.rank, link.incarnation));
        }
    }

    fn report_lost(&self, key: (u32, u64)) {
        self.lost.lock().push(key);
        self.lost_changed.notify_all();
    }

    fn spawn(self: &Arc<Self>, name: &str, run: impl FnOnce() + Send + 'static) {
        let weak: Weak<Self> = Arc::downgrade(self);
        if let Ok(thread) = thread::Builder::new().name(name.to_owned()).spawn(run)
            && let Some(mesh) = weak.upgrade()
        {
            let mut state = mesh.state.lock();
            state.threads.retain(|thread| !thread.is_finished());
            state.threads.push(thread);
        }
    }
}

fn read_frame(stream: &mut impl Read) -> io::Result<(Header, Vec<u8>)> {
    let mut head = [0; HEADER_BYTES];
    stream.read_exact(&mut head)?;
    let header = Header::decode(&head).ok_or_else(|| io::Error::other("no frame"))?;
    let mut payload = Vec::new();
    // Memory grows with the bytes that arrive, not with what the header says.
    let reserved = header.length.min(RESERVED_BYTES_MAX);
    payload.reserve_exact(usize::try_from(reserved).unwrap_or(0));
    let read = stream.by_ref().take(header.length).read_to_end(&mut payload)?;
    if read as u64 != header.length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((header, payload))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test panics where a step fails")]
mod tests {
    use super::*;

    fn connected() -> (Arc<Link>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let peer = listener.accept().unwrap().0;
        let (access, rest, is_alive) = (Access::default(), Mutex::default(), true.into());
        (Arc::new(Link { rank: 0, incarnation: 0, stream, access, rest, is_alive }), peer)
    }

    fn header(sequence: u64, length: usize) -> Header {
        Header {
            kind: Kind::Message,
            group: 0,
            attempt: 0,
            sequence,
            step: 0,
            source: 0,
            length: length as u64,
        }
    }

    /// Sends frames until the socket is full, and returns how many were begun, and how the last ended.
    fn fill(link: &Link, payload: &[u8]) -> (u64, Progress) {
        for sequence in 0.. {
            let progress = link.try_send(&header(sequence, payload.len()), payload).unwrap();
            match progress {
                Progress::Whole => {}
                Progress::Begun => return (sequence + 1, progress),
                Progress::Nothing => return (sequence, progress),
            }
        }
        unreachable!("no socket has room for all numbers");
    }

    #[test]
    fn full_socket_takes_part_of_a_frame() {
        let (link, mut peer) = connected();
        let payload: Vec<u8> = (0..=250).cycle().take(1 << 20).collect();
        let (begun, progress) = fill(&link, &payload);
        assert_eq!(progress, Progress::Begun);
        assert_eq!(link.try_send(&header(99, 0), &[]).unwrap(), Progress::Nothing);
        let writing = Arc::clone(&link);
        let writer = thread::spawn(move || {
            writing.flush().unwrap();
            writing.send(&header(begun, 3), b"end").unwrap();
        });
        for sequence in 0..begun {
            let (found, bytes) = read_frame(&mut peer).unwrap();
            assert_eq!(found.sequence, sequence);
            assert!(bytes == payload, "frame {sequence} is torn");
        }
        assert_eq!(read_frame(&mut peer).unwrap(), (header(begun, 3), b"end".to_vec()));
        writer.join().unwrap();
        assert_eq!(link.try_send(&header(0, 0), &[]).unwrap(), Progress::Whole);
    }

    #[test]
    fn thread_that_blocks_in_a_send_blocks_no_other() {
        let (link, mut peer) = connected();
        let (begun, _) = fill(&link, &[7; 1 << 20]);
        let writing = Arc::clone(&link);
        let writer = thread::spawn(move || writing.send(&header(begun, 0), &[]));
        assert_eq!(link.try_send(&header(0, 0), &[]).unwrap(), Progress::Nothing);
        let mut frames = (0..=begun).map(|_| read_frame(&mut peer).unwrap().0.sequence);
        assert!((0..=begun).all(|sequence| frames.next() == Some(sequence)));
        writer.join().unwrap().unwrap();
    }

    #[test]
    fn frame_for_a_closed_socket_is_an_error() {
        let (link, peer) = connected();
        link.close();
        assert!(link.try_send(&header(0, 0), &[]).is_err());
        assert!(link.send(&header(0, 0), &[]).is_err());
        drop(peer);
    }
    #[test]
    fn end_of_a_wait_is_looked_for_without_a_lock() {
        let mesh = Mesh::new(1, 1, None);
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
