//! Processes of one host and user: shared memory is mapped, other memory is copied by the kernel.
//!
//! Each engine listens on an abstract Unix socket that its descriptor names. Who attaches proves
//! by real exchanges which of two ways lead to the owner's memory ([`probe`]): mapping what the
//! owner sends by descriptor, and `process_vm_readv`/`writev`. Where neither works (another host,
//! user, or container) there is no path, which is no fault. The connection stays: over it the
//! attached side asks once for each region that it meets and the owner withdraws regions; the
//! end of a process is the end of its connections.

mod attachment;
pub(crate) mod control;
#[cfg(test)]
mod fuzz;
mod link;
mod message;
mod owner;
mod probe;

use std::sync::{Arc, Weak};

#[cfg(test)]
pub(crate) use self::fuzz::fuzz_targets;

use mooncake_base::{Clock, EngineId, Error, ErrorCode, Moment, Result, SystemClock};

use self::{
    attachment::{Attachment, Way},
    control::{Control, Shared},
    link::Link,
    message::{Message, Secret, VERSION},
    probe::{Direction, Ways},
};
use crate::{
    choice::Footing,
    copy::{self, Access},
    descriptor::SegmentDescriptor,
    piece::{Opcode, Piece, RemoteRange},
    process,
    token::{self, Door, Exchange, Side},
    transport::{Capability, Path, Transport, TransportKind},
};

/// How many pieces one system call moves.
const PIECES_A_CALL: usize = 64;

/// How many bytes one system call moves, about: between calls a withdrawal is noticed.
const BYTES_A_CALL: usize = 4 << 20;

/// The way to processes of the same host.
#[derive(Debug)]
pub(crate) struct ShmTransport {
    control: Arc<Control>,
}

impl ShmTransport {
    pub(crate) const fn new(control: Arc<Control>) -> Self {
        Self { control }
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
            return Err(no_path("the peer offers no way for processes of its host"));
        };
        let patience = deadline.left(SystemClock.now());
        let link = Link::connect(&local.unix_socket, patience)
            .map_err(|error| no_path("the peer is not on this host").caused_by(error))?;
        let peer = link
            .credentials()
            .map_err(|error| no_path("the peer cannot be identified").caused_by(error))?;
        if peer.user != owner::own_user() {
            return Err(no_path("the peer belongs to another user").with("user", peer.user));
        }
        let hello = Hello { to: engine, process: peer.process, deadline };
        let (ways, probed) = introduce(&link, &self.control, hello)?;
        if ways == Ways::default() {
            return Err(no_path("neither of the ways into the peer's memory works"));
        }
        let attachment = Arc::new(Attachment::new(link, peer.process, ways));
        let id = self.control.shared().attach(&attachment);
        let control = Arc::downgrade(self.control.shared());
        let generation = process::generation();
        Ok(Arc::new(ShmPath { attachment, id, control, generation, probed }))
    }
}

/// Whom an engine introduces itself to.
#[derive(Debug, Clone, Copy)]
struct Hello {
    to: EngineId,
    /// The peer's process.
    process: i32,
    deadline: Moment,
}

/// Tries the ways that the owner offers; says which work, and how fast the kernel copies.
fn introduce(link: &Link, control: &Control, hello: Hello) -> Result<(Ways, Option<u64>)> {
    let Hello { to, process, deadline } = hello;
    let failed = |error: std::io::Error| no_path("the peer did not let us attach").caused_by(error);
    let receive = || link.receive_until(deadline).map_err(failed);
    let send = |message| link.send(message, None).map_err(failed);
    send(Message::Hello { version: VERSION, from: control.id(), to })?;
    let welcome = exchange_tokens(control, to, receive()?, &send, &receive)?;
    let (Message::Welcome { address, sample, sample_length }, file) = welcome else {
        return Err(out_of_turn());
    };
    let shared: Secret = probe::try_shared(file).unwrap_or_default();
    let secret: Option<Secret> = probe::try_process(process, address);
    let probed = secret.and_then(|_| probe::measure(process, (sample, sample_length)));
    send(Message::Proof { shared, process: secret.unwrap_or_default() })?;
    match receive()? {
        (Message::Verdict { is_shared, is_process }, _) => {
            Ok((Ways { is_shared, is_process }, probed.filter(|_| is_process)))
        }
        _ => Err(out_of_turn()),
    }
}

/// A message with what came beside it.
type Letter = (Message, Option<std::os::fd::OwnedFd>);

