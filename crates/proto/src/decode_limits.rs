//! Limits on the memory of a decoded message. An empty item of two bytes on the wire takes a hundred
//! in memory, so the length of a frame alone is not a sufficient limit.
//!
//! The limits do not depend on message types. The fields down to the level of a call's items are
//! counted before anything is decoded. Deeper values (names in an item, numbers in a packed list)
//! consume a budget of reads during decoding.

use bytes::{Buf, Bytes};
use mooncake_base::{Error, ErrorCode, Result};
use prost::{
    DecodeError, Message,
    encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field},
};

/// The maximum number of items in a call.
pub const ITEMS_MAX: usize = 1 << 17;

/// The maximum number of length-delimited fields down to the level of a call's items: the items, and
/// released fences, which are three fields each.
const FIELDS_MAX: usize = 4 * ITEMS_MAX;

/// The maximum number of reads per message; a read is a number, or the bytes behind a length. The
/// largest batch of items with all their fields takes half of this budget.
const READS_MAX: u32 = 32 * ITEMS_MAX as u32;

/// A message up to this length cannot exceed [`ITEMS_MAX`], because each item takes two bytes. Such
/// messages skip the counting, which would cost a sixth of the decoding.
const SHORT_BYTES: usize = 2 * ITEMS_MAX;

/// Decodes a message whose items are this number of levels down.
///
/// # Errors
/// `INVALID_PARAMS`: the message exceeds the limits; `RPC_FAIL`: the bytes are malformed.
pub fn decode<M: Message + Default>(from: impl Buf, levels: u32) -> Result<M> {
    if from.remaining() <= SHORT_BYTES {
        return M::decode(from).map_err(malformed);
    }
    decode_within(from, levels, FIELDS_MAX, READS_MAX)
}

fn decode_within<M: Message + Default>(
    from: impl Buf,
    levels: u32,
    fields: usize,
    reads: u32,
) -> Result<M> {
    // A field takes at least two bytes. Our buffers are contiguous.
    if from.remaining() > 2 * fields && count_fields(from.chunk(), levels, fields) > fields {
        return Err(over_limit());
    }
    let mut limited = LimitedBuf { from, reads };
    let decoded = M::decode(&mut limited);
    if limited.reads == 0 {
        return Err(over_limit());
    }
    decoded.map_err(malformed)
}

fn malformed(source: DecodeError) -> Error {
    Error::new(ErrorCode::RPC_FAIL, "the peer sent a malformed message").caused_by(source)
}

fn over_limit() -> Error {
    Error::invalid("the message holds more items than a call may").with("limit", ITEMS_MAX)
}

/// Counts the length-delimited fields in the upper levels, up to slightly beyond the limit. Counting
/// stops at malformed bytes: decoding will reject them.
fn count_fields(mut message: &[u8], levels: u32, limit: usize) -> usize {
    let mut counted = 0;
    while counted <= limit && !message.is_empty() {
        match skip_one(&mut message) {
            Ok(None) => {}
            Ok(Some(within)) => {
                counted += 1;
                if levels > 1 {
                    counted += count_fields(within, levels - 1, limit - counted.min(limit));
                }
            }
            Err(_) => break,
        }
    }
    counted
}

/// Skips one field and returns its bytes if it is length-delimited. The start and end of a group are
/// treated as fields without content, so that the group's fields count as those of the message.
fn skip_one<'a>(message: &mut &'a [u8]) -> std::result::Result<Option<&'a [u8]>, DecodeError> {
    let (tag, wire) = decode_key(message)?;
    match wire {
        WireType::StartGroup | WireType::EndGroup => Ok(None),
        WireType::LengthDelimited => {
            let length = decode_varint(message)?;
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            let (within, rest) = message.split_at_checked(length).unwrap_or((*message, &[]));
            *message = rest;
            Ok(Some(within))
        }
        WireType::Varint | WireType::SixtyFourBit | WireType::ThirtyTwoBit => {
            skip_field(wire, tag, message, DecodeContext::default()).map(|()| None)
        }
    }
}

/// A buffer that appears to end once its budget of reads is used up.
struct LimitedBuf<B> {
    from: B,
    reads: u32,
}

impl<B: Buf> LimitedBuf<B> {
    fn take_one(&mut self) {
        self.reads = self.reads.saturating_sub(1);
        if self.reads == 0 {
            self.from.advance(self.from.remaining());
        }
    }
}

/// No method panics after the end: a decoder may have checked `remaining` before the budget ran out.
impl<B: Buf> Buf for LimitedBuf<B> {
    fn remaining(&self) -> usize {
        self.from.remaining()
    }

    fn chunk(&self) -> &[u8] {
        self.from.chunk()
    }

    fn advance(&mut self, count: usize) {
        if self.reads > 0 {
            self.from.advance(count);
            self.take_one();
        }
    }

    fn get_u8(&mut self) -> u8 {
        let byte = self.from.chunk().first().copied().unwrap_or(0);
        self.advance(1);
        byte
    }

    fn copy_to_bytes(&mut self, length: usize) -> Bytes {
        if self.reads == 0 {
            return Bytes::new();
        }
        let bytes = self.from.copy_to_bytes(length);
        self.take_one();
        bytes
    }
}

