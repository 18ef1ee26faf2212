//! Frames and messages of the handshake socket, without I/O.
//!
//! A frame is a length (u64, little endian), a type byte that the length counts, and JSON text.
//! A frame whose first byte is no type is the old form: text only, and always a connection
//! request.

use mooncake_base::{Error, ErrorCode, Result};
use serde::{Deserialize, Serialize};

/// How long the length before a frame is.
pub const LENGTH_BYTES: usize = 8;

/// The established limit of a message that a server takes, type byte included.
pub const MESSAGE_BYTES_MAX_DEFAULT: usize = 1 << 20;

/// What a message is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MessageKind {
    /// Queue pairs of the established engine want to be joined.
    Connection,
    /// A descriptor is asked for; the body is the asker's own.
    Metadata,
    /// Somebody has something to say.
    Notify,
    /// Is anybody there?
    Probe,
}

/// A message, request or answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// `None` for the old form, which has no type byte and is a connection request.
    pub typed: Option<MessageKind>,
    /// JSON text.
    pub body: Vec<u8>,
}

/// What one process tells another, besides bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(default)]
pub struct Notification {
    /// Who says it.
    pub name: String,
    /// What.
    #[serde(rename = "notify_msg")]
    pub message: String,
}

impl MessageKind {
    const ALL: [Self; 4] = [Self::Connection, Self::Metadata, Self::Notify, Self::Probe];

    const fn byte(self) -> u8 {
        match self {
            Self::Connection => 0,
            Self::Metadata => 1,
            Self::Notify => 2,
            Self::Probe => 3,
        }
    }

    fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.byte() == byte)
    }
}

impl Message {
    /// A message of the present form.
    pub fn new(kind: MessageKind, body: impl Into<Vec<u8>>) -> Self {
        Self { typed: Some(kind), body: body.into() }
    }

    /// What it is about; the old form asks for a connection.
    pub fn kind(&self) -> MessageKind {
        self.typed.unwrap_or(MessageKind::Connection)
    }

    /// The whole frame.
    pub fn encode(&self) -> Vec<u8> {
        let length = self.body.len() + usize::from(self.typed.is_some());
        let mut frame = Vec::with_capacity(LENGTH_BYTES + length);
        frame.extend_from_slice(&(length as u64).to_le_bytes());
        frame.extend(self.typed.map(MessageKind::byte));
        frame.extend_from_slice(&self.body);
        frame
    }

    /// Reads what followed the length.
    ///
    /// # Errors
    /// There is not even a type byte.
    pub fn decode(mut content: Vec<u8>) -> Result<Self> {
        let Some(&first) = content.first() else {
            return Err(malformed("a handshake message is empty"));
        };
        let typed = MessageKind::from_byte(first);
        if typed.is_some() {
            content.remove(0);
        }
        Ok(Self { typed, body: content })
    }
}

impl Notification {
    /// As the body of a message.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("two strings are always JSON")
    }

    /// Reads a body.
    ///
    /// # Errors
    /// It is not JSON of that shape.
    pub fn from_json(text: &[u8]) -> Result<Self> {
        serde_json::from_slice(text)
            .map_err(|source| malformed("a notification cannot be read").caused_by(source))
    }
}

/// Reads the length before a frame.
///
/// # Errors
/// It is more than `limit`.
pub fn content_length(prefix: [u8; LENGTH_BYTES], limit: usize) -> Result<usize> {
    let length = u64::from_le_bytes(prefix);
    usize::try_from(length).ok().filter(|length| *length <= limit).ok_or_else(|| {
        malformed("a handshake message is longer than allowed")
            .with("length", length)
            .with("limit", limit)
    })
}

fn malformed(message: &str) -> Error {
    Error::new(ErrorCode::TRANSFER_FAIL, message)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode(frame: &[u8], limit: usize) -> Result<Message> {
        let (prefix, content) = frame.split_first_chunk().expect("a frame begins with its length");
        assert_eq!(content_length(*prefix, limit)?, content.len());
        Message::decode(content.to_vec())
    }

    #[test]
    fn a_message_survives_the_wire_in_both_forms() {
        for typed in MessageKind::ALL.map(Some).into_iter().chain([None]) {
            let message = Message { typed, body: b"{\"a\":1}".to_vec() };
            assert_eq!(decode(&message.encode(), 100).unwrap(), message);
        }
        assert_eq!(Message { typed: None, body: Vec::new() }.kind(), MessageKind::Connection);
    }

    #[test]
    fn the_frame_is_byte_for_byte_the_established_one() {
        let frame = Message::new(MessageKind::Probe, *b"{}").encode();
        assert_eq!(frame, [3, 0, 0, 0, 0, 0, 0, 0, 3, b'{', b'}']);
        let notification = Notification { name: "a".into(), message: "b".into() };
        assert_eq!(notification.to_json(), br#"{"name":"a","notify_msg":"b"}"#);
    }

    #[test]
    fn a_length_at_the_limit_is_taken_and_one_above_is_not() {
        assert_eq!(content_length(10_u64.to_le_bytes(), 10).unwrap(), 10);
        for length in [11, u64::MAX] {
            assert!(content_length(length.to_le_bytes(), 10).is_err());
        }
        assert!(Message::decode(Vec::new()).is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(content: Vec<u8>) {
            if let Ok(message) = Message::decode(content.clone()) {
                prop_assert_eq!(&message.encode()[LENGTH_BYTES..], &content[..]);
                let _ = Notification::from_json(&message.body);
            }
        }
    }
}
