//! The owner's side of one connection: who attached, what it was told of, what it must leave.

use std::{
    collections::HashSet,
    io,
    os::fd::{BorrowedFd, RawFd},
    sync::Once,
    time::{Duration, Instant},
};

use mooncake_base::EngineId;

use super::{
    control::Guard,
    link::{Link, Received},
    message::{Message, RegionKind, VERSION},
    probe::{Offer, Ways},
};
use crate::{
    memory::lent::Lent,
    piece::RemoteRange,
    region::{Backing, Region},
    token::{self, Door, Exchange, Nonce, Proof, Side},
};

/// Where the system says whom it lets look into processes, if it is picky about that.
const PTRACE_SCOPE: &str = "/proc/sys/kernel/yama/ptrace_scope";

/// A peer that is attached to this engine, or wants to be.
#[derive(Debug)]
pub(super) struct Client {
    link: Link,
    stage: Stage,
    since: Instant,
    /// The regions it was told of and not yet told to leave.
    given: HashSet<u64>,
}

#[derive(Debug)]
enum Stage {
    /// Nothing was heard of it yet.
    New,
    /// It was asked to prove that it knows the token.
    Challenged(Nonce),
    /// It was offered ways to try.
    Trying(Offer),
    /// It may ask.
    Attached,
}

/// What a turn brought.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// Nothing to read.
    Idle,
    /// A message was served.
    Served,
    /// The peer has left this region.
    Confirmed(u64),
    /// The connection is over.
    Gone,
}

impl Client {
    pub(super) fn new(link: Link) -> Self {
        Self { link, stage: Stage::New, since: Instant::now(), given: HashSet::new() }
    }

    pub(super) fn descriptor(&self) -> RawFd {
        self.link.descriptor()
    }

    pub(super) fn cut(&self) {
        self.link.shut_down();
    }

    /// Whether it has been introducing itself for so long.
    pub(super) fn is_introducing_for(&self, long: Duration) -> bool {
        !matches!(self.stage, Stage::Attached) && self.since.elapsed() > long
    }

    /// Tells it to leave a region, or all; says which it must confirm.
    pub(super) fn withdraw(&mut self, base: Option<u64>) -> Vec<u64> {
        let told: Vec<u64> = match base {
            Some(base) => self.given.take(&base).into_iter().collect(),
            None => self.given.drain().collect(),
        };
        for base in &told {
            if self.link.send(Message::Withdraw { base: *base }, None).is_err() {
                // It does not read. The thread finds the connection closed and forgets the peer,
                // which settles what it should have confirmed.
                self.link.shut_down();
                break;
            }
        }
        told
    }

    /// Serves one message.
    pub(super) fn turn(&mut self, lent: &Lent, guard: &Guard) -> Reply {
        let message = match self.link.receive() {
            Received::Message(message, _) => message,
            Received::Nothing => return Reply::Idle,
            Received::Garbage | Received::Closed => return Reply::Gone,
        };
        let served = match (&self.stage, message) {
            (Stage::New, Message::Hello { version, from: _, to }) => {
                self.greet(version, to, lent, guard)
            }
            (Stage::Challenged(of_owner), Message::Answer { nonce, proof }) => {
                let exchange = Exchange {
                    door: Door::Shm,
                    owner: lent.id.bits(),
                    of_owner: *of_owner,
                    of_caller: nonce,
                };
                self.judge(&exchange, &proof, guard)
            }
            (Stage::Trying(offer), Message::Proof { shared, process }) => {
                let Ways { is_shared, is_process } = offer.judge(shared, process);
                self.stage = Stage::Attached;
                self.link.send(Message::Verdict { is_shared, is_process }, None).ok()
            }
            (Stage::Attached, Message::Ask { id, address, length }) => {
                self.answer(id, RemoteRange { address, length }, lent).ok()
            }
            (Stage::Attached, Message::Confirm { base }) => return Reply::Confirmed(base),
            _ => None,
        };
        if served.is_some() { Reply::Served } else { Reply::Gone }
    }

    fn greet(&mut self, version: u32, to: EngineId, lent: &Lent, guard: &Guard) -> Option<()> {
        // The descriptor of an engine that has ended may name a socket that is now another's, and
        // memory is shared only with processes that could read it anyway.
        let peer = self.link.credentials().ok()?;
        if version != VERSION || to != lent.id || peer.user != own_user() {
            tracing::debug!(version, user = peer.user, "a peer of this host was turned away");
            return None;
        }
        if guard.token.is_none() {
            return self.welcome();
        }
        let nonce = token::nonce();
        self.link.send(Message::Challenge { nonce }, None).ok()?;
        self.stage = Stage::Challenged(nonce);
        Some(())
    }

    /// Looks at the proof that the peer knows the token.
    fn judge(&mut self, exchange: &Exchange, proof: &Proof, guard: &Guard) -> Option<()> {
        let token = guard.token.as_ref()?;
        if !token.is_proven(Side::Caller, exchange, proof) {
            guard.refusals.count_token_here();
            // It learns why, if it still listens.
            let _ = self.link.send(Message::Denied, None);
            return None;
        }
        let proof = token.proof(Side::Owner, exchange);
        self.link.send(Message::Granted { proof }, None).ok()?;
        self.welcome()
    }

    fn welcome(&mut self) -> Option<()> {
        allow_copies();
        let offer = Offer::new().ok()?;
        let (sample, sample_length) = offer.sample();
        let message = Message::Welcome { address: offer.address(), sample, sample_length };
        self.link.send(message, Some(offer.mapping().file())).ok()?;
        self.stage = Stage::Trying(offer);
        Some(())
    }

    fn answer(&mut self, id: u64, range: RemoteRange, lent: &Lent) -> io::Result<()> {
        // The pin keeps the region, and with it the descriptor, until the answer is sent.
        let Ok(pin) = lent.regions.pin(range) else {
            return self.link.send(Message::Missing { id }, None);
        };
        let region: &Region = pin.region();
        let Region { base, length, .. } = *region;
        let found = |kind| Message::Found { id, base, length, kind };
        match (&region.backing, lent.mapping(region)) {
            (Backing::Device, _) => self.link.send(found(RegionKind::Device), None)?,
            (Backing::Shared { .. }, Some(mapping)) => {
                let kind = if mapping.is_huge() { RegionKind::Huge } else { RegionKind::Shared };
                let file: BorrowedFd<'_> = mapping.file();
                self.link.send(found(kind), Some(file))?;
            }
            _ => self.link.send(found(RegionKind::User), None)?,
        }
        self.given.insert(base);
        Ok(())
    }
}

/// Lets processes of this user copy from and to this one where the system lets only parents do so.
/// Whoever gets here is of this user and has shown the token, if there is one.
fn allow_copies() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // 1: a process may name who else; 2 and 3: only an administrator may, or nobody.
        let is_picky = std::fs::read_to_string(PTRACE_SCOPE).is_ok_and(|scope| scope.trim() == "1");
        // SAFETY: the call changes a property of this process, and takes no pointer.
        if is_picky && unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY) } != 0 {
            let error = io::Error::last_os_error();
            tracing::debug!(%error, "peers of this host will copy over the network");
        }
    });
}

/// Whom this process works for.
pub(super) fn own_user() -> u32 {
    // SAFETY: reads a property of the process; cannot fail.
    unsafe { libc::geteuid() }
}