/// Answers the owner's challenge, if it has one, and gives the message that comes after that.
fn exchange_tokens(
    control: &Control,
    to: EngineId,
    first: Letter,
    send: &dyn Fn(Message) -> Result<()>,
    receive: &dyn Fn() -> Result<Letter>,
) -> Result<Letter> {
    let refused = |text| {
        control.refusals().count_token_there();
        Error::new(ErrorCode::ILLEGAL_CLIENT, text)
    };
    let (token, of_owner) = match (control.token(), &first.0) {
        (Some(token), Message::Challenge { nonce }) => (token, *nonce),
        (Some(_), _) => return Err(refused("the peer asks for no token, and has shown none")),
        (None, Message::Challenge { .. }) => {
            return Err(refused("the peer asks for a token, and this engine has none"));
        }
        (None, _) => return Ok(first),
    };
    let of_caller = token::nonce();
    let exchange = Exchange { door: Door::Shm, owner: to.bits(), of_owner, of_caller };
    let proof = token.proof(Side::Caller, &exchange);
    send(Message::Answer { nonce: of_caller, proof })?;
    match receive()?.0 {
        Message::Granted { proof } if token.is_proven(Side::Owner, &exchange, &proof) => receive(),
        Message::Granted { .. } => Err(refused("the peer does not know the token")),
        Message::Denied => Err(refused("the peer has another token")),
        _ => Err(out_of_turn()),
    }
}

fn out_of_turn() -> Error {
    no_path("the peer answered out of turn")
}

fn no_path(why: &str) -> Error {
    Error::new(ErrorCode::TRANSFER_FAIL, why)
}

/// The way to one process of the same host.
#[derive(Debug)]
struct ShmPath {
    attachment: Arc<Attachment>,
    id: u64,
    control: Weak<Shared>,
    generation: u64,
    /// How fast the kernel copied from the peer's memory when the path was made.
    probed: Option<u64>,
}

impl Path for ShmPath {
    fn kind(&self) -> TransportKind {
        TransportKind::Shm
    }

    fn reaches(&self, range: RemoteRange) -> bool {
        let soon = SystemClock.now() + std::time::Duration::from_secs(1);
        let entered = self.attachment.enter(range, soon);
        entered.is_ok_and(|entered| !matches!(entered.region().way, Way::Unserved | Way::Failed(_)))
    }

    fn transfer(&self, opcode: Opcode, pieces: &mut [Piece], deadline: Moment) {
        if self.attachment.link().is_closed() {
            self.attachment.die();
        }
        let mut rest = pieces;
        while let Some(piece) = rest.first_mut() {
            if piece.outcome.is_some() {
                rest = &mut rest[1..];
                continue;
            }
            if !self.is_alive() {
                piece.outcome = Some(Err(attachment::peer_gone()));
                continue;
            }
            let entered = match self.attachment.enter(piece.remote_range(), deadline) {
                Ok(entered) => entered,
                Err(error) => {
                    piece.outcome = Some(Err(error));
                    continue;
                }
            };
            let region = entered.region();
            // All that follow in the same region go in one run.
            let count = rest
                .iter()
                .take_while(|piece| piece.outcome.is_some() || region.holds(piece.remote_range()))
                .count();
            let (run, behind) = rest.split_at_mut(count);
            let gate = || entered.may_go_on(deadline);
            match &region.way {
                Way::Mapped(mapping) => mapping.transfer(opcode, run, region.base, &gate),
                Way::Process => copy_process(opcode, run, self.attachment.process(), &gate),
                // Left open for another way.
                Way::Unserved => {}
                Way::Failed(error) => {
                    for piece in run.iter_mut().filter(|piece| piece.outcome.is_none()) {
                        piece.outcome = Some(Err(error.clone()));
                    }
                }
            }
            rest = behind;
        }
    }

    fn is_alive(&self) -> bool {
        self.attachment.is_alive()
    }

    fn footing(&self, range: RemoteRange) -> Option<Footing> {
        self.attachment.footing(range)
    }

    fn probed_bytes_per_second(&self) -> Option<u64> {
        self.probed
    }

    fn close(&self) {
        if process::is_forked_since(self.generation) {
            return;
        }
        match self.control.upgrade() {
            Some(control) => control.detach(self.id),
            None => self.attachment.die(),
        }
    }
}

impl Drop for ShmPath {
    fn drop(&mut self) {
        self.close();
    }
}

