//! The transport between processes of one host and user: shared memory is mapped, other memory is
//! copied by the kernel.
//!
//! Each engine listens on an abstract Unix socket that its segment descriptor names. An attaching
//! engine probes with real exchanges which of two access modes reach the owner's memory
//! ([`probe`]): mapping memory whose file descriptor the owner sends, and
//! `process_vm_readv`/`writev`. Where neither works (another host, user, or container) there is no
//! path over this transport. The connection stays open: the attached engine uses it to query each
//! region once, and the owner uses it to withdraw regions. When a process ends, the kernel closes
//! its connections.

mod attachment;
#[cfg(test)]
mod fuzz;
mod link;
mod message;
mod probe;
pub(crate) mod server;
mod server_connection;

use std::sync::{Arc, Weak};

#[cfg(test)]
pub(crate) use self::fuzz::fuzz_targets;

use mooncake_base::{Clock, EngineId, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_os::fork;

use self::{
    attachment::{AccessMode, Attachment},
    link::Link,
    message::{Message, Secret, VERSION},
    probe::{Direction, ProvenAccess},
    server::{ServerShared, ShmServer},
};
use crate::{
    copy::{self, Access},
    discovery::descriptor::SegmentDescriptor,
    path::selection::RemoteMemory,
    token::{self, Channel, Exchange, HandshakeSide},
    transfer_entry::{Opcode, RemoteRange, TransferEntry},
    transport::{Capability, Path, TimeLimits, Transport, TransportKind},
};

/// The maximum number of entries that one system call moves.
const ENTRIES_PER_CALL: usize = 64;

/// The approximate number of bytes that one system call moves. Withdrawals are checked between
/// calls.
const BYTES_PER_CALL: usize = 4 << 20;

/// The transport to processes of the same host.
#[derive(Debug)]
pub(crate) struct ShmTransport {
    server: Arc<ShmServer>,
}

impl ShmTransport {
    pub(crate) const fn new(server: Arc<ShmServer>) -> Self {
        Self { server }
    }
}

impl Transport for ShmTransport {
    fn kind(&self) -> TransportKind {
        TransportKind::Shm
    }

    fn capability(&self) -> Capability {
        Capability {
            crosses_hosts: false,
            owner_checks: false,
            needs_registered_local: false,
            cost: 10,
        }
    }

    fn connect(&self, peer: &SegmentDescriptor, deadline: Moment) -> Result<Arc<dyn Path>> {
        let own = peer.mooncake.as_ref();
        let local = own.and_then(|own| own.local.as_ref());
        let (Some(engine), Some(local)) = (own.and_then(|own| own.engine()), local) else {
            return Err(no_path("the peer does not offer shared memory"));
        };
        let timeout = deadline.left(SystemClock.now());
        let link = Link::connect(&local.unix_socket, timeout)
            .map_err(|error| no_path("the peer is not on this host").caused_by(error))?;
        let peer = link
            .credentials()
            .map_err(|error| no_path("the peer cannot be identified").caused_by(error))?;
        if peer.user != server_connection::effective_user() {
            return Err(no_path("the peer belongs to another user").with("user", peer.user));
        }
        let target = HandshakeTarget { to: engine, process: peer.process, deadline };
        let (proven, probed) = handshake(&link, &self.server, target)?;
        if proven == ProvenAccess::default() {
            return Err(no_path("neither mapping nor copying the peer's memory works"));
        }
        let attachment = Arc::new(Attachment::new(link, peer.process, proven));
        let id = self.server.shared().attach(&attachment);
        let server = Arc::downgrade(self.server.shared());
        let generation = fork::generation();
        Ok(Arc::new(ShmPath { attachment, id, server, generation, probed }))
    }
}

/// The peer of a handshake.
#[derive(Debug, Clone, Copy)]
struct HandshakeTarget {
    to: EngineId,
    /// The peer's process id, as this process sees it.
    process: i32,
    deadline: Moment,
}

/// Runs the handshake and probes the access modes that the owner offers. Returns the modes that
/// work and the measured speed of the kernel's copy in bytes per second.
fn handshake(
    link: &Link,
    server: &ShmServer,
    target: HandshakeTarget,
) -> Result<(ProvenAccess, Option<u64>)> {
    let HandshakeTarget { to, process, deadline } = target;
    let failed =
        |error: std::io::Error| no_path("the shm handshake with the peer failed").caused_by(error);
    let receive = || link.receive_until(deadline).map_err(failed);
    let send = |message| link.send(message, None).map_err(failed);
    send(Message::Hello { version: VERSION, from: server.id(), to })?;
    let welcome = exchange_tokens(server, to, receive()?, &send, &receive)?;
    let (Message::Welcome { address, sample, sample_length }, file) = welcome else {
        return Err(unexpected_message());
    };
    let shared: Secret = probe::try_shared(file).unwrap_or_default();
    let secret: Option<Secret> = probe::try_process(process, address);
    let probed = secret.and_then(|_| probe::measure_process_vm(process, (sample, sample_length)));
    send(Message::Proof { shared, process: secret.unwrap_or_default() })?;
    match receive()? {
        (Message::Verdict { is_shared, is_process }, _) => {
            Ok((ProvenAccess { is_shared, is_process }, probed.filter(|_| is_process)))
        }
        _ => Err(unexpected_message()),
    }
}

/// A message with the file descriptor that accompanied it, if any.
type MessageWithFd = (Message, Option<std::os::fd::OwnedFd>);

/// Answers the owner's token challenge, if the owner sent one. Returns the message that follows.
fn exchange_tokens(
    server: &ShmServer,
    to: EngineId,
    first: MessageWithFd,
    send: &dyn Fn(Message) -> Result<()>,
    receive: &dyn Fn() -> Result<MessageWithFd>,
) -> Result<MessageWithFd> {
    let refused = |text| {
        server.refusals().count_token_there();
        Error::new(ErrorCode::ILLEGAL_CLIENT, text)
    };
    let (token, owner_nonce) = match (server.token(), &first.0) {
        (Some(token), Message::Challenge { nonce }) => (token, *nonce),
        (Some(_), _) => return Err(refused("the peer asks for no token, and has shown none")),
        (None, Message::Challenge { .. }) => {
            return Err(refused("the peer asks for a token, and this engine has none"));
        }
        (None, _) => return Ok(first),
    };
    let caller_nonce = token::nonce();
    let exchange = Exchange { channel: Channel::Shm, owner: to.bits(), owner_nonce, caller_nonce };
    let proof = exchange.proof(token, HandshakeSide::Caller);
    send(Message::Answer { nonce: caller_nonce, proof })?;
    match receive()?.0 {
        Message::Granted { proof } if exchange.verify(token, HandshakeSide::Owner, &proof) => {
            receive()
        }
        Message::Granted { .. } => Err(refused("the peer does not know the token")),
        Message::Denied => Err(refused("the peer has another token")),
        _ => Err(unexpected_message()),
    }
}

fn unexpected_message() -> Error {
    no_path("the peer sent an unexpected message")
}

fn no_path(why: &str) -> Error {
    Error::new(ErrorCode::TRANSFER_FAIL, why)
}

/// The path to one process of the same host.
#[derive(Debug)]
struct ShmPath {
    attachment: Arc<Attachment>,
    id: u64,
    server: Weak<ServerShared>,
    generation: u64,
    /// The speed of the kernel's copy from the peer's memory in bytes per second, measured when the
    /// path was created.
    probed: Option<u64>,
}

impl Path for ShmPath {
    fn kind(&self) -> TransportKind {
        TransportKind::Shm
    }

    fn reaches(&self, range: RemoteRange) -> bool {
        let soon = SystemClock.now() + std::time::Duration::from_secs(1);
        let guard = self.attachment.acquire(range, soon);
        guard.is_ok_and(|guard| {
            !matches!(guard.region().access, AccessMode::Unsupported | AccessMode::Failed(_))
        })
    }

    fn transfer(&self, opcode: Opcode, entries: &mut [TransferEntry], limits: TimeLimits) {
        let deadline = limits.deadline;
        if self.attachment.link().is_closed() {
            self.attachment.close();
        }
        let mut rest = entries;
        while let Some(entry) = rest.first_mut() {
            if entry.outcome.is_some() {
                rest = &mut rest[1..];
                continue;
            }
            if !self.is_alive() {
                entry.outcome = Some(Err(attachment::peer_gone()));
                continue;
            }
            let guard = match self.attachment.acquire(entry.remote_range(), limits.give_up_at()) {
                Ok(guard) => guard,
                Err(error) => {
                    entry.outcome = Some(Err(error));
                    continue;
                }
            };
            let region = guard.region();
            // All following entries in the same region are moved in one run.
            let count = rest
                .iter()
                .take_while(|entry| entry.outcome.is_some() || region.holds(entry.remote_range()))
                .count();
            let (run, behind) = rest.split_at_mut(count);
            let gate = || guard.check(deadline);
            match &region.access {
                AccessMode::Mapped(mapping) => mapping.transfer(opcode, run, region.base, &gate),
                AccessMode::Process => {
                    copy_by_kernel(opcode, run, self.attachment.process(), &gate)
                }
                // The entries stay open for another path.
                AccessMode::Unsupported => {}
                AccessMode::Failed(error) => {
                    for entry in run.iter_mut().filter(|entry| entry.outcome.is_none()) {
                        entry.outcome = Some(Err(error.clone()));
                    }
                }
            }
            rest = behind;
        }
    }

    fn is_alive(&self) -> bool {
        self.attachment.is_alive()
    }

    fn remote_memory(&self, range: RemoteRange) -> Option<RemoteMemory> {
        self.attachment.remote_memory(range)
    }

    fn probed_bytes_per_second(&self) -> Option<u64> {
        self.probed
    }

    fn close(&self) {
        if fork::is_forked_since(self.generation) {
            return;
        }
        match self.server.upgrade() {
            Some(server) => server.detach(self.id),
            None => self.attachment.close(),
        }
    }
}

impl Drop for ShmPath {
    fn drop(&mut self) {
        self.close();
    }
}

/// Moves entries that lie in one region of another process, many per system call.
///
/// The entries are sorted by their remote addresses, so that neighbours can be passed as one remote
/// range wherever their local bytes are. The kernel looks up and pins the pages of each remote
/// range separately, which costs about as much as copying a page.
fn copy_by_kernel(
    opcode: Opcode,
    entries: &mut [TransferEntry],
    process: i32,
    gate: &dyn Fn() -> Result<()>,
) {
    let direction = match opcode {
        Opcode::Read => Direction::In,
        Opcode::Write => Direction::Out,
    };
    let order = sorted_by_remote(entries);
    let mut rest = &order[..];
    while !rest.is_empty() {
        let (mut local, mut remote) = (IoVecs::default(), IoVecs::default());
        let (mut count, mut bytes) = (0, 0);
        for index in rest.iter().take(ENTRIES_PER_CALL) {
            let entry = &entries[*index];
            // A long entry is copied alone, in parts.
            if bytes >= BYTES_PER_CALL || (count > 0 && entry.local.length() > BYTES_PER_CALL) {
                break;
            }
            let (here, there) = iovecs(entry, 0);
            local.push(here);
            remote.push(there);
            count += 1;
            bytes += entry.local.length();
        }
        let moved = match gate() {
            // A long entry is moved by `copy_remaining` below, from its beginning.
            Ok(()) if bytes > BYTES_PER_CALL && count == 1 => 0,
            Ok(()) => {
                probe::process_vm_copy(process, direction, local.as_slice(), remote.as_slice())
                    .unwrap_or_default()
            }
            Err(error) => {
                for index in rest {
                    entries[*index].outcome = Some(Err(error.clone()));
                }
                return;
            }
        };
        let end =
            |entry: &TransferEntry, done| copy_remaining(entry, done, (process, direction), gate);
        rest = &rest[record_moved(entries, &rest[..count], moved, end)..];
    }
}

/// Returns the indexes of the unfinished entries, sorted by remote address.
fn sorted_by_remote(entries: &[TransferEntry]) -> Vec<usize> {
    let is_open = |index: &usize| entries[*index].outcome.is_none();
    let mut order: Vec<usize> = (0..entries.len()).filter(is_open).collect();
    order.sort_unstable_by_key(|index| entries[*index].remote);
    order
}

/// The ranges of one system call; adjacent ranges are merged.
struct IoVecs {
    ranges: [libc::iovec; ENTRIES_PER_CALL],
    count: usize,
}

impl Default for IoVecs {
    fn default() -> Self {
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Self { ranges: [empty; ENTRIES_PER_CALL], count: 0 }
    }
}

impl IoVecs {
    fn push(&mut self, next: libc::iovec) {
        if let Some(last) = self.ranges[..self.count].last_mut()
            && last.iov_base as usize + last.iov_len == next.iov_base as usize
        {
            last.iov_len += next.iov_len;
            return;
        }
        self.ranges[self.count] = next;
        self.count += 1;
    }

    fn as_slice(&self) -> &[libc::iovec] {
        &self.ranges[..self.count]
    }
}

/// Records the outcomes of a system call that moved `moved` bytes. The entry at which the call
/// stopped is completed by `finish`. Returns the number of entries of the group that are done.
fn record_moved(
    entries: &mut [TransferEntry],
    group: &[usize],
    mut moved: usize,
    finish: impl FnOnce(&TransferEntry, usize) -> Result<()>,
) -> usize {
    for (place, index) in group.iter().enumerate() {
        let entry = &mut entries[*index];
        if moved < entry.local.length() {
            entry.outcome = Some(finish(entry, moved));
            return place + 1;
        }
        moved -= entry.local.length();
        entry.outcome = Some(Ok(()));
    }
    group.len()
}

/// Copies the rest of one entry, in parts.
fn copy_remaining(
    entry: &TransferEntry,
    mut done: usize,
    (process, direction): (i32, Direction),
    gate: &dyn Fn() -> Result<()>,
) -> Result<()> {
    while done < entry.local.length() {
        gate()?;
        let (local, remote) = iovecs(entry, done);
        match probe::process_vm_copy(process, direction, &[local], &[remote]) {
            Ok(moved) if moved > 0 => done += moved,
            answer => {
                let access = match direction {
                    Direction::In => Access::Write,
                    Direction::Out => Access::Read,
                };
                if !copy::is_accessible(entry.local, access) {
                    return Err(copy::inaccessible(entry.local, access));
                }
                let error = no_path("the owner's memory cannot be accessed")
                    .with("address", format_args!("{:#x}", entry.remote))
                    .with("length", entry.local.length());
                return Err(match answer {
                    Err(cause) => error.caused_by(cause),
                    Ok(_) => error,
                });
            }
        }
    }
    Ok(())
}

/// Returns the local and the remote range of the next part of an entry, from `done` on.
fn iovecs(entry: &TransferEntry, done: usize) -> (libc::iovec, libc::iovec) {
    let length = (entry.local.length() - done).min(BYTES_PER_CALL);
    let vector =
        |address: usize| libc::iovec { iov_base: (address + done) as *mut _, iov_len: length };
    (vector(entry.local.address()), vector(entry.remote as usize))
}
