//! Handshake messages that carry a proof of the token, without I/O.
//!
//! A client with a token first sends a probe that requests a challenge. An engine with a token
//! answers with its nonce and keeps the connection open for the message itself. That message is
//! sealed: the client's nonce and a keyed hash of both nonces and the message precede its text. The
//! answer is sealed in the same way. Engines without a token, including upstream's, answer the
//! probe like any other.

use mooncake_base::{Error, ErrorCode, Result};
use serde::{Deserialize, Serialize};

use super::codec::{Message, MessageKind};
use crate::token::{
    self, Channel, Exchange, NONCE_BYTES, Nonce, PROOF_BYTES, Proof, Prover, Token, hex,
};

/// Length of the seal before the text of a message.
pub(crate) const SEAL_BYTES: usize = NONCE_BYTES + PROOF_BYTES;

/// Version of the challenge protocol.
const VERSION: u32 = 1;

/// Native fields in the bodies of messages.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct ProofFields {
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<String>,
    /// The version of the requested challenge.
    #[serde(skip_serializing_if = "Option::is_none")]
    mooncake_challenge: Option<u32>,
    /// The challenge: a nonce in hexadecimal digits.
    #[serde(skip_serializing_if = "Option::is_none")]
    mooncake_nonce: Option<String>,
    /// The reason of a refusal.
    #[serde(skip_serializing_if = "Option::is_none")]
    mooncake_refused: Option<String>,
    /// The same reason for senders of notifications, who read this field.
    #[serde(skip_serializing_if = "Option::is_none")]
    notify_msg: Option<String>,
}

/// A probe that requests a challenge.
pub(crate) fn challenge_request() -> Message {
    let fields = ProofFields { mooncake_challenge: Some(VERSION), ..ProofFields::default() };
    Message::new(MessageKind::Probe, fields.to_json())
}

/// Returns whether a message is a probe that requests a challenge.
pub(crate) fn is_challenge_request(message: &Message) -> bool {
    message.kind() == MessageKind::Probe
        && ProofFields::of(&message.body).mooncake_challenge == Some(VERSION)
}

/// The answer to a probe that requests a challenge.
pub(crate) fn challenge(owner_nonce: &Nonce) -> Message {
    let fields = ProofFields {
        status: Some("success".to_owned()),
        mooncake_nonce: Some(hex(owner_nonce)),
        ..ProofFields::default()
    };
    Message::new(MessageKind::Probe, fields.to_json())
}

/// Returns the nonce of a challenge.
pub(crate) fn read_challenge(answer: &Message) -> Option<Nonce> {
    let text = ProofFields::of(&answer.body).mooncake_nonce?;
    let digits = text.as_bytes();
    let mut nonce = [0; NONCE_BYTES];
    if digits.len() != 2 * NONCE_BYTES || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    for (byte, pair) in nonce.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(nonce)
}

/// Body of the answer to a peer that has not proven the token.
pub(crate) fn refusal(why: &str) -> Vec<u8> {
    let why = Some(why.to_owned());
    let fields =
        ProofFields { mooncake_refused: why.clone(), notify_msg: why, ..ProofFields::default() };
    fields.to_json()
}

/// Returns the reason if an answer is a refusal.
pub(crate) fn read_refusal(body: &[u8]) -> Option<String> {
    ProofFields::of(body).mooncake_refused
}

/// Seals a message; also returns the exchange that its answer is verified against.
pub(super) fn seal(token: &Token, owner_nonce: Nonce, message: &Message) -> (Message, Exchange) {
    let exchange = exchange(owner_nonce, token::nonce());
    let proof = exchange.proof(token, Prover::Caller, &content(message));
    let body = [&exchange.caller[..], &proof, &message.body].concat();
    (Message { typed: message.typed, body }, exchange)
}

/// Opens a sealed message, if the seal proves the token.
pub(crate) fn unseal(
    token: &Token,
    owner_nonce: Nonce,
    message: &Message,
) -> Option<(Message, Exchange)> {
    let (caller_nonce, rest) = message.body.split_first_chunk::<NONCE_BYTES>()?;
    let (proof, body) = rest.split_first_chunk::<PROOF_BYTES>()?;
    let exchange = exchange(owner_nonce, *caller_nonce);
    let message = Message { typed: message.typed, body: body.to_vec() };
    let is_proven = exchange.is_proven(token, Prover::Caller, &content(&message), proof);
    is_proven.then_some((message, exchange))
}

