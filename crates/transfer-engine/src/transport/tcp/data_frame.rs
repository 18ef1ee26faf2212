//! The codec of the native frames, without I/O.
//!
//! After the greetings ([`greeting`](super::greeting)) a connection carries requests, one after
//! another. A request is a header, a table of ranges, and for a write the concatenated payload. Its
//! response is a header, a list of refused ranges, and for a read the payload of the other ranges.
//! Integers are little-endian.

use std::fmt;

use mooncake_base::ErrorCode;

use crate::transfer_entry::{Opcode, RemoteRange};

/// The length of a request's header.
pub(super) const REQUEST_BYTES: usize = 24;

/// The length of one range in a request's table.
pub(super) const ENTRY_BYTES: usize = 16;

/// The length of a response's header.
pub(super) const RESPONSE_BYTES: usize = 24;

/// The length of one refusal in a response's list.
pub(super) const REFUSAL_BYTES: usize = 8;

/// The maximum number of ranges in a request. The client splits larger batches.
pub(super) const ENTRIES_MAX: usize = 4096;

/// The maximum payload of a request, which bounds how long memory stays pinned. The client splits
/// larger entries.
pub(super) const PAYLOAD_BYTES_MAX: u64 = 16 << 20;

/// The header of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RequestHeader {
    pub(super) opcode: Opcode,
    /// The number of ranges that follow, from 1 to [`ENTRIES_MAX`].
    pub(super) count: usize,
    /// The sequence number, which the response repeats.
    pub(super) sequence: u64,
    /// The total length of all ranges.
    pub(super) payload: u64,
}

/// The header of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ResponseHeader {
    pub(super) sequence: u64,
    /// The number of refusals that follow.
    pub(super) refused: usize,
    /// The number of payload bytes that follow the refusals.
    pub(super) payload: u64,
}

/// A range that was not moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Refusal {
    /// The index of the entry in the request.
    pub(super) index: usize,
    pub(super) code: ErrorCode,
}

/// Bytes that violate the protocol; the connection must be closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Malformed(pub(super) &'static str);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the peer broke the protocol: {}", self.0)
    }
}

impl std::error::Error for Malformed {}

impl From<Malformed> for std::io::Error {
    fn from(malformed: Malformed) -> Self {
        Self::new(std::io::ErrorKind::InvalidData, malformed)
    }
}

impl RequestHeader {
    /// Appends the header; the table follows through [`encode_entry`].
    pub(super) fn encode(&self, wire: &mut Vec<u8>) {
        let opcode = match self.opcode {
            Opcode::Read => 0_u32,
            Opcode::Write => 1,
        };
        wire.extend_from_slice(&(self.count as u32).to_le_bytes());
        wire.extend_from_slice(&opcode.to_le_bytes());
        wire.extend_from_slice(&self.sequence.to_le_bytes());
        wire.extend_from_slice(&self.payload.to_le_bytes());
    }

    pub(super) fn decode(bytes: &[u8; REQUEST_BYTES]) -> Result<Self, Malformed> {
        let count = u32::from_le_bytes(array(bytes, 0)) as usize;
        if !(1..=ENTRIES_MAX).contains(&count) {
            return Err(Malformed("number of ranges out of bounds"));
        }
        let opcode = match u32::from_le_bytes(array(bytes, 4)) {
            0 => Opcode::Read,
            1 => Opcode::Write,
            _ => return Err(Malformed("unknown operation")),
        };
        let payload = u64::from_le_bytes(array(bytes, 16));
        if payload > PAYLOAD_BYTES_MAX {
            return Err(Malformed("too many bytes for one request"));
        }
        Ok(Self { opcode, count, sequence: u64::from_le_bytes(array(bytes, 8)), payload })
    }
}

/// Appends one range of a request's table.
pub(super) fn encode_entry(range: RemoteRange, wire: &mut Vec<u8>) {
    wire.extend_from_slice(&range.address.to_le_bytes());
    wire.extend_from_slice(&range.length.to_le_bytes());
}

/// Decodes a table into `ranges`, whose former content is discarded.
///
/// # Errors
/// A range is empty, or the lengths do not add up to the payload that the header announces: no
/// correct client sends either.
pub(super) fn decode_entries(
    header: &RequestHeader,
    table: &[u8],
    ranges: &mut Vec<RemoteRange>,
) -> Result<(), Malformed> {
    ranges.clear();
    let (entries, rest) = table.as_chunks::<ENTRY_BYTES>();
    if entries.len() != header.count || !rest.is_empty() {
        return Err(Malformed("the length of the table is wrong"));
    }
    let mut sum = 0_u64;
    for entry in entries {
        let range = RemoteRange {
            address: u64::from_le_bytes(array(entry, 0)),
            length: u64::from_le_bytes(array(entry, 8)),
        };
        if range.length == 0 {
            return Err(Malformed("an empty range"));
        }
        sum = sum.saturating_add(range.length);
        ranges.push(range);
    }
    if sum == header.payload {
        Ok(())
    } else {
        Err(Malformed("the lengths do not add up to the payload"))
    }
}

impl ResponseHeader {
    /// Appends the header; the refusals follow through [`Refusal::encode`].
    pub(super) fn encode(&self, wire: &mut Vec<u8>) {
        wire.extend_from_slice(&self.sequence.to_le_bytes());
        wire.extend_from_slice(&(self.refused as u64).to_le_bytes());
        wire.extend_from_slice(&self.payload.to_le_bytes());
    }

