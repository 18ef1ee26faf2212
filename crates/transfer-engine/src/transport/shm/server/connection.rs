//! The owner's side of one connection: its handshake, the regions announced to the peer, and
//! their withdrawal.

use std::{
    collections::HashSet,
    io,
    os::fd::{BorrowedFd, RawFd},
    sync::{Arc, Once},
    time::{Duration, Instant},
};

use mooncake_base::EngineId;

use crate::{
    memory::{
        exported_memory::ExportedMemory,
        region::{Backing, Region},
    },
    metrics::Refusals,
    token::{self, Channel, Exchange, Nonce, Proof, Token},
    transfer_entry::RemoteRange,
    transport::shm::{
        link::{Link, Received, effective_user},
        message::{RegionKind, ShmMessage, VERSION},
        probe::{ProbeOffer, ProvenAccess},
    },
};

/// The kernel setting that restricts which processes may access another one's memory, if the Yama
/// security module is loaded.
const PTRACE_SCOPE: &str = "/proc/sys/kernel/yama/ptrace_scope";

/// The rules by which peers are admitted.
#[derive(Debug, Default)]
pub(crate) struct AuthPolicy {
    /// The token that peers must prove to know.
    pub(crate) token: Option<Token>,
    /// Counts peers that failed to prove the token.
    pub(crate) refusals: Arc<Refusals>,
}

/// The connection to a peer that is attached to this engine or is in its handshake.
#[derive(Debug)]
pub(super) struct ServerConnection {
    link: Link,
    state: HandshakeState,
    since: Instant,
    /// The bases of the regions that were announced to the peer and not withdrawn.
    announced: HashSet<u64>,
}

#[derive(Debug)]
enum HandshakeState {
    /// The peer has sent nothing yet.
    New,
    /// The peer was asked to prove that it knows the token.
    Challenged(Nonce),
    /// The peer was offered access modes to probe.
    Probing(ProbeOffer),
    /// The handshake is complete; the peer may query regions.
    Attached,
    /// The peer did not confirm a withdrawal in time. It may only confirm and close.
    Expelled,
}

/// The result of serving one message.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ConnectionEvent {
    /// No message was waiting.
    Idle,
    /// A message was handled.
    Served,
    /// The peer confirmed the withdrawal of the region with this base.
    Confirmed(u64),
    /// The connection is closed or must be.
    Closed,
}

impl ServerConnection {
    pub(super) fn new(link: Link) -> Self {
        Self { link, state: HandshakeState::New, since: Instant::now(), announced: HashSet::new() }
    }

    pub(super) fn raw_fd(&self) -> RawFd {
        self.link.raw_fd()
    }

    pub(super) fn shut_down(&self) {
        self.link.shut_down();
    }

    /// Returns whether the handshake is unfinished after `limit`.
    pub(super) fn is_handshaking_for(&self, limit: Duration) -> bool {
        self.is_handshaking() && self.since.elapsed() > limit
    }

    /// Returns whether the handshake is unfinished.
    pub(super) fn is_handshaking(&self) -> bool {
        !matches!(self.state, HandshakeState::Attached | HandshakeState::Expelled)
    }

    /// Ends the connection towards a peer that does not confirm. The peer closes its end when it
    /// accesses no memory any more, at the latest when it dies.
    pub(super) fn expel(&mut self) {
        self.state = HandshakeState::Expelled;
        self.link.end_sending();
    }

    /// Returns whether the peer was told to leave because it did not confirm in time.
    pub(super) fn is_expelled(&self) -> bool {
        matches!(self.state, HandshakeState::Expelled)
    }

    /// Withdraws one region or all of them from the peer. Returns the bases that the peer must
    /// confirm.
    pub(super) fn withdraw(&mut self, base: Option<u64>) -> Vec<u64> {
        let withdrawn: Vec<u64> = match base {
            Some(base) => self.announced.take(&base).into_iter().collect(),
            None => self.announced.drain().collect(),
        };
        for base in &withdrawn {
            if self.link.send(ShmMessage::Withdraw { base: *base }, None).is_err() {
                // The peer does not read. It may be in the middle of a copy.
                self.expel();
                break;
            }
        }
        withdrawn
    }

