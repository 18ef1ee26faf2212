//! Attaching to a process of the same host: the handshake, and the probe of its memory.

use mooncake_base::{Clock, EngineId, Error, ErrorCode, Moment, Result, SystemClock};

use super::attachment::Attachment;
use crate::{
    discovery::descriptor::SegmentDescriptor,
    token::{self, Channel, Prover},
    transport::shm::{
        link::{Link, effective_user},
        message::{Secret, ShmMessage, VERSION},
        probe::{self, ProvenAccess},
        server::ShmServer,
    },
};

/// An owner that this process is attached to.
#[derive(Debug)]
pub(super) struct AttachedOwner {
    pub(super) attachment: Attachment,
    /// The speed of the kernel's copy from the owner's memory in bytes per second, if it works.
    pub(super) probed: Option<u64>,
}

/// Connects to an owner on this host and probes which access modes reach its memory.
///
/// # Errors
/// The owner is on another host or of another user, knows another token, or neither access mode
/// reaches its memory.
pub(super) fn attach(
    descriptor: &SegmentDescriptor,
    server: &ShmServer,
    deadline: Moment,
) -> Result<AttachedOwner> {
    let own = descriptor.mooncake.as_ref();
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
    if peer.user != effective_user() {
        return Err(no_path("the peer belongs to another user").with("user", peer.user));
    }
    let target = HandshakeTarget { to: engine, process: peer.process, deadline };
    let (proven, probed) = handshake(&link, server, target)?;
    if proven == ProvenAccess::default() {
        return Err(no_path("neither mapping nor copying the peer's memory works"));
    }
    Ok(AttachedOwner { attachment: Attachment::new(link, peer.process, proven), probed })
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
    send(ShmMessage::Hello { version: VERSION, from: server.id(), to })?;
    let first = receive()?;
    if let ShmMessage::OtherVersion { version } = first.0 {
        let text = "the peer speaks another version of the shared-memory protocol; install one \
                    version on the host";
        let error = Error::new(ErrorCode::INVALID_VERSION, text);
        return Err(error.with("peer_version", version).with("our_version", VERSION));
    }
    let welcome = exchange_tokens(server, to, first, &send, &receive)?;
    let (ShmMessage::Welcome { address, sample, sample_length }, file) = welcome else {
        return Err(unexpected_message());
    };
    let shared: Secret = probe::try_shared(file).unwrap_or_default();
    let secret: Option<Secret> = probe::try_process(process, address);
    let probed = secret.and_then(|_| probe::measure_process_vm(process, (sample, sample_length)));
    send(ShmMessage::Proof { shared, process: secret.unwrap_or_default() })?;
    match receive()? {
        (ShmMessage::Verdict { is_shared, is_process }, _) => {
            Ok((ProvenAccess { is_shared, is_process }, if is_process { probed } else { None }))
        }
        _ => Err(unexpected_message()),
    }
}

/// A message with the file descriptor that accompanied it, if any.
type MessageWithFd = (ShmMessage, Option<std::os::fd::OwnedFd>);

/// Answers the owner's token challenge, if the owner sent one. Returns the message that follows.
fn exchange_tokens(
    server: &ShmServer,
    to: EngineId,
    first: MessageWithFd,
    send: &dyn Fn(ShmMessage) -> Result<()>,
    receive: &dyn Fn() -> Result<MessageWithFd>,
) -> Result<MessageWithFd> {
    let refused = |text| {
        server.refusals().token_there.increment();
        Error::new(ErrorCode::ILLEGAL_CLIENT, text)
    };
    let (token, owner_nonce) = match (server.token(), &first.0) {
        (Some(token), ShmMessage::Challenge { nonce }) => (token, *nonce),
        (Some(_), _) => return Err(refused("the peer asks for no token, and has shown none")),
        (None, ShmMessage::Challenge { .. }) => {
            return Err(refused("the peer asks for a token, and this engine has none"));
        }
        (None, _) => return Ok(first),
    };
    let caller_nonce = token::nonce();
    let exchange = token::exchange(Channel::Shm, to.bits(), owner_nonce, caller_nonce);
    let proof = exchange.proof(token, Prover::Caller, &[]);
    send(ShmMessage::Answer { nonce: caller_nonce, proof })?;
    match receive()?.0 {
        ShmMessage::Granted { proof } if exchange.is_proven(token, Prover::Callee, &[], &proof) => {
            receive()
        }
        ShmMessage::Granted { .. } => Err(refused("the peer does not know the token")),
        ShmMessage::Denied => Err(refused("the peer has another token")),
        _ => Err(unexpected_message()),
    }
}

fn unexpected_message() -> Error {
    no_path("the peer sent an unexpected message")
}

fn no_path(why: &str) -> Error {
    Error::new(ErrorCode::TRANSFER_FAIL, why)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{memory::exported_memory::ExportedMemory, transport::shm::server::AuthPolicy};

    #[test]
    fn each_end_names_both_versions() {
        let patience = Duration::from_secs(20);
        let deadline = SystemClock.now() + patience;
        let lent = ExportedMemory::register(EngineId::random());
        let server = ShmServer::start(lent, AuthPolicy::default()).unwrap();
        let older = Link::connect(server.name(), patience).unwrap();
        let hello = ShmMessage::Hello { version: 2, from: EngineId::random(), to: server.id() };
        older.send(hello, None).unwrap();
        let (answer, _) = older.receive_until(deadline).unwrap();
        assert_eq!(answer, ShmMessage::OtherVersion { version: VERSION });
        assert!(older.receive_until(deadline).is_err(), "closed");

        let name = format!("mooncake-other-version-{}", EngineId::random());
        let listener = Link::listen(&name).unwrap();
        let newer = Link::connect(&name, patience).unwrap();
        let owner = listener.accept().unwrap();
        owner.send(ShmMessage::OtherVersion { version: 4 }, None).unwrap();
        let target = HandshakeTarget { to: EngineId::random(), process: 0, deadline };
        let error = handshake(&newer, &server, target).unwrap_err();
        assert_eq!(error.code(), ErrorCode::INVALID_VERSION);
        let text = error.to_string();
        assert!(text.contains("peer_version=4") && text.contains("our_version=3"), "{text}");
    }
}
