//! Events as a ZeroMQ message of three frames: an empty topic, a sequence number, MessagePack.

use std::time::{SystemTime, UNIX_EPOCH};

use bytes::{Bytes, BytesMut};
use rmp::encode;

use super::zmtp::put_frame;
use crate::{config::EventsConfig, state::ObjectEvent};

/// Encodes messages with consecutive sequence numbers.
#[derive(Debug, Default)]
pub(crate) struct MessageEncoder {
    sequence: u64,
    event_id: u64,
}

impl MessageEncoder {
    /// Creates an encoder that counts on from a number.
    pub(super) const fn after(before: u64) -> Self {
        Self { sequence: before, event_id: before }
    }

    /// Skips `lost` sequence numbers.
    pub(super) fn skip(&mut self, lost: u64) {
        self.sequence += lost;
        self.event_id += lost;
    }

    /// Encodes the next message in its wire form.
    pub(super) fn message(&mut self, events: &[ObjectEvent], config: &EventsConfig) -> Bytes {
        self.sequence += 1;
        let mut payload = Payload::default();
        let now_ms = now_ms();
        payload.array(3);
        payload.unsigned(now_ms);
        payload.array(events.len());
        for event in events {
            self.event_id += 1;
            put_event(&mut payload, event, self.event_id, now_ms, config);
        }
        payload.unsigned(u64::from(config.dp_rank));
        let Payload(payload) = payload;
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
    out: &mut Payload,
    event: &ObjectEvent,
    event_id: u64,
    now_ms: u64,
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
        + u32::from(config.has_legacy)
        + if about_object { 4 + u32::from(config.has_legacy) } else { 0 }
        + if is_stored { 2 + u32::from(config.has_legacy) } else { 0 };
    out.map(fields);
    out.field("event_id", |out| out.unsigned(event_id));
    out.field("timestamp", |out| out.unsigned(now_ms));
    out.field("event_type", |out| out.text(kind.as_bytes()));
    out.field("model_name", |out| out.text_or_nil(config.model_name.as_bytes()));
    out.field("block_size", |out| match config.block_size {
        0 => out.nil(),
        size => out.unsigned(u64::from(size)),
    });
    out.field("additional_salt", |out| out.text_or_nil(config.additional_salt.as_bytes()));
    out.field("lora_name", |out| out.text_or_nil(config.lora_name.as_bytes()));
    out.field("tenant_id", |out| out.text(event.tenant().as_bytes()));
    out.field("backend_id", |out| out.text(config.backend_id.as_bytes()));
    out.field("medium", |out| out.text_or_nil(if about_object { b"cpu" } else { b"" }));
    out.field("dp_rank", |out| out.unsigned(u64::from(config.dp_rank)));
    if config.has_legacy {
        out.field("type", |out| out.text(legacy.as_bytes()));
    }
    if about_object {
        out.field("object_key", |out| out.text(event.key()));
        out.field("group_id", |out| out.text_or_nil(event.group()));
        out.field("seq_hashes", |out| out.array(0));
        out.field("base_block_idx", |out| out.nil());
        if config.has_legacy {
            out.field("block_hashes", |out| out.array(0));
        }
    }
    if is_stored {
        out.field("parent_hash", |out| out.nil());
        out.field("token_ids", |out| out.nil());
        if config.has_legacy {
            out.field("parent_block_hash", |out| out.nil());
        }
    }
}

/// An encoder of MessagePack. A vector accepts all bytes, so that no method fails.
#[derive(Debug, Default)]
struct Payload(Vec<u8>);

const VECTOR: &str = "a vector accepts all bytes";

impl Payload {
    fn field(&mut self, name: &str, value: impl FnOnce(&mut Self)) {
        self.text(name.as_bytes());
        value(self);
    }

    fn text_or_nil(&mut self, value: &[u8]) {
        if value.is_empty() { self.nil() } else { self.text(value) }
    }

    /// Appends a string, or a byte string if the value is not valid UTF-8.
    fn text(&mut self, value: &[u8]) {
        match str::from_utf8(value) {
            Ok(text) => encode::write_str(&mut self.0, text),
            Err(_) => encode::write_bin(&mut self.0, value),
        }
        .expect(VECTOR);
    }

    fn unsigned(&mut self, value: u64) {
        encode::write_uint(&mut self.0, value).expect(VECTOR);
    }

    fn nil(&mut self) {
        encode::write_nil(&mut self.0).expect(VECTOR);
    }

    /// Appends the head of an array.
    fn array(&mut self, length: usize) {
        let length = u32::try_from(length).expect("a message has fewer events");
        encode::write_array_len(&mut self.0, length).expect(VECTOR);
    }

    /// Appends the head of a map.
    fn map(&mut self, fields: u32) {
        encode::write_map_len(&mut self.0, fields).expect(VECTOR);
    }
}

fn now_ms() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_text_bytes_or_nil() {
        let mut payload = Payload::default();
        payload.map(19);
        payload.text(b"ab");
        payload.text(b"\xff");
        payload.text_or_nil(b"");
        payload.unsigned(256);
        payload.array(0);
        let expected: [&[u8]; 6] = [
            &[0xde, 0, 19],
            &[0xa2, b'a', b'b'],
            // Bytes that are no text.
            &[0xc4, 1, 0xff],
            &[0xc0],
            &[0xcd, 1, 0],
            &[0x90],
        ];
        assert_eq!(payload.0, expected.concat());
    }
}