#[cfg(test)]
mod tests {
    use prost::encoding::{encode_key, encode_varint};

    use super::*;
    use crate::v1::{self, request::Call};

    const FRAME: usize = crate::native_frame::FRAME_BYTES_MAX;

    /// Encodes a length-delimited field.
    fn field(tag: u32, body: &[u8]) -> Vec<u8> {
        let mut wire = Vec::new();
        encode_key(tag, WireType::LengthDelimited, &mut wire);
        encode_varint(body.len() as u64, &mut wire);
        wire.extend_from_slice(body);
        wire
    }

    fn code(wire: &[u8]) -> ErrorCode {
        decode::<v1::Request>(wire, 2).unwrap_err().code()
    }

    #[test]
    fn rejects_a_frame_full_of_empty_items_in_any_call() {
        for call in [4, 6, 7, 8, 9, 10, 11, 12, 30, 33, 34, 35, 39] {
            let items = [0x12, 0].repeat(FRAME / 2 - 8);
            assert_eq!(code(&field(call, &items)), ErrorCode::INVALID_PARAMS, "call {call}");
        }
        // The same field repeated, where the last one counts, and fields beside the call.
        let parts = field(6, &[0x12, 0].repeat(1000)).repeat(FIELDS_MAX / 1000 + 1);
        assert_eq!(code(&parts), ErrorCode::INVALID_PARAMS);
        assert_eq!(code(&field(101, &[]).repeat(FIELDS_MAX + 1)), ErrorCode::INVALID_PARAMS);
        // Fields after a group; no message of this protocol has groups.
        let hidden = [&[0x0b, 0x0c][..], &[0x12, 0].repeat(FIELDS_MAX + 1)].concat();
        assert_eq!(code(&field(6, &hidden)), ErrorCode::INVALID_PARAMS);
    }

    #[test]
    fn rejects_long_lists_within_an_item() {
        let names = field(30, &field(2, &field(4, &[]).repeat(FRAME / 2 - 16)));
        let numbers = field(33, &field(2, &field(3, &vec![1; FRAME - 64])));
        let fences = field(101, &field(2, &vec![1; FRAME - 64]));
        for wire in [names, numbers, fences] {
            assert_eq!(code(&wire), ErrorCode::INVALID_PARAMS);
        }
    }

    #[test]
    fn accepts_the_largest_batch() {
        let items = 0..ITEMS_MAX as u32;
        let columns = v1::PutRefColumns {
            versions: vec![u64::MAX; ITEMS_MAX],
            checksums: Some(v1::ChecksumColumn {
                items: items.clone().collect(),
                checksums: vec![u64::MAX; ITEMS_MAX],
            }),
            failed_items: items.flat_map(|item| [item; 2]).collect(),
            failed_replicas: vec![u64::MAX; 2 * ITEMS_MAX],
            late_items: Vec::new(),
            late_replicas: Vec::new(),
            keys: Some(v1::KeyColumn::pack(vec![[b'k'; 64]; ITEMS_MAX])),
        };
        let fence = v1::FenceRelease { fence: 7, versions: vec![1], objects: vec![1] };
        let call = Call::PutEnd(v1::PutEndRequest {
            caller: Some(v1::Caller { client: vec![7; 16].into(), tenant: "t".to_owned() }),
            columns: Some(columns),
        });
        let request = v1::Request {
            call: Some(call),
            released_fences: vec![fence; 1 << 16],
            ..Default::default()
        };
        let wire = request.encode_to_vec();
        assert_eq!(decode::<v1::Request>(wire.as_slice(), 2).unwrap(), request);
    }

    #[test]
    fn exhausted_budget_never_yields_a_partial_message() {
        let columns = v1::PutColumns {
            keys: Some(v1::KeyColumn { bytes: "keykey".into(), lengths: vec![3; 2] }),
            lengths: vec![300; 2],
            groups: vec!["g".into(); 2],
            if_versions: Vec::new(),
        };
        let start = v1::PutStartRequest {
            columns: Some(columns),
            avoided_endpoints: vec!["h:1".into(); 3],
            ..Default::default()
        };
        let request = v1::Request { call: Some(Call::PutStart(start)), ..Default::default() };
        let wire = request.encode_to_vec();
        let mut is_enough = false;
        for reads in 1..100 {
            let decoded = decode_within::<v1::Request>(wire.as_slice(), 2, 100, reads);
            match decoded {
                Ok(decoded) => {
                    assert_eq!(decoded, request);
                    is_enough = true;
                }
                Err(error) => {
                    assert_eq!(error.code(), ErrorCode::INVALID_PARAMS);
                    assert!(!is_enough);
                }
            }
        }
        assert!(is_enough);
    }

    #[test]
    fn reports_malformed_bytes() {
        assert_eq!(code(&[0xff; 20]), ErrorCode::RPC_FAIL);
        assert_eq!(code(&vec![0xff; SHORT_BYTES + 1]), ErrorCode::RPC_FAIL);
        assert_eq!(code(&field(6, &[0xff; 3])), ErrorCode::RPC_FAIL);
    }
}
