//! Events as a ZeroMQ message of three frames: an empty topic, a sequence number, MessagePack.

use std::time::{SystemTime, UNIX_EPOCH};

use bytes::{BufMut, Bytes, BytesMut};

use super::zmtp::put_frame;
use crate::{config::EventsConfig, state::ObjectEvent};

/// Encodes messages with consecutive sequence numbers.
#[derive(Debug, Default)]
pub(crate) struct MessageEncoder {
    sequence: u64,
    event_id: u64,
}

impl MessageEncoder {
    /// Skips `lost` sequence numbers.
    pub(super) fn skip(&mut self, lost: u64) {
        self.sequence += lost;
        self.event_id += lost;
    }

    /// Encodes the next message in its wire form.
    pub(super) fn message(&mut self, events: &[ObjectEvent], config: &EventsConfig) -> Bytes {
        self.sequence += 1;
        let mut payload = BytesMut::new();
        let now_ms = now_ms();
        array(&mut payload, 3);
        unsigned(&mut payload, now_ms);
        array(&mut payload, events.len());
        for event in events {
            self.event_id += 1;
            put_event(&mut payload, event, (self.event_id, now_ms), config);
        }
        unsigned(&mut payload, u64::from(config.dp_rank));
        let mut message = BytesMut::with_capacity(payload.len() + 32);
        put_frame(&mut message, &[], true);
        put_frame(&mut message, &self.sequence.to_be_bytes(), true);
        put_frame(&mut message, &payload, false);
        message.freeze()
    }
}

/// Encodes one event as a map. Values that a master does not know (tokens, hashes, positions in a
/// prefix) are nil or empty. Configured values (model, cache) are copied.
fn put_event(
    out: &mut BytesMut,
    event: &ObjectEvent,
    (event_id, now_ms): (u64, u64),
    config: &EventsConfig,
) {
    let is_stored = matches!(event, ObjectEvent::Stored { .. });
    let (kind, legacy) = match event {
        ObjectEvent::Stored { .. } => ("stored", "BlockStored"),
        ObjectEvent::Removed { .. } => ("removed", "BlockRemoved"),
        ObjectEvent::Cleared { .. } => ("cleared", "AllBlocksCleared"),
    };
    let about_object = !matches!(event, ObjectEvent::Cleared { .. });
    let fields = 11
        + usize::from(config.has_legacy)
        + if about_object { 4 + usize::from(config.has_legacy) } else { 0 }
        + if is_stored { 2 + usize::from(config.has_legacy) } else { 0 };
    map(out, fields);
    field(out, "event_id", |out| unsigned(out, event_id));
    field(out, "timestamp", |out| unsigned(out, now_ms));
    field(out, "event_type", |out| text(out, kind.as_bytes()));
    field(out, "model_name", |out| text_or_nil(out, config.model_name.as_bytes()));
    field(out, "block_size", |out| match config.block_size {
        0 => out.put_u8(NIL),
        size => unsigned(out, u64::from(size)),
    });
    field(out, "additional_salt", |out| text_or_nil(out, config.additional_salt.as_bytes()));
    field(out, "lora_name", |out| text_or_nil(out, config.lora_name.as_bytes()));
    field(out, "tenant_id", |out| text(out, event.tenant().as_bytes()));
    field(out, "backend_id", |out| text(out, config.backend_id.as_bytes()));
    field(out, "medium", |out| text_or_nil(out, if about_object { b"cpu" } else { b"" }));
    field(out, "dp_rank", |out| unsigned(out, u64::from(config.dp_rank)));
    if config.has_legacy {
        field(out, "type", |out| text(out, legacy.as_bytes()));
    }
    if about_object {
        field(out, "object_key", |out| text(out, event.key()));
        field(out, "group_id", |out| text_or_nil(out, event.group()));
        field(out, "seq_hashes", |out| array(out, 0));
        field(out, "base_block_idx", |out| out.put_u8(NIL));
        if config.has_legacy {
            field(out, "block_hashes", |out| array(out, 0));
        }
    }
    if is_stored {
        field(out, "parent_hash", |out| out.put_u8(NIL));
        field(out, "token_ids", |out| out.put_u8(NIL));
        if config.has_legacy {
            field(out, "parent_block_hash", |out| out.put_u8(NIL));
        }
    }
}

