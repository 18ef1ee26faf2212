//! The part of ZMTP 3.0 that a publisher needs: a codec without I/O.
//!
//! Each side sends a greeting of 64 bytes and a READY command. Then the peer sends subscriptions
//! (as messages, or in later versions as commands), and the publisher sends messages.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use mooncake_base::{Error, ErrorCode, Result};

/// The length of a greeting.
pub(super) const GREETING_BYTES: usize = 64;

/// The maximum size of a frame from a subscriber.
const FRAME_BYTES_MAX: u64 = 64 * 1024;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Returns the publisher's greeting: the signature, version 3.0, and no encryption.
pub(super) fn greeting() -> [u8; GREETING_BYTES] {
    let mut greeting = [0; GREETING_BYTES];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

/// # Errors
/// The peer does not speak ZMTP 3, or requires encryption.
pub(super) fn check_greeting(greeting: &[u8; GREETING_BYTES]) -> Result<()> {
    let mechanism = &greeting[12..32];
    if greeting[0] != 0xff || greeting[9] & 1 == 0 {
        return Err(broken("the subscriber does not speak ZMTP"));
    }
    if greeting[10] < 3 {
        return Err(broken("the subscriber speaks a version of ZMTP before 3"));
    }
    if &mechanism[..5] != b"NULL\0" {
        return Err(broken("the subscriber requires a security mechanism other than NULL"));
    }
    Ok(())
}

/// Returns the publisher's READY command.
pub(super) fn ready() -> BytesMut {
    let mut body = BytesMut::new();
    body.put_slice(b"\x05READY\x0bSocket-Type");
    body.put_u32(3);
    body.put_slice(b"PUB");
    let mut out = BytesMut::new();
    put(&mut out, &body, COMMAND);
    out
}

/// Appends one frame of a message.
pub(super) fn put_frame(out: &mut BytesMut, body: &[u8], has_more: bool) {
    put(out, body, if has_more { MORE } else { 0 });
}

fn put(out: &mut BytesMut, body: &[u8], flags: u8) {
    match u8::try_from(body.len()) {
        Ok(length) => out.put_slice(&[flags, length]),
        Err(_) => {
            out.put_u8(flags | LONG);
            out.put_u64(body.len() as u64);
        }
    }
    out.put_slice(body);
}

/// A message from a subscriber.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SubscriberMessage {
    /// The READY command of a subscriber.
    Ready,
    /// Subscribes to messages whose topic has this prefix.
    Subscribe(Bytes),
    /// Cancels a subscription.
    Cancel(Bytes),
    /// A ping, with the encoded reply.
    Ping(BytesMut),
    /// Any other message, which is ignored.
    Other,
}

/// Decodes the next frame of the input; `None` if it is incomplete.
///
/// # Errors
/// The frame is too large, or the peer is not a subscriber.
pub(super) fn take(input: &mut BytesMut) -> Result<Option<SubscriberMessage>> {
    let Some(&flags) = input.first() else { return Ok(None) };
    let (head, length) = match flags & LONG {
        0 => match input.get(1) {
            Some(&length) => (2, u64::from(length)),
            None => return Ok(None),
        },
        _ => match input.get(1..9).and_then(|bytes| bytes.first_chunk::<8>()) {
            Some(bytes) => (9, u64::from_be_bytes(*bytes)),
            None => return Ok(None),
        },
    };
    if length > FRAME_BYTES_MAX {
        return Err(broken("the subscriber sent a frame above the limit").with("bytes", length));
    }
    let length = length as usize;
    if input.len() < head + length {
        return Ok(None);
    }
    input.advance(head);
    let body = input.split_to(length).freeze();
    if flags & COMMAND != 0 {
        return command(body).map(Some);
    }
    Ok(Some(match body.first() {
        Some(1) => SubscriberMessage::Subscribe(body.slice(1..)),
        Some(0) => SubscriberMessage::Cancel(body.slice(1..)),
        _ => SubscriberMessage::Other,
    }))
}

fn command(body: Bytes) -> Result<SubscriberMessage> {
    let malformed = || broken("the subscriber sent a malformed command");
    let length = usize::from(*body.first().ok_or_else(malformed)?);
    let name = body.get(1..=length).ok_or_else(malformed)?;
    let data = body.slice(length + 1..);
    match name {
        b"READY" => check_ready(&data),
        b"SUBSCRIBE" => Ok(SubscriberMessage::Subscribe(data)),
        b"CANCEL" => Ok(SubscriberMessage::Cancel(data)),
        b"PING" => {
            // Two bytes of time to live, then the context to be echoed.
            let context = data.get(2..).ok_or_else(malformed)?;
            let mut pong = BytesMut::from(&b"\x04PONG"[..]);
            pong.put_slice(&context[..context.len().min(16)]);
            let mut out = BytesMut::new();
            put(&mut out, &pong, COMMAND);
            Ok(SubscriberMessage::Ping(out))
        }
        b"ERROR" => Err(broken("the subscriber sent an ERROR command")),
        _ => Ok(SubscriberMessage::Other),
    }
}

