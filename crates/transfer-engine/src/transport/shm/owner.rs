//! The owner's side of one connection: who attached, what it was told of, what it must leave.

use std::{
    collections::HashSet,
    io,
    os::fd::{BorrowedFd, RawFd},
    time::{Duration, Instant},
};

use mooncake_base::EngineId;

use super::{
    link::{Link, Received},
    message::{Message, RegionKind, VERSION},
    probe::{Offer, Ways},
};
use crate::{
    memory::lent::Lent,
    piece::RemoteRange,
    region::{Backing, Region},
};

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
    pub(super) fn turn(&mut self, lent: &Lent) -> Reply {
        let message = match self.link.receive() {
            Received::Message(message, _) => message,
            Received::Nothing => return Reply::Idle,
            Received::Garbage | Received::Closed => return Reply::Gone,
        };
        let served = match (&self.stage, message) {
            (Stage::New, Message::Hello { version, from: _, to }) => {
                self.welcome(version, to, lent)
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

    fn welcome(&mut self, version: u32, to: EngineId, lent: &Lent) -> Option<()> {
        // The descriptor of an engine that has ended may name a socket that is now another's, and
        // memory is shared only with processes that could read it anyway.
        let peer = self.link.credentials().ok()?;
        if version != VERSION || to != lent.id || peer.user != own_user() {
            tracing::debug!(version, user = peer.user, "a peer of this host was turned away");
            return None;
        }
        let offer = Offer::new().ok()?;
        let message = Message::Welcome { address: offer.address() };
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

/// Whom this process works for.
pub(super) fn own_user() -> u32 {
    // SAFETY: reads a property of the process; cannot fail.
    unsafe { libc::geteuid() }
}
