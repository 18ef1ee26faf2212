//! Message format: a fixed-length head, a description and a body. No I/O.

use mooncake_base::{Error, ErrorCode, Result};

/// Length of a head in bytes.
pub const HEAD_BYTES: usize = 32;

/// Maximum length of a description; that of a tensor has a few dozen bytes.
pub const META_BYTES_MAX: usize = 64 << 10;

/// Magic bytes of every message: version 1 of the protocol.
const MAGIC: [u8; 4] = *b"MKR1";

/// Kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Raw bytes.
    Data,
    /// The bytes of a tensor, with a textual description.
    Tensor,
    /// Answer: the message was accepted.
    Taken,
    /// Answer: the message was refused; the description gives the reason.
    Refused,
}

const KINDS: [(Kind, u8); 4] =
    [(Kind::Data, 0), (Kind::Tensor, 1), (Kind::Taken, 128), (Kind::Refused, 129)];

/// Head of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// The kind of the message.
    pub kind: Kind,
    /// Request number, chosen by the sender and repeated in the answer.
    pub id: u64,
    /// Length of the description in bytes.
    pub meta_bytes: u32,
    /// Length of the body in bytes.
    pub body_bytes: u64,
}

impl Head {
    /// Encodes the head for the wire: magic, kind, three zeros, id, lengths, four zeros; little
    /// endian.
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

    /// Decodes a head.
    ///
    /// # Errors
    /// The bytes are no head of this protocol, or the announced lengths exceed the limits.
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
            return Err(bad("the message exceeds the length limit")
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
        fn decode_inverts_encode(
            which in 0_usize..4, id in any::<u64>(), meta in 0..=META_BYTES_MAX as u32,
            body in any::<u64>(),
        ) {
            let head = Head { kind: KINDS[which].0, id, meta_bytes: meta, body_bytes: body };
            prop_assert_eq!(Head::decode(&head.encode(), u64::MAX).unwrap(), head);
            prop_assert_eq!(Head::decode(&head.encode(), 1 << 30).is_ok(), body <= 1 << 30);
        }

        #[test]
        fn decoder_accepts_only_encodable_heads(
            bytes in any::<[u8; HEAD_BYTES]>(), has_magic in any::<bool>(),
        ) {
            let mut bytes = bytes;
            if has_magic {
                bytes[..4].copy_from_slice(&MAGIC);
            }
            if let Ok(head) = Head::decode(&bytes, 1 << 30) {
                prop_assert_eq!(head.encode(), bytes);
            }
        }
    }
}