/// Seals the owner's answer.
pub(super) fn seal_answer(token: &Token, exchange: &Exchange, answer: &Message) -> Message {
    let proof: Proof = exchange.proof(token, Prover::Callee, &content(answer));
    Message { typed: answer.typed, body: [&proof[..], &answer.body].concat() }
}

/// Opens the owner's sealed answer.
///
/// # Errors
/// The seal does not prove the token.
pub(super) fn unseal_answer(
    token: &Token,
    exchange: &Exchange,
    answer: &Message,
) -> Result<Message> {
    let sealed = answer.body.split_first_chunk::<PROOF_BYTES>();
    let opened = sealed.and_then(|(proof, body)| {
        let answer = Message { typed: answer.typed, body: body.to_vec() };
        exchange.is_proven(token, Prover::Callee, &content(&answer), proof).then_some(answer)
    });
    opened.ok_or_else(|| denied("the peer has another token"))
}

/// The error for a peer with which no token is shared.
pub(super) fn denied(text: &str) -> Error {
    Error::new(ErrorCode::ILLEGAL_CLIENT, text)
        .with_remedy("Set MC_TRANSFER_TOKEN to the same secret in both processes, or in neither.")
}

/// The exchange of one connection. The owner's engine id is not known yet.
fn exchange(owner_nonce: Nonce, caller_nonce: Nonce) -> Exchange {
    token::exchange(Channel::Handshake, 0, owner_nonce, caller_nonce)
}

/// The part of a message that the hash covers.
fn content(message: &Message) -> Vec<u8> {
    [&[message.kind() as u8, u8::from(message.typed.is_some())], &message.body[..]].concat()
}

impl ProofFields {
    /// Reads the fields from a body; any other body has none of them.
    fn of(body: &[u8]) -> Self {
        serde_json::from_slice(body).unwrap_or_default()
    }

    fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("strings and numbers are always JSON")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message() -> Message {
        Message::new(MessageKind::Notify, *b"{\"name\":\"n\"}")
    }

    #[test]
    fn seal_is_bound_to_token_challenge_kind_and_text() {
        let (token, nonce) = (Token::new("a long secret").unwrap(), token::nonce());
        let (sealed, exchange) = seal(&token, nonce, &message());
        let opened = unseal(&token, nonce, &sealed).unwrap();
        assert_eq!(opened, (message(), exchange.clone()));
        assert!(unseal(&Token::new("another secret").unwrap(), nonce, &sealed).is_none());
        assert!(unseal(&token, token::nonce(), &sealed).is_none(), "said on another connection");
        let other = Message { typed: Some(MessageKind::Metadata), ..sealed.clone() };
        assert!(unseal(&token, nonce, &other).is_none());
        for at in 0..sealed.body.len() {
            let mut bad = sealed.clone();
            bad.body[at] ^= 1;
            assert!(unseal(&token, nonce, &bad).is_none(), "{at}");
            bad.body.truncate(at);
            assert!(unseal(&token, nonce, &bad).is_none(), "{at}");
        }
        let answer = seal_answer(&token, &exchange, &message());
        assert_eq!(unseal_answer(&token, &exchange, &answer).unwrap(), message());
        assert!(unseal_answer(&token, &exchange, &message()).is_err(), "not sealed");
        let echo = Message { body: sealed.body[NONCE_BYTES..].to_vec(), ..sealed };
        assert!(unseal_answer(&token, &exchange, &echo).is_err(), "the caller's own proof");
    }

    #[test]
    fn challenge_survives_a_round_trip_and_answers_a_plain_probe() {
        let nonce = token::nonce();
        assert!(is_challenge_request(&challenge_request()));
        assert!(!is_challenge_request(&Message::new(MessageKind::Probe, *b"{}")));
        assert!(!is_challenge_request(&Message {
            typed: Some(MessageKind::Notify),
            ..challenge_request()
        }));
        assert_eq!(read_challenge(&challenge(&nonce)), Some(nonce));
        let text = String::from_utf8(challenge(&nonce).body).unwrap();
        assert!(text.starts_with("{\"status\":\"success\""), "{text}");
        for bad in ["{}", "[]", r#"{"mooncake_nonce":"+1"}"#, r#"{"mooncake_nonce":1}"#] {
            assert_eq!(read_challenge(&Message::new(MessageKind::Probe, bad.as_bytes())), None);
        }
        let (mut plus, last) = (text.clone(), text.len() - 4..text.len() - 2);
        plus.replace_range(last, "+f");
        assert!(read_challenge(&Message::new(MessageKind::Probe, plus.into_bytes())).is_none());
    }
}
