//! Handshake messages that carry a proof of the token, without I/O.
//!
//! Who knows a token first sends a probe that asks to be challenged; the answer of an engine with a
//! token carries its random bytes, and the connection stays open for the message itself. That is
//! sealed: our random bytes and a keyed hash of both sides' and of the message stand before its
//! text. The answer is sealed likewise. Engines without a token, the established one among them,
//! answer the probe like any other.

use mooncake_base::{Error, ErrorCode, Result};
use serde::{Deserialize, Serialize};

use super::codec::{Message, MessageKind};
use crate::token::{
    self, Channel, Exchange, HandshakeSide, NONCE_BYTES, Nonce, PROOF_BYTES, Proof, Token,
};

/// What a sealed message has before its text.
pub(crate) const SEAL_BYTES: usize = NONCE_BYTES + PROOF_BYTES;

/// The version of what follows a challenge.
const VERSION: u32 = 1;

/// Our fields in the bodies of messages.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Fields {
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<String>,
    /// The version of the challenge that is asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    mooncake_challenge: Option<u32>,
    /// The challenge: random bytes in hexadecimal digits.
    #[serde(skip_serializing_if = "Option::is_none")]
    mooncake_nonce: Option<String>,
    /// Why nothing is answered.
    #[serde(skip_serializing_if = "Option::is_none")]
    mooncake_refused: Option<String>,
    /// The same for senders of notifications, who look here.
    #[serde(skip_serializing_if = "Option::is_none")]
    notify_msg: Option<String>,
}

/// A probe that asks for a challenge.
pub(crate) fn challenge_request() -> Message {
    let fields = Fields { mooncake_challenge: Some(VERSION), ..Fields::default() };
    Message::new(MessageKind::Probe, fields.to_json())
}

/// Whether a message is such a probe.
pub(crate) fn is_challenge_request(message: &Message) -> bool {
    message.kind() == MessageKind::Probe
        && Fields::of(&message.body).mooncake_challenge == Some(VERSION)
}

/// The answer to a probe that asks for a challenge.
pub(crate) fn challenge(owner_nonce: &Nonce) -> Message {
    let fields = Fields {
        status: Some("success".to_owned()),
        mooncake_nonce: Some(owner_nonce.iter().map(|byte| format!("{byte:02x}")).collect()),
        ..Fields::default()
    };
    Message::new(MessageKind::Probe, fields.to_json())
}

/// The random bytes of an answer that challenges.
pub(crate) fn read_challenge(answer: &Message) -> Option<Nonce> {
    let text = Fields::of(&answer.body).mooncake_nonce?;
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

/// The body of an answer to who has not shown the token.
pub(crate) fn refusal(why: &str) -> Vec<u8> {
    let why = Some(why.to_owned());
    let fields = Fields { mooncake_refused: why.clone(), notify_msg: why, ..Fields::default() };
    fields.to_json()
}

/// Why an answer says nothing else, if it is such a one.
pub(crate) fn read_refusal(body: &[u8]) -> Option<String> {
    Fields::of(body).mooncake_refused
}

/// Puts a seal before the text of a message; what the answer is compared with.
pub(super) fn seal(token: &Token, owner_nonce: Nonce, message: &Message) -> (Message, Exchange) {
    let exchange = exchange(owner_nonce, token::nonce());
    let proof = token.seal(HandshakeSide::Caller, &exchange, &content(message));
    let body = [&exchange.caller_nonce[..], &proof, &message.body].concat();
    (Message { typed: message.typed, body }, exchange)
}

/// Takes the seal off a message, if it proves the token.
pub(crate) fn unseal(
    token: &Token,
    owner_nonce: Nonce,
    message: &Message,
) -> Option<(Message, Exchange)> {
    let (caller_nonce, rest) = message.body.split_first_chunk::<NONCE_BYTES>()?;
    let (proof, body) = rest.split_first_chunk::<PROOF_BYTES>()?;
    let exchange = exchange(owner_nonce, *caller_nonce);
    let message = Message { typed: message.typed, body: body.to_vec() };
    let is_proven = token.verify_seal(HandshakeSide::Caller, &exchange, &content(&message), proof);
    is_proven.then_some((message, exchange))
}

/// Puts the owner's seal before the text of an answer.
pub(super) fn seal_answer(token: &Token, exchange: &Exchange, answer: &Message) -> Message {
    let proof: Proof = token.seal(HandshakeSide::Owner, exchange, &content(answer));
    Message { typed: answer.typed, body: [&proof[..], &answer.body].concat() }
}

/// Takes the owner's seal off an answer.
///
/// # Errors
/// It does not prove the token.
pub(super) fn unseal_answer(
    token: &Token,
    exchange: &Exchange,
    answer: &Message,
) -> Result<Message> {
    let sealed = answer.body.split_first_chunk::<PROOF_BYTES>();
    let opened = sealed.and_then(|(proof, body)| {
        let answer = Message { typed: answer.typed, body: body.to_vec() };
        token
            .verify_seal(HandshakeSide::Owner, exchange, &content(&answer), proof)
            .then_some(answer)
    });
    opened.ok_or_else(|| denied("the peer has another token"))
}

/// What is said of a peer with which no token is shared.
pub(super) fn denied(text: &str) -> Error {
    Error::new(ErrorCode::ILLEGAL_CLIENT, text)
}

/// The exchange of one connection. Who is asked has no name yet.
const fn exchange(owner_nonce: Nonce, caller_nonce: Nonce) -> Exchange {
    Exchange { channel: Channel::Handshake, owner: 0, owner_nonce, caller_nonce }
}

/// What the hash is of, besides the random bytes.
fn content(message: &Message) -> Vec<u8> {
    [&[message.kind() as u8, u8::from(message.typed.is_some())], &message.body[..]].concat()
}

impl Fields {
    /// Those in a body, whatever else it is.
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
    fn a_sealed_message_opens_for_its_token_challenge_kind_and_text_only() {
        let (token, nonce) = (Token::new("a long secret").unwrap(), token::nonce());
        let (sealed, exchange) = seal(&token, nonce, &message());
        let (opened, owner_nonce) = unseal(&token, nonce, &sealed).unwrap();
        assert_eq!((opened, owner_nonce.caller_nonce), (message(), exchange.caller_nonce));
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
    fn a_challenge_is_read_as_it_was_written_and_looks_like_any_answer_to_a_probe() {
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
