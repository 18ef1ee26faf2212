//! Encodes fields of what the log records.

use std::time::Duration;

use crate::state::{
    ledger::effect::{LoggedCopy, LoggedPin, ObjectName, Value},
    pool::{disks::DiskSpec, segment::SegmentSpec},
    tags::Tags,
};

/// Encodes fields.
pub(in crate::state) struct Writer<'b>(pub(in crate::state) &'b mut Vec<u8>);

impl Writer<'_> {
    pub(super) fn tag(&mut self, tag: u8) -> &mut Self {
        self.byte(tag)
    }

    pub(in crate::state) fn byte(&mut self, byte: u8) -> &mut Self {
        self.0.push(byte);
        self
    }

    pub(in crate::state) fn bool(&mut self, value: bool) -> &mut Self {
        self.byte(u8::from(value))
    }

    pub(super) fn number(&mut self, number: u32) -> &mut Self {
        self.int(u64::from(number))
    }

    pub(in crate::state) fn int(&mut self, mut value: u64) -> &mut Self {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.byte(value as u8)
    }

    pub(in crate::state) fn id(&mut self, bits: u128) -> &mut Self {
        self.0.extend_from_slice(&bits.to_le_bytes());
        self
    }

    pub(in crate::state) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.int(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
        self
    }

    pub(in crate::state) fn text(&mut self, text: &str) -> &mut Self {
        self.bytes(text.as_bytes())
    }

    /// Milliseconds are rounded up, so that a logged quarantine is never shortened.
    pub(in crate::state) fn time(&mut self, time: Duration) -> &mut Self {
        self.int(u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX))
    }

    pub(super) fn maybe_time(&mut self, time: Option<Duration>) -> &mut Self {
        self.bool(time.is_some());
        match time {
            Some(time) => self.time(time),
            None => self,
        }
    }

    /// Fixed width: all bits are random, so that a varint would be longer.
    pub(super) fn checksum(&mut self, checksum: Option<u64>) -> &mut Self {
        self.bool(checksum.is_some());
        if let Some(checksum) = checksum {
            self.0.extend_from_slice(&checksum.to_le_bytes());
        }
        self
    }

    pub(super) fn object(&mut self, object: &ObjectName<'_>) -> &mut Self {
        self.text(object.tenant).bytes(object.key).int(object.version)
    }

    pub(super) fn tags(&mut self, tags: &Tags) -> &mut Self {
        self.int(tags.iter().len() as u64);
        tags.iter().fold(self, |out, (name, value)| out.text(name).text(value))
    }

    pub(super) fn copy(&mut self, copy: &LoggedCopy) -> &mut Self {
        self.number(copy.segment.0).int(copy.offset).int(u64::from(copy.ordinal))
    }

    pub(super) fn segment(&mut self, spec: &SegmentSpec) -> &mut Self {
        self.id(spec.id.bits()).int(spec.incarnation.0).text(&spec.name).text(&spec.endpoint);
        self.int(spec.base).int(spec.length).text(&spec.protocol)
    }

    pub(super) fn disk(&mut self, spec: &DiskSpec) -> &mut Self {
        self.id(spec.id.bits()).int(spec.incarnation.0).text(&spec.name).text(&spec.address);
        self.int(spec.capacity)
    }

    pub(super) fn value(&mut self, value: &Value<'_>) -> &mut Self {
        self.text(value.tenant).bytes(value.key).int(value.length);
        self.int(value.copies.len() as u64);
        for copy in value.copies.iter() {
            self.copy(copy);
        }
        self.byte(value.data_type).bool(value.is_hard_pinned).bytes(value.group);
        match value.pin {
            LoggedPin::Preserve => self.byte(0),
            LoggedPin::None => self.byte(1),
            LoggedPin::For(time) => self.byte(2).time(time),
        }
    }
}
