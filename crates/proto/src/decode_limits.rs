//! Bounds what a message may grow into when it is decoded: an empty item of two bytes becomes a
//! hundred, so that the length of a frame alone bounds little.
//!
//! No message is named here. The fields at the level of a call's items are counted before anything
//! is decoded, and what lies deeper (names in an item, numbers in a packed list) takes from a
//! ration of reads while it is.

use bytes::{Buf, Bytes};
use mooncake_base::{Error, ErrorCode, Result};
use prost::{
    DecodeError, Message,
    encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field},
};

/// The most items of a call.
pub const ITEMS_MAX: usize = 1 << 17;

/// The most fields with a length down to the level of a call's items: the items, and fences that
/// are handed back, of which each is three.
const FIELDS_MAX: usize = 4 * ITEMS_MAX;

/// The most that is read of one message: a number, or the bytes behind a length. The largest batch
/// of items with all their fields takes half of it.
const READS_MAX: u32 = 32 * ITEMS_MAX as u32;

/// No message up to this long can hold more items than a call may: each takes two bytes. It is
/// spared the counting, which would be a sixth of what it costs to decode it.
const SHORT_BYTES: usize = 2 * ITEMS_MAX;

/// Decodes a message whose calls' items are so many levels down.
///
/// # Errors
/// `INVALID_PARAMS`: it holds more than a call may; `RPC_FAIL`: it is no message.
pub fn decode<M: Message + Default>(from: impl Buf, levels: u32) -> Result<M> {
    if from.remaining() <= SHORT_BYTES {
        return M::decode(from).map_err(no_message);
    }
    decode_within(from, levels, FIELDS_MAX, READS_MAX)
}

fn decode_within<M: Message + Default>(
    from: impl Buf,
    levels: u32,
    fields: usize,
    reads: u32,
) -> Result<M> {
    // A field takes two bytes at least. Our buffers are in one piece.
    if from.remaining() > 2 * fields && count(from.chunk(), levels, fields) > fields {
        return Err(too_much());
    }
    let mut limited = LimitedBuf { from, reads };
    let decoded = M::decode(&mut limited);
    if limited.reads == 0 {
        return Err(too_much());
    }
    decoded.map_err(no_message)
}

fn no_message(source: DecodeError) -> Error {
    Error::new(ErrorCode::RPC_FAIL, "the peer sent a frame that is no message").caused_by(source)
}

fn too_much() -> Error {
    Error::invalid("the message holds more items than a call may").with("limit", ITEMS_MAX)
}

/// How many fields with a length there are in the upper levels, counted to a little beyond the
/// limit. What is no message counts as far as it looks like one: decoding will refuse it there.
fn count(mut message: &[u8], levels: u32, limit: usize) -> usize {
    let mut counted = 0;
    while counted <= limit && !message.is_empty() {
        match field(&mut message) {
            Ok(None) => {}
            Ok(Some(within)) => {
                counted += 1;
                if levels > 1 {
                    counted += count(within, levels - 1, limit - counted.min(limit));
                }
            }
            Err(_) => break,
        }
    }
    counted
}

/// Steps over one field and returns its bytes if it has a length. The ends of a group are fields
/// without content here, so that its fields count as those of the message.
fn field<'a>(message: &mut &'a [u8]) -> std::result::Result<Option<&'a [u8]>, DecodeError> {
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

/// A buffer that seems to end once its ration of reads is used up.
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

/// Nothing here panics after the end: a decoder may have looked at what remains before it came.
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

    /// A field with a length.
    fn within(tag: u32, body: &[u8]) -> Vec<u8> {
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
    fn a_frame_full_of_empty_items_is_refused_in_whatever_call_they_come() {
        for call in [4, 6, 7, 8, 9, 10, 11, 12, 30, 33, 34, 35, 39] {
            let items = [0x12, 0].repeat(FRAME / 2 - 8);
            assert_eq!(code(&within(call, &items)), ErrorCode::INVALID_PARAMS, "call {call}");
        }
        // In many calls, of which the last counts, and beside the call.
        let parts = within(6, &[0x12, 0].repeat(1000)).repeat(FIELDS_MAX / 1000 + 1);
        assert_eq!(code(&parts), ErrorCode::INVALID_PARAMS);
        assert_eq!(code(&within(101, &[]).repeat(FIELDS_MAX + 1)), ErrorCode::INVALID_PARAMS);
        // Behind a group, which no message has.
        let hidden = [&[0x0b, 0x0c][..], &[0x12, 0].repeat(FIELDS_MAX + 1)].concat();
        assert_eq!(code(&within(6, &hidden)), ErrorCode::INVALID_PARAMS);
    }

    #[test]
    fn long_lists_within_an_item_are_refused_too() {
        let names = within(30, &within(2, &within(4, &[]).repeat(FRAME / 2 - 16)));
        let numbers = within(7, &within(2, &within(3, &vec![1; FRAME - 64])));
        let fences = within(101, &within(2, &vec![1; FRAME - 64]));
        for wire in [names, numbers, fences] {
            assert_eq!(code(&wire), ErrorCode::INVALID_PARAMS);
        }
    }

    #[test]
    fn the_largest_batch_with_all_it_may_carry_passes() {
        let item = v1::PutRef {
            key: vec![b'k'; 64].into(),
            version: u64::MAX,
            failed_replicas: vec![u64::MAX; 2],
            checksum: Some(u64::MAX),
        };
        let fence = v1::FenceRelease { fence: 7, versions: vec![1], objects: vec![1] };
        let call = Call::PutEnd(v1::PutEndRequest {
            caller: Some(v1::Caller { client: vec![7; 16].into(), tenant: "t".to_owned() }),
            puts: vec![item; ITEMS_MAX],
            columns: None,
        });
        let request = v1::Request { call: Some(call), released_fences: vec![fence; 1 << 16] };
        let wire = request.encode_to_vec();
        assert_eq!(decode::<v1::Request>(wire.as_slice(), 2).unwrap(), request);
    }

    #[test]
    fn a_ration_that_ends_anywhere_is_an_error_and_never_half_a_message() {
        let item = v1::PutItem { key: b"key".as_slice().into(), length: 300, group: "g".into() };
        let columns = v1::PutColumns {
            keys: Some(v1::KeyColumn { bytes: "keykey".into(), lengths: vec![3; 2] }),
            lengths: vec![300; 2],
            groups: vec!["g".into(); 2],
        };
        let start = v1::PutStartRequest {
            items: vec![item; 3],
            columns: Some(columns),
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
    fn what_is_no_message_is_said_to_be_none() {
        assert_eq!(code(&[0xff; 20]), ErrorCode::RPC_FAIL);
        assert_eq!(code(&vec![0xff; SHORT_BYTES + 1]), ErrorCode::RPC_FAIL);
        assert_eq!(code(&within(6, &[0xff; 3])), ErrorCode::RPC_FAIL);
    }
}
