//! The messages between two engines of one host: one message per packet, integers little-endian.

use mooncake_base::EngineId;

use crate::token::{Nonce, Proof};

/// The version of the messages; both sides must use the same.
pub(super) const VERSION: u32 = 3;

/// The length of the longest message.
pub(super) const MESSAGE_BYTES_MAX: usize = 72;

/// Random bytes whose arrival proves that an access mode to the other's memory works.
pub(super) type Secret = [u8; 16];

/// One packet. Some packets also carry a file descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ShmMessage {
    /// Sent first by the attaching side: its own id and the id of the engine that it wants.
    Hello { version: u32, from: EngineId, to: EngineId },
    /// The owner speaks this other version, and closes the connection. It is the same message in
    /// every version, like `Hello`.
    OtherVersion { version: u32 },
    /// The owner asks for a proof that the attaching side knows the shared token.
    Challenge { nonce: Nonce },
    /// The attaching side's proof.
    Answer { nonce: Nonce, proof: Proof },
    /// The owner accepts the proof and sends its own. A wrong proof is answered by `Denied`, and
    /// the connection is closed.
    Granted { proof: Proof },
    /// The proof was wrong.
    Denied,
    /// The owner offers two access modes to probe: a file descriptor of sealed memory that begins
    /// with a secret, and the address of two cells in its own memory. The peer reads a secret from
    /// the first cell and writes the complement of its bits to the second. The sample is memory
    /// without meaning, for measuring the speed of the second mode.
    Welcome { address: u64, sample: u64, sample_length: u64 },
    /// The secrets that were read in each access mode; zeros where the mode did not work.
    Proof { shared: Secret, process: Secret },
    /// The access modes that the owner considers proven.
    Verdict { is_shared: bool, is_process: bool },
    /// Asks for the region that contains this range.
    Query { id: u64, address: u64, length: u64 },
    /// The region that contains the range. Carries a file descriptor if it is shared memory.
    Found { id: u64, base: u64, length: u64, kind: RegionKind },
    /// No region contains the range.
    Missing { id: u64 },
    /// The region with this base must no longer be accessed.
    Withdraw { base: u64 },
    /// The region is no longer accessed and no transfer is using it.
    Confirm { base: u64 },
}

/// The kind of memory of a region, as seen by a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RegionKind {
    /// Memory of the user, reachable only by system calls.
    User,
    /// Shared memory.
    Shared,
    /// Shared memory backed by huge pages.
    Huge,
    /// Memory of a device, which no other process can reach.
    Device,
}

impl ShmMessage {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(MESSAGE_BYTES_MAX);
        let mut put = |tag: u8, fields: &[&[u8]]| {
            bytes.push(tag);
            fields.iter().for_each(|field| bytes.extend_from_slice(field));
        };
        let le = u64::to_le_bytes;
        match *self {
            Self::Hello { version, from, to } => {
                put(1, &[&version.to_le_bytes(), &from.to_bytes(), &to.to_bytes()]);
            }
            Self::Welcome { address, sample, sample_length } => {
                put(2, &[&le(address), &le(sample), &le(sample_length)]);
            }
            Self::Challenge { nonce } => put(10, &[&nonce]),
            Self::Answer { nonce, proof } => put(11, &[&nonce, &proof]),
            Self::Granted { proof } => put(12, &[&proof]),
            Self::Denied => put(13, &[]),
            Self::OtherVersion { version } => put(14, &[&version.to_le_bytes()]),
            Self::Proof { shared, process } => put(3, &[&shared, &process]),
            Self::Verdict { is_shared, is_process } => {
                put(4, &[&[u8::from(is_shared), u8::from(is_process)]]);
            }
            Self::Query { id, address, length } => put(5, &[&le(id), &le(address), &le(length)]),
            Self::Found { id, base, length, kind } => {
                let kind = match kind {
                    RegionKind::User => 0,
                    RegionKind::Shared => 1,
                    RegionKind::Huge => 2,
                    RegionKind::Device => 3,
                };
                put(6, &[&le(id), &le(base), &le(length), &[kind]]);
            }
            Self::Missing { id } => put(7, &[&le(id)]),
            Self::Withdraw { base } => put(8, &[&le(base)]),
            Self::Confirm { base } => put(9, &[&le(base)]),
        }
        bytes
    }

    /// Decodes exactly one message; `None` for any other bytes.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (tag, bytes) = bytes.split_first()?;
        let mut fields = FieldReader(bytes);
        let message = match tag {
            1 => Self::Hello { version: fields.u32()?, from: fields.id()?, to: fields.id()? },
            2 => Self::Welcome {
                address: fields.u64()?,
                sample: fields.u64()?,
                sample_length: fields.u64()?,
            },
            3 => Self::Proof { shared: fields.take()?, process: fields.take()? },
            4 => Self::Verdict { is_shared: fields.bool()?, is_process: fields.bool()? },
            5 => Self::Query { id: fields.u64()?, address: fields.u64()?, length: fields.u64()? },
            6 => Self::Found {
                id: fields.u64()?,
                base: fields.u64()?,
                length: fields.u64()?,
                kind: match fields.take()? {
                    [0] => RegionKind::User,
                    [1] => RegionKind::Shared,
                    [2] => RegionKind::Huge,
                    [3] => RegionKind::Device,
                    _ => return None,
                },
            },
            7 => Self::Missing { id: fields.u64()? },
            8 => Self::Withdraw { base: fields.u64()? },
            9 => Self::Confirm { base: fields.u64()? },
            10 => Self::Challenge { nonce: fields.take()? },
            11 => Self::Answer { nonce: fields.take()?, proof: fields.take()? },
            12 => Self::Granted { proof: fields.take()? },
            13 => Self::Denied,
            14 => Self::OtherVersion { version: fields.u32()? },
            _ => return None,
        };
        fields.0.is_empty().then_some(message)
    }
}