    /// Receives and handles one message.
    pub(super) fn serve_next(
        &mut self,
        lent: &ExportedMemory,
        auth: &AuthPolicy,
    ) -> ConnectionEvent {
        let message = match self.link.receive() {
            Received::ShmMessage(message, _) => message,
            Received::Empty => return ConnectionEvent::Idle,
            Received::Malformed | Received::Closed => return ConnectionEvent::Closed,
        };
        let served = match (&self.state, message) {
            (HandshakeState::New, ShmMessage::Hello { version, from: _, to }) => {
                self.handle_hello(version, to, lent, auth)
            }
            (HandshakeState::Challenged(owner_nonce), ShmMessage::Answer { nonce, proof }) => {
                let exchange = token::exchange(Channel::Shm, lent.id.bits(), *owner_nonce, nonce);
                self.check_proof(&exchange, &proof, auth)
            }
            (HandshakeState::Probing(offer), ShmMessage::Proof { shared, process }) => {
                let ProvenAccess { is_shared, is_process } = offer.verify(shared, process);
                self.state = HandshakeState::Attached;
                self.link.send(ShmMessage::Verdict { is_shared, is_process }, None).ok()
            }
            (HandshakeState::Attached, ShmMessage::Query { id, address, length }) => {
                self.answer_query(id, RemoteRange { address, length }, lent).ok()
            }
            (HandshakeState::Attached | HandshakeState::Expelled, ShmMessage::Confirm { base }) => {
                return ConnectionEvent::Confirmed(base);
            }
            (HandshakeState::Expelled, _) => Some(()),
            _ => None,
        };
        if served.is_some() { ConnectionEvent::Served } else { ConnectionEvent::Closed }
    }

    fn handle_hello(
        &mut self,
        version: u32,
        to: EngineId,
        lent: &ExportedMemory,
        auth: &AuthPolicy,
    ) -> Option<()> {
        // The socket named by a stale segment descriptor may belong to another engine now. Memory
        // is shared only with processes of the same user, which could read it anyway.
        let peer = self.link.credentials().ok()?;
        if version != VERSION {
            tracing::warn!(
                peer_version = version,
                our_version = VERSION,
                process = peer.process,
                "a process of this host speaks another version of the shared-memory protocol, and \
                 will use TCP; install one version on the host"
            );
            let _ = self.link.send(ShmMessage::OtherVersion { version: VERSION }, None);
            return None;
        }
        if to != lent.id || peer.user != effective_user() {
            tracing::debug!(
                user = peer.user,
                "a peer of this host was refused: other engine or user"
            );
            return None;
        }
        if auth.token.is_none() {
            return self.send_offer();
        }
        let nonce = token::nonce();
        self.link.send(ShmMessage::Challenge { nonce }, None).ok()?;
        self.state = HandshakeState::Challenged(nonce);
        Some(())
    }

    /// Checks the proof that the peer knows the token.
    fn check_proof(&mut self, exchange: &Exchange, proof: &Proof, auth: &AuthPolicy) -> Option<()> {
        let Some(proof) = exchange.answer(auth.token.as_ref()?, proof) else {
            auth.refusals.token_here.increment();
            // The peer learns the reason if it still reads.
            let _ = self.link.send(ShmMessage::Denied, None);
            return None;
        };
        self.link.send(ShmMessage::Granted { proof }, None).ok()?;
        self.send_offer()
    }

    fn send_offer(&mut self) -> Option<()> {
        allow_process_vm();
        let offer = ProbeOffer::new().ok()?;
        let (sample, sample_length) = offer.sample();
        let message = ShmMessage::Welcome { address: offer.address(), sample, sample_length };
        self.link.send(message, Some(offer.mapping().file())).ok()?;
        self.state = HandshakeState::Probing(offer);
        Some(())
    }

    fn answer_query(
        &mut self,
        id: u64,
        range: RemoteRange,
        lent: &ExportedMemory,
    ) -> io::Result<()> {
        // The pin keeps the region and its file descriptor alive until the answer is sent.
        let Ok(pin) = lent.regions.pin(range) else {
            return self.link.send(ShmMessage::Missing { id }, None);
        };
        let region: &Region = pin.region();
        let Region { base, length, .. } = *region;
        let found = |kind| ShmMessage::Found { id, base, length, kind };
        match (&region.backing, region.mapping()) {
            (Backing::Device, _) => self.link.send(found(RegionKind::Device), None)?,
            (Backing::Shared { .. }, Some(mapping)) => {
                let kind = if mapping.is_huge() { RegionKind::Huge } else { RegionKind::Shared };
                let file: BorrowedFd<'_> = mapping.file();
                self.link.send(found(kind), Some(file))?;
            }
            _ => self.link.send(found(RegionKind::User), None)?,
        }
        self.announced.insert(base);
        Ok(())
    }
}

/// Lets other processes of this user copy from and to this one where the kernel allows only parent
/// processes. A peer gets this far only if it belongs to this user and has proven the token, if one
/// is set.
fn allow_process_vm() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // 1: a process may name others that have access; 2: only administrators; 3: no process.
        let is_restricted =
            std::fs::read_to_string(PTRACE_SCOPE).is_ok_and(|scope| scope.trim() == "1");
        if is_restricted
            // SAFETY: the call changes a property of this process and takes no pointer.
            && unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY) } != 0
        {
            let error = io::Error::last_os_error();
            tracing::debug!(%error, "peers of this host must copy over tcp: PR_SET_PTRACER failed");
        }
    });
}
