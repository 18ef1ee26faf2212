//! A message: a head of fixed length, a description, and a body. Knows no sockets.

use mooncake_base::{Error, ErrorCode, Result};

/// How long a head is.
pub const HEAD_BYTES: usize = 32;

/// The longest description; one of a tensor has some dozen bytes.
pub const META_BYTES_MAX: usize = 64 << 10;

/// What every message begins with: our protocol in its first version.
const MAGIC: [u8; 4] = *b"MKR1";

/// What a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Bytes.
    Data,
    /// The bytes of a tensor, described in words.
    Tensor,
    /// The answer: it was taken.
    Taken,
    /// The answer: it was not; the description says why.
    Refused,
}

const KINDS: [(Kind, u8); 4] =
    [(Kind::Data, 0), (Kind::Tensor, 1), (Kind::Taken, 128), (Kind::Refused, 129)];

/// The beginning of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// What it is.
    pub kind: Kind,
    /// The sender's number of a request; its answer has the same.
    pub id: u64,
    /// How long the description is.
    pub meta_bytes: u32,
    /// How long the body is.
    pub body_bytes: u64,
}

impl Head {
    /// As it goes over the wire: magic, kind, three zeros, id, lengths, four zeros; little endian.
    pub fn encode(&self) -> [u8; HEAD_BYTES] {
        let code = KINDS.iter().find(|(kind, _)| *kind == self.kind).map_or(0, |(_, code)| *code);
        let mut bytes = [0; HEAD_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = code;
        bytes[8..16].copy_from_slice(&self.id.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.body_bytes.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.meta_bytes.to_le_bytes());
        bytes
    }

    /// Reads a head.
    ///
    /// # Errors
    /// It is none of ours, or what it announces is longer than it may be.
    pub fn decode(bytes: &[u8; HEAD_BYTES], body_bytes_max: u64) -> Result<Self> {
        let bad = |text| Error::new(ErrorCode::RPC_FAIL, text);
        let (magic, code) = (&bytes[..4], bytes[4]);
        let found = KINDS.iter().find(|(_, number)| *number == code);
        let (Some((kind, _)), true) = (found, magic == MAGIC) else {
            return Err(bad("the other side speaks another protocol"));
        };
        let word = |at: usize| {
            u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes are a word"))
        };
        let head =
            Self { kind: *kind, id: word(8), body_bytes: word(16), meta_bytes: word(24) as u32 };
        if bytes[5..8] != [0; 3] || bytes[28..] != [0; 4] {
            return Err(bad("the other side speaks a later version of the protocol"));
        }
        if head.meta_bytes as usize > META_BYTES_MAX || head.body_bytes > body_bytes_max {
            return Err(bad("the message is longer than is allowed")
                .with("meta_bytes", head.meta_bytes)
                .with("body_bytes", head.body_bytes)
                .with("body_bytes_max", body_bytes_max));
        }
        Ok(head)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_head_is_read_as_it_was_written(
            which in 0_usize..4, id in any::<u64>(), meta in 0..=META_BYTES_MAX as u32, body in any::<u64>(),
        ) {
            let head = Head { kind: KINDS[which].0, id, meta_bytes: meta, body_bytes: body };
            prop_assert_eq!(Head::decode(&head.encode(), u64::MAX).unwrap(), head);
            prop_assert_eq!(Head::decode(&head.encode(), 1 << 30).is_ok(), body <= 1 << 30);
        }

        #[test]
        fn no_bytes_are_a_surprise(bytes in any::<[u8; HEAD_BYTES]>(), is_ours in any::<bool>()) {
            let mut bytes = bytes;
            if is_ours {
                bytes[..4].copy_from_slice(&MAGIC);
            }
            if let Ok(head) = Head::decode(&bytes, 1 << 30) {
                prop_assert_eq!(head.encode(), bytes);
            }
        }
    }
}
