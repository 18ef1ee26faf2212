//! Frames between ranks: their heads and kinds.

use std::io::{self, Read};

use crate::call::Call;

/// Memory that is reserved for a payload before its bytes arrive.
const RESERVED_BYTES_MAX: u64 = 64 << 20;

pub(crate) const HEADER_BYTES: usize = 56;

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A part of a collective operation.
    Collective,
    /// A message of `send`; its step is the tag.
    Message,
    /// The receiver has taken a message.
    Taken,
    /// As `Collective`: the payload says where the bytes are in the sender's memory.
    CollectiveLoan,
    /// As `Message`: the payload says where the bytes are in the sender's memory.
    MessageLoan,
    /// A message waits at its sender; the payload is its length.
    Offer,
    /// The receiver has room for the message of an offer.
    Request,
    /// The bytes of a message that was requested.
    Requested,
    /// Nothing but its number: frames before it may be in the ring.
    Wake,
    /// As `Collective`: the payload is where the bytes are in the sender's memory, on another host.
    CollectiveFetch,
    /// The sender has given up a message.
    Withdrawn,
}

/// The head of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) group: u64,
    pub(crate) attempt: u32,
    pub(crate) sequence: u64,
    pub(crate) step: u32,
    pub(crate) source: u32,
    pub(crate) length: u64,
    /// What the sender of a part has called.
    pub(crate) call: Call,
}

pub(crate) fn slot_number(slot: usize) -> u32 {
    u32::try_from(slot).unwrap_or(u32::MAX)
}

impl Header {
    pub(crate) const WAKE: Self = Self {
        kind: Kind::Wake,
        group: 0,
        attempt: 0,
        sequence: 0,
        step: 0,
        source: 0,
        length: 0,
        call: Call::NONE,
    };

    /// Returns the bytes of the header, with the number of the frame on its link.
    pub(crate) fn encode(&self, number: u64) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = self.kind as u8;
        bytes[4..8].copy_from_slice(&self.attempt.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.group.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.step.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.source.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.length.to_le_bytes());
        bytes[40..48].copy_from_slice(&number.to_le_bytes());
        bytes[48..].copy_from_slice(&self.call.encode());
        bytes
    }

    /// Returns the header and the number of the frame.
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<(Self, u64)> {
        let word = |at: usize| bytes[at..at + 4].try_into().map(u32::from_le_bytes).ok();
        let long = |at: usize| bytes[at..at + 8].try_into().map(u64::from_le_bytes).ok();
        let kind = match bytes[0] {
            0 => Kind::Collective,
            1 => Kind::Message,
            2 => Kind::Taken,
            3 => Kind::CollectiveLoan,
            4 => Kind::MessageLoan,
            5 => Kind::Offer,
            6 => Kind::Request,
            7 => Kind::Requested,
            8 => Kind::Wake,
            9 => Kind::CollectiveFetch,
            10 => Kind::Withdrawn,
            _ => return None,
        };
        let header = Self {
            kind,
            attempt: word(4)?,
            group: long(8)?,
            sequence: long(16)?,
            step: word(24)?,
            source: word(28)?,
            length: long(32)?,
            call: Call::decode(bytes[48..].try_into().ok()?),
        };
        Some((header, long(40)?))
    }
}

/// A frame that has arrived.
pub(crate) type Frame = (Header, u64, Vec<u8>);

/// Reads a frame from a socket.
pub(crate) fn read_frame(stream: &mut impl Read) -> io::Result<Frame> {
    let mut head = [0; HEADER_BYTES];
    stream.read_exact(&mut head)?;
    let (header, number) = Header::decode(&head).ok_or_else(|| io::Error::other("no frame"))?;
    let mut payload = Vec::new();
    // Memory grows with the bytes that arrive, not with what the header says.
    let reserved = header.length.min(RESERVED_BYTES_MAX);
    payload.reserve_exact(usize::try_from(reserved).unwrap_or(0));
    let read = stream.by_ref().take(header.length).read_to_end(&mut payload)?;
    if read as u64 != header.length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((header, number, payload))
}