/// Moves pieces that lie in one region of another process, many with each call.
///
/// In the order of their addresses there: the kernel looks up and pins the pages of each range of
/// the other process by itself, which costs about as much as copying a page, so neighbours are
/// named as one range, wherever their bytes are here.
fn copy_process(opcode: Opcode, pieces: &mut [Piece], process: i32, gate: &dyn Fn() -> Result<()>) {
    let direction = match opcode {
        Opcode::Read => Direction::In,
        Opcode::Write => Direction::Out,
    };
    let order = in_order_there(pieces);
    let mut rest = &order[..];
    while !rest.is_empty() {
        let (mut own, mut far) = (Vectors::default(), Vectors::default());
        let (mut count, mut bytes) = (0, 0);
        for index in rest.iter().take(PIECES_A_CALL) {
            let piece = &pieces[*index];
            // A long piece goes in parts, by itself.
            if bytes >= BYTES_A_CALL || (count > 0 && piece.local.length() > BYTES_A_CALL) {
                break;
            }
            let (here, there) = vectors(piece, 0);
            own.push(here);
            far.push(there);
            count += 1;
            bytes += piece.local.length();
        }
        let moved = match gate() {
            // Nothing was moved by the call yet where a part at a time is moved below.
            Ok(()) if bytes > BYTES_A_CALL && count == 1 => 0,
            Ok(()) => {
                probe::call(process, direction, own.as_slice(), far.as_slice()).unwrap_or_default()
            }
            Err(error) => {
                for index in rest {
                    pieces[*index].outcome = Some(Err(error.clone()));
                }
                return;
            }
        };
        let end = |piece: &Piece, done| finish(piece, done, (process, direction), gate);
        rest = &rest[settle(pieces, &rest[..count], moved, end)..];
    }
}

/// The pieces that are still to be moved, by their addresses at the owner.
fn in_order_there(pieces: &[Piece]) -> Vec<usize> {
    let is_open = |index: &usize| pieces[*index].outcome.is_none();
    let mut order: Vec<usize> = (0..pieces.len()).filter(is_open).collect();
    order.sort_unstable_by_key(|index| pieces[*index].remote);
    order
}

/// Ranges for one system call, neighbours joined.
struct Vectors {
    ranges: [libc::iovec; PIECES_A_CALL],
    count: usize,
}

impl Default for Vectors {
    fn default() -> Self {
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Self { ranges: [empty; PIECES_A_CALL], count: 0 }
    }
}

impl Vectors {
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

/// Marks what a call has moved as done and has the piece in which it stopped finished alone; says
/// how many of the group need no further look.
fn settle(
    pieces: &mut [Piece],
    group: &[usize],
    mut moved: usize,
    finish: impl FnOnce(&Piece, usize) -> Result<()>,
) -> usize {
    for (place, index) in group.iter().enumerate() {
        let piece = &mut pieces[*index];
        if moved < piece.local.length() {
            piece.outcome = Some(finish(piece, moved));
            return place + 1;
        }
        moved -= piece.local.length();
        piece.outcome = Some(Ok(()));
    }
    group.len()
}

/// Moves the rest of one piece, in parts.
fn finish(
    piece: &Piece,
    mut done: usize,
    (process, direction): (i32, Direction),
    gate: &dyn Fn() -> Result<()>,
) -> Result<()> {
    while done < piece.local.length() {
        gate()?;
        let (own, far) = vectors(piece, done);
        match probe::call(process, direction, &[own], &[far]) {
            Ok(moved) if moved > 0 => done += moved,
            answer => {
                let access = match direction {
                    Direction::In => Access::Write,
                    Direction::Out => Access::Read,
                };
                if !copy::is_accessible(piece.local, access) {
                    return Err(copy::inaccessible(piece.local, access));
                }
                let error = no_path("the owner's memory cannot be touched")
                    .with("address", format_args!("{:#x}", piece.remote))
                    .with("length", piece.local.length());
                return Err(match answer {
                    Err(cause) => error.caused_by(cause),
                    Ok(_) => error,
                });
            }
        }
    }
    Ok(())
}

/// The piece from `done` on, at most one part of it, here and there.
fn vectors(piece: &Piece, done: usize) -> (libc::iovec, libc::iovec) {
    let length = (piece.local.length() - done).min(BYTES_A_CALL);
    let vector =
        |address: usize| libc::iovec { iov_base: (address + done) as *mut _, iov_len: length };
    (vector(piece.local.address()), vector(piece.remote as usize))
}
