//! Authentication by a shared token.

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::Arc,
    time::Duration,
};

use mooncake_base::{ErrorKind, Result};

use super::support::{Memory, Owner, WireProtocol, moved, soon};
use crate::{
    metrics::{RefusalSnapshot, Refusals},
    token::{Channel, Prover, Token, exchange},
    transfer_entry::Opcode,
    transport::{
        Path, Transport,
        tcp::{
            TcpServerSettings, TcpSettings, TcpTransport,
            greeting::{CLAIM_BYTES, GREETING_BYTES, Greeting, VERDICT_BYTES, VERSION, Verdict},
        },
    },
};

fn token(text: &str) -> Option<Token> {
    Some(Token::new(text).unwrap())
}

fn owner_with(token: Option<Token>) -> (Owner, Arc<Refusals>) {
    let refusals = Arc::<Refusals>::default();
    let settings = TcpServerSettings {
        token,
        refusals: Arc::clone(&refusals),
        ..TcpServerSettings::default()
    };
    (Owner::start_with("127.0.0.1:0", settings), refusals)
}

fn connect(
    owner: &Owner,
    token: Option<Token>,
    protocol: WireProtocol,
) -> (Result<Arc<dyn Path>>, RefusalSnapshot) {
    let refusals = Arc::<Refusals>::default();
    let settings = TcpSettings { token, refusals: Arc::clone(&refusals), ..TcpSettings::default() };
    let path = TcpTransport::new(settings).connect(&owner.descriptor(protocol), soon());
    (path, refusals.snapshot())
}

#[test]
fn moves_bytes_when_both_sides_know_the_token() {
    let (owner, refusals) = owner_with(token("correct horse"));
    let theirs = Memory::patterned(1000, 1);
    drop(owner.lend(&theirs));
    let path = connect(&owner, token("correct horse"), WireProtocol::Native).0.unwrap();
    let ours = Memory::patterned(1000, 2);
    let mut batch = [ours.entry(0, 1000, &theirs, 0)];
    path.transfer(Opcode::Write, &mut batch, soon().into());
    assert!(moved(&batch[0]), "{:?}", batch[0].outcome);
    assert_eq!(theirs.bytes(), ours.bytes());
    assert_eq!(refusals.snapshot(), RefusalSnapshot::default());
}

#[test]
fn wrong_or_missing_tokens_are_reported_and_counted() {
    let cases = [
        (token("correct horse"), token("wrong horse"), "has another token"),
        (token("correct horse"), None, "asks for a token"),
        (None, token("correct horse"), "asks for no token"),
    ];
    for (there, here, words) in cases {
        let (owner, refusals) = owner_with(there.clone());
        let (path, counted) = connect(&owner, here, WireProtocol::Native);
        let error = path.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(counted.token_there, 1);
        let wanted = u64::from(there.is_some());
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        while refusals.snapshot().token_here < wanted {
            assert!(std::time::Instant::now() < deadline, "the owner counts it too");
            std::thread::yield_now();
        }
    }
}

#[test]
fn upstream_frames_are_refused_when_a_token_is_set() {
    let (owner, refusals) = owner_with(token("correct horse"));
    let theirs = Memory::patterned(1000, 1);
    drop(owner.lend(&theirs));
    let before = theirs.bytes();
    for protocol in [WireProtocol::CompatV1, WireProtocol::CompatV2] {
        // A client with a token does not connect to a peer that cannot require it.
        let (path, counted) = connect(&owner, token("correct horse"), protocol);
        assert_eq!(path.unwrap_err().kind(), ErrorKind::PermissionDenied);
        assert_eq!(counted.token_there, 1);
        // A client without a token gets no response.
        let path = connect(&owner, None, protocol).0.unwrap();
        let ours = Memory::patterned(1000, 2);
        let mut batch = [ours.entry(0, 1000, &theirs, 0)];
        path.transfer(Opcode::Read, &mut batch, soon().into());
        assert!(!moved(&batch[0]) || protocol == WireProtocol::CompatV1);
        path.transfer(Opcode::Write, &mut [ours.entry(0, 1000, &theirs, 0)], soon().into());
        assert_eq!(theirs.bytes(), before);
    }
    assert!(refusals.snapshot().compat >= 2, "{:?}", refusals.snapshot());
}

#[test]
fn replayed_claims_are_refused() {
    let (owner, refusals) = owner_with(token("correct horse"));
    let greet = |stream: &mut TcpStream| {
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let ours = Greeting { version: VERSION, engine: 0, requires_token: false };
        stream.write_all(&ours.encode()).unwrap();
        let mut theirs = [0; GREETING_BYTES];
        stream.read_exact(&mut theirs).unwrap();
        assert!(Greeting::decode(&theirs).unwrap().requires_token);
        let mut nonce = [0; 32];
        stream.read_exact(&mut nonce).unwrap();
        nonce
    };
    let verdict = |stream: &mut TcpStream, claim: &[u8]| {
        stream.write_all(claim).unwrap();
        let mut verdict = [0; VERDICT_BYTES];
        stream.read_exact(&mut verdict).unwrap();
        Verdict::decode(&verdict).unwrap()
    };
    let mut first = TcpStream::connect(owner.server.address()).unwrap();
    let owner_nonce = greet(&mut first);
    let (caller_nonce, owner_id) = ([9; 32], owner.engine.bits());
    let exchange = exchange(Channel::Tcp, owner_id, owner_nonce, caller_nonce);
    let proof = exchange.proof(&token("correct horse").unwrap(), Prover::Caller, &[]);
    let claim = [caller_nonce, proof].concat();
    assert_eq!(claim.len(), CLAIM_BYTES);
    assert!(matches!(verdict(&mut first, &claim), Verdict::Accepted(_)));
    let mut second = TcpStream::connect(owner.server.address()).unwrap();
    assert_ne!(greet(&mut second), owner_nonce);
    assert_eq!(verdict(&mut second, &claim), Verdict::Refused);
    assert_eq!(second.read(&mut [0; 1]).unwrap(), 0, "and the connection ends");
    assert_eq!(refusals.snapshot().token_here, 1);
}