const NIL: u8 = 0xc0;

fn field(out: &mut BytesMut, name: &str, value: impl FnOnce(&mut BytesMut)) {
    text(out, name.as_bytes());
    value(out);
}

fn text_or_nil(out: &mut BytesMut, value: &[u8]) {
    if value.is_empty() { out.put_u8(NIL) } else { text(out, value) }
}

/// Encodes a string, or a byte string if the value is not valid UTF-8.
fn text(out: &mut BytesMut, value: &[u8]) {
    let length = value.len();
    match (str::from_utf8(value).is_ok(), length) {
        (true, 0..32) => out.put_u8(0xa0 | length as u8),
        (true, 32..256) => out.put_slice(&[0xd9, length as u8]),
        (true, 256..65_536) => {
            out.put_u8(0xda);
            out.put_u16(length as u16);
        }
        (true, _) => {
            out.put_u8(0xdb);
            out.put_u32(length as u32);
        }
        (false, 0..256) => out.put_slice(&[0xc4, length as u8]),
        (false, 256..65_536) => {
            out.put_u8(0xc5);
            out.put_u16(length as u16);
        }
        (false, _) => {
            out.put_u8(0xc6);
            out.put_u32(length as u32);
        }
    }
    out.put_slice(value);
}

fn unsigned(out: &mut BytesMut, value: u64) {
    match value {
        0..128 => out.put_u8(value as u8),
        128..256 => out.put_slice(&[0xcc, value as u8]),
        256..65_536 => {
            out.put_u8(0xcd);
            out.put_u16(value as u16);
        }
        65_536..0x1_0000_0000 => {
            out.put_u8(0xce);
            out.put_u32(value as u32);
        }
        _ => {
            out.put_u8(0xcf);
            out.put_u64(value);
        }
    }
}

/// Encodes the head of an array. No array here has 65536 entries.
fn array(out: &mut BytesMut, length: usize) {
    match length {
        0..16 => out.put_u8(0x90 | length as u8),
        _ => {
            out.put_u8(0xdc);
            out.put_u16(length as u16);
        }
    }
}

/// Encodes the head of a map. No map here has 65536 entries.
fn map(out: &mut BytesMut, length: usize) {
    match length {
        0..16 => out.put_u8(0x80 | length as u8),
        _ => {
            out.put_u8(0xde);
            out.put_u16(length as u16);
        }
    }
}

fn now_ms() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(write: impl FnOnce(&mut BytesMut)) -> Vec<u8> {
        let mut out = BytesMut::new();
        write(&mut out);
        out.to_vec()
    }

    #[test]
    fn encodes_shortest_form() {
        assert_eq!(made(|out| unsigned(out, 127)), [127]);
        assert_eq!(made(|out| unsigned(out, 128)), [0xcc, 128]);
        assert_eq!(made(|out| unsigned(out, 256)), [0xcd, 1, 0]);
        assert_eq!(made(|out| unsigned(out, 65_536)), [0xce, 0, 1, 0, 0]);
        assert_eq!(made(|out| unsigned(out, 1 << 32)), [0xcf, 0, 0, 0, 1, 0, 0, 0, 0]);
        assert_eq!(made(|out| text(out, b"ab")), [0xa2, b'a', b'b']);
        assert_eq!(made(|out| text(out, &[b'a'; 32]))[..2], [0xd9, 32]);
        assert_eq!(made(|out| text(out, &[b'a'; 256]))[..3], [0xda, 1, 0]);
        assert_eq!(made(|out| text(out, &[b'a'; 65_536]))[..5], [0xdb, 0, 1, 0, 0]);
        assert_eq!(made(|out| text(out, b"\xff")), [0xc4, 1, 0xff], "bytes that are no text");
        assert_eq!(made(|out| text_or_nil(out, b"")), [NIL]);
        assert_eq!(made(|out| map(out, 19)), [0xde, 0, 19]);
    }
}
