//! Frames and messages of the handshake socket, without I/O.
//!
//! A frame is a length (u64, little endian), a type byte that the length includes, and JSON text. A
//! frame whose first byte is not a type has the old form: text only, and always a connection
//! request.

use mooncake_base::{Error, ErrorCode, Result};
use serde::{Deserialize, Serialize};

/// Length of the length prefix.
pub const LENGTH_BYTES: usize = 8;

/// Length of the type byte.
pub(crate) const KIND_BYTES: usize = 1;

/// Upstream's limit of a request, including the type byte.
pub const MESSAGE_BYTES_MAX_DEFAULT: usize = 1 << 20;

/// Type of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MessageKind {
    /// Request to connect queue pairs of upstream's RDMA transport.
    Connection,
    /// Request for the descriptor; the body is the requester's own.
    Metadata,
    /// A notification.
    Notify,
    /// A liveness check.
    Probe,
}

/// A request or an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// `None` for the old form, which has no type byte and is a connection request.
    pub typed: Option<MessageKind>,
    /// JSON text.
    pub body: Vec<u8>,
}

/// A short text message from one process to another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(default)]
pub struct Notification {
    /// Name of the sender.
    pub name: String,
    /// Text of the notification.
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
    /// Creates a message of the current form.
    pub fn new(kind: MessageKind, body: impl Into<Vec<u8>>) -> Self {
        Self { typed: Some(kind), body: body.into() }
    }

    /// Type of the message; the old form is a connection request.
    pub fn kind(&self) -> MessageKind {
        self.typed.unwrap_or(MessageKind::Connection)
    }

    /// Encodes the whole frame.
    pub fn encode(&self) -> Vec<u8> {
        let length = self.body.len() + usize::from(self.typed.is_some());
        let mut frame = Vec::with_capacity(LENGTH_BYTES + length);
        frame.extend_from_slice(&(length as u64).to_le_bytes());
        frame.extend(self.typed.map(MessageKind::byte));
        frame.extend_from_slice(&self.body);
        frame
    }

    /// Decodes the content behind the length prefix.
    ///
    /// # Errors
    /// The content has not even a type byte.
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
    /// Serializes the body of a message.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("two strings are always JSON")
    }

    /// Parses the body of a message.
    ///
    /// # Errors
    /// The text is not JSON of this form.
    pub fn from_json(text: &[u8]) -> Result<Self> {
        serde_json::from_slice(text)
            .map_err(|source| malformed("a notification cannot be read").caused_by(source))
    }
}

/// Decodes the length prefix.
///
/// # Errors
/// The length exceeds `limit`.
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
    fn messages_of_both_forms_survive_a_round_trip() {
        for typed in MessageKind::ALL.map(Some).into_iter().chain([None]) {
            let message = Message { typed, body: b"{\"a\":1}".to_vec() };
            assert_eq!(decode(&message.encode(), 100).unwrap(), message);
        }
        assert_eq!(Message { typed: None, body: Vec::new() }.kind(), MessageKind::Connection);
    }

    #[test]
    fn frames_are_upstream_byte_for_byte() {
        let frame = Message::new(MessageKind::Probe, *b"{}").encode();
        assert_eq!(frame, [3, 0, 0, 0, 0, 0, 0, 0, 3, b'{', b'}']);
        let notification = Notification { name: "a".into(), message: "b".into() };
        assert_eq!(notification.to_json(), br#"{"name":"a","notify_msg":"b"}"#);
    }

    #[test]
    fn accepts_a_length_at_the_limit_and_rejects_more() {
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