struct FieldReader<'a>(&'a [u8]);

impl FieldReader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*field)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn bool(&mut self) -> Option<bool> {
        match self.take()? {
            [0] => Some(false),
            [1] => Some(true),
            _ => None,
        }
    }

    fn id(&mut self) -> Option<EngineId> {
        self.take::<16>().and_then(|bytes| EngineId::from_bytes(&bytes))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_round_trip_and_other_lengths_are_rejected() {
        let id = EngineId::from_bits(7);
        for message in [
            ShmMessage::Hello { version: 3, from: id, to: EngineId::from_bits(u128::MAX) },
            ShmMessage::OtherVersion { version: 4 },
            ShmMessage::Challenge { nonce: [5; 32] },
            ShmMessage::Answer { nonce: [5; 32], proof: [6; 32] },
            ShmMessage::Granted { proof: [7; 32] },
            ShmMessage::Denied,
            ShmMessage::Welcome { address: u64::MAX, sample: 1, sample_length: 2 },
            ShmMessage::Proof { shared: [1; 16], process: [2; 16] },
            ShmMessage::Verdict { is_shared: true, is_process: false },
            ShmMessage::Query { id: 1, address: 2, length: 3 },
            ShmMessage::Found { id: 1, base: 2, length: 3, kind: RegionKind::Huge },
            ShmMessage::Found { id: 1, base: 2, length: 3, kind: RegionKind::Shared },
            ShmMessage::Found { id: 1, base: 2, length: 3, kind: RegionKind::User },
            ShmMessage::Missing { id: 9 },
            ShmMessage::Withdraw { base: 4096 },
            ShmMessage::Confirm { base: 4096 },
        ] {
            let mut bytes = message.encode();
            assert!(bytes.len() <= MESSAGE_BYTES_MAX);
            assert_eq!(ShmMessage::decode(&bytes), Some(message));
            assert_eq!(ShmMessage::decode(&bytes[..bytes.len() - 1]), None);
            bytes.push(0);
            assert_eq!(ShmMessage::decode(&bytes), None);
        }
    }

    #[test]
    fn greeting_of_version_3_stays_as_it_is() {
        let hello = ShmMessage::Hello {
            version: 3,
            from: EngineId::from_bits(7),
            to: EngineId::from_bits(8),
        };
        let ids = [7_u128, 8].map(u128::to_le_bytes).concat();
        assert_eq!(hello.encode(), [&[1, 3, 0, 0, 0][..], &ids].concat());
        assert_eq!(ShmMessage::OtherVersion { version: 3 }.encode(), [14, 3, 0, 0, 0]);
        assert_eq!(VERSION, 3, "a new version needs bytes of its own here");
    }

    proptest! {
        #[test]
        fn decoded_bytes_encode_to_themselves(
            bytes in proptest::collection::vec(any::<u8>(), 0..80),
        ) {
            if let Some(message) = ShmMessage::decode(&bytes) {
                prop_assert_eq!(message.encode(), bytes);
            }
        }
    }
}