/// Checks the properties of a READY command: pairs of name and value.
fn check_ready(mut data: &[u8]) -> Result<SubscriberMessage> {
    let malformed = || broken("the subscriber sent a malformed READY");
    while !data.is_empty() {
        let name_length = usize::from(data[0]);
        let name = data.get(1..=name_length).ok_or_else(malformed)?;
        let rest = &data[name_length + 1..];
        let length = rest.first_chunk::<4>().ok_or_else(malformed)?;
        let length = u32::from_be_bytes(*length) as usize;
        let value = rest.get(4..).and_then(|rest| rest.get(..length)).ok_or_else(malformed)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") && !matches!(value, b"SUB" | b"XSUB") {
            return Err(broken("the peer is not a subscriber")
                .with("socket_type", format_args!("{:?}", String::from_utf8_lossy(value))));
        }
        data = &rest[4 + length..];
    }
    Ok(SubscriberMessage::Ready)
}

pub(super) fn broken(why: &str) -> Error {
    Error::new(ErrorCode::RPC_FAIL, why)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn taken(bytes: &[u8]) -> Result<Option<SubscriberMessage>> {
        take(&mut BytesMut::from(bytes))
    }

    #[test]
    fn greeting_is_checked() {
        assert!(check_greeting(&greeting()).is_ok());
        for (at, value) in [(0, 0), (9, 0), (10, 2), (12, b'C'), (16, b'X')] {
            let mut wrong = greeting();
            wrong[at] = value;
            assert!(check_greeting(&wrong).is_err(), "{at}");
        }
    }

    #[test]
    fn parses_subscriptions_as_messages_or_commands() {
        let check = |bytes: &[u8], message: SubscriberMessage| {
            assert_eq!(taken(bytes).unwrap(), Some(message), "{}", bytes.escape_ascii());
        };
        check(b"\x00\x01\x01", SubscriberMessage::Subscribe(Bytes::new()));
        check(b"\x00\x03\x01kv", SubscriberMessage::Subscribe(Bytes::from_static(b"kv")));
        check(b"\x00\x01\x00", SubscriberMessage::Cancel(Bytes::new()));
        check(b"\x04\x0a\x09SUBSCRIBE", SubscriberMessage::Subscribe(Bytes::new()));
        check(b"\x04\x07\x06CANCEL", SubscriberMessage::Cancel(Bytes::new()));
        check(b"\x02\0\0\0\0\0\0\0\x01\x01", SubscriberMessage::Subscribe(Bytes::new()));
        let pong = BytesMut::from(&b"\x04\x07\x04PONGab"[..]);
        check(b"\x04\x09\x04PING\0\0ab", SubscriberMessage::Ping(pong));
    }

    #[test]
    fn refuses_peer_that_is_not_subscriber() {
        let ready = |kind: &[u8]| {
            let mut body = BytesMut::from(&b"\x05READY\x0bSocket-Type"[..]);
            body.put_u32(kind.len() as u32);
            body.put_slice(kind);
            let mut out = BytesMut::new();
            put(&mut out, &body, COMMAND);
            taken(&out)
        };
        assert_eq!(ready(b"SUB").unwrap(), Some(SubscriberMessage::Ready));
        assert_eq!(ready(b"XSUB").unwrap(), Some(SubscriberMessage::Ready));
        assert!(ready(b"PUB").unwrap_err().to_string().contains("PUB"));
    }

    #[test]
    fn waits_for_whole_frame_and_refuses_large_one() {
        for cut in [&b""[..], b"\x00", b"\x00\x03\x01k", b"\x02\0\0"] {
            assert_eq!(taken(cut).unwrap(), None);
        }
        assert!(taken(b"\x02\0\0\0\0\xff\0\0\0").is_err());
        let mut long = BytesMut::new();
        put_frame(&mut long, &[1; 300], true);
        assert_eq!(long[..9], [MORE | LONG, 0, 0, 0, 0, 0, 0, 1, 44]);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let mut input = BytesMut::from(&bytes[..]);
            while let Ok(Some(_)) = take(&mut input) {}
            let _ = check_ready(&bytes);
        }
    }
}