    /// Decodes the header of the response to `request`.
    pub(super) fn decode(
        bytes: &[u8; RESPONSE_BYTES],
        request: &RequestHeader,
    ) -> Result<Self, Malformed> {
        let sequence = u64::from_le_bytes(array(bytes, 0));
        if sequence != request.sequence {
            return Err(Malformed("a response to another request"));
        }
        let refused = u64::from_le_bytes(array(bytes, 8));
        let payload = u64::from_le_bytes(array(bytes, 16));
        let most = if request.opcode == Opcode::Read { request.payload } else { 0 };
        if refused > request.count as u64 || payload > most {
            return Err(Malformed("a response larger than its request"));
        }
        Ok(Self { sequence, refused: refused as usize, payload })
    }
}

impl Refusal {
    pub(super) fn encode(&self, wire: &mut Vec<u8>) {
        wire.extend_from_slice(&(self.index as u32).to_le_bytes());
        wire.extend_from_slice(&self.code.number().to_le_bytes());
    }

    /// Decodes a list. Each index must exist in the request and exceed the previous one.
    pub(super) fn decode_all(list: &[u8], count: usize) -> Result<Vec<Self>, Malformed> {
        let (entries, rest) = list.as_chunks::<REFUSAL_BYTES>();
        if !rest.is_empty() {
            return Err(Malformed("the list of refusals is truncated"));
        }
        let mut refusals = Vec::<Self>::with_capacity(entries.len());
        for entry in entries {
            let index = u32::from_le_bytes(array(entry, 0)) as usize;
            let is_next = refusals.last().is_none_or(|before| before.index < index);
            if index >= count || !is_next {
                return Err(Malformed("a refusal of an entry that does not exist"));
            }
            // A newer peer may send codes that are unknown here.
            let code = ErrorCode::from_number(i32::from_le_bytes(array(entry, 4)))
                .unwrap_or(ErrorCode::TRANSFER_FAIL);
            refusals.push(Self { index, code });
        }
        Ok(refusals)
    }
}

/// Returns the bytes `start..start + N`. The caller ensures that they exist.
pub(super) fn array<const N: usize>(bytes: &[u8], start: usize) -> [u8; N] {
    bytes[start..start + N].try_into().expect("a slice of N bytes is an array of N bytes")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn opcodes() -> impl Strategy<Value = Opcode> {
        prop_oneof![Just(Opcode::Read), Just(Opcode::Write)]
    }

    #[test]
    fn accepts_requests_up_to_the_limits() {
        let check = |count: usize, payload: u64, is_good: bool| {
            let header = RequestHeader { opcode: Opcode::Read, count, sequence: 1, payload };
            let mut wire = Vec::new();
            header.encode(&mut wire);
            let decoded = RequestHeader::decode(&array(&wire, 0));
            assert_eq!(decoded.is_ok(), is_good, "{count} {payload}");
        };
        check(0, 1, false);
        check(1, 1, true);
        check(ENTRIES_MAX, PAYLOAD_BYTES_MAX, true);
        check(ENTRIES_MAX + 1, 1, false);
        check(1, PAYLOAD_BYTES_MAX + 1, false);
    }

    #[test]
    fn rejects_tables_that_do_not_add_up() {
        let check = |lengths: &[u64], payload: u64, is_good: bool| {
            let count = lengths.len();
            let header = RequestHeader { opcode: Opcode::Write, count, sequence: 1, payload };
            let mut wire = Vec::new();
            for &length in lengths {
                encode_entry(RemoteRange { address: 1, length }, &mut wire);
            }
            let decoded = decode_entries(&header, &wire, &mut Vec::new());
            assert_eq!(decoded.is_ok(), is_good, "{lengths:?} {payload}");
        };
        check(&[1, 2], 3, true);
        check(&[1, 2], 4, false);
        check(&[0, 3], 3, false);
        check(&[u64::MAX, 4], 3, false);
    }

    proptest! {
        #[test]
        fn requests_round_trip(
            opcode in opcodes(), sequence: u64,
            ranges in proptest::collection::vec((any::<u64>(), 1..5000_u64), 1..50),
        ) {
            let ranges: Vec<_> = ranges
                .into_iter().map(|(address, length)| RemoteRange { address, length }).collect();
            let payload = ranges.iter().map(|range| range.length).sum();
            let header = RequestHeader { opcode, count: ranges.len(), sequence, payload };
            let mut wire = Vec::new();
            header.encode(&mut wire);
            for range in &ranges {
                encode_entry(*range, &mut wire);
            }
            let read = RequestHeader::decode(&array(&wire, 0)).unwrap();
            prop_assert_eq!(read, header);
            let mut table = Vec::new();
            decode_entries(&read, &wire[REQUEST_BYTES..], &mut table).unwrap();
            prop_assert_eq!(table, ranges);
        }

        #[test]
        fn responses_round_trip(
            sequence: u64, payload in 0..5000_u64, indexes: std::collections::BTreeSet<u8>,
        ) {
            let request =
                RequestHeader { opcode: Opcode::Read, count: 256, sequence, payload: 5000 };
            let refusals: Vec<_> = indexes
                .into_iter()
                .map(|index| Refusal { index: index.into(), code: ErrorCode::TRANSFER_FAIL })
                .collect();
            let header = ResponseHeader { sequence, refused: refusals.len(), payload };
            let mut wire = Vec::new();
            header.encode(&mut wire);
            for refusal in &refusals {
                refusal.encode(&mut wire);
            }
            prop_assert_eq!(ResponseHeader::decode(&array(&wire, 0), &request), Ok(header));
            prop_assert_eq!(Refusal::decode_all(&wire[RESPONSE_BYTES..], 256), Ok(refusals));
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 32..200)) {
            if let Ok(header) = RequestHeader::decode(&array(&bytes, 0)) {
                let _ = decode_entries(&header, &bytes[REQUEST_BYTES..], &mut Vec::new());
                let _ = ResponseHeader::decode(&array(&bytes, 8), &header);
            }
            let _ = Refusal::decode_all(&bytes, 10);
        }
    }
}
