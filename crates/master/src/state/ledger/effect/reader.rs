//! Decodes fields of what the log records.

use std::time::Duration;

use mooncake_base::{Incarnation, SegmentId};
use smallvec::SmallVec;

use crate::state::{
    ledger::effect::{LoggedCopy, LoggedPin, ObjectName, Value},
    options::Terms,
    pool::{
        disks::DiskSpec,
        segment::{SegmentNumber, SegmentSpec},
    },
    tags::Tags,
};

/// Decodes fields; `None` at the first invalid one.
pub(in crate::state) struct Reader<'a> {
    bytes: &'a [u8],
    pub(super) at: usize,
}

impl<'a> Reader<'a> {
    pub(in crate::state) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    fn raw(&mut self, length: usize) -> Option<&'a [u8]> {
        let bytes = self.bytes.get(self.at..self.at.checked_add(length)?)?;
        self.at += length;
        Some(bytes)
    }

    /// Returns whether all bytes have been read.
    pub(in crate::state) fn is_at_end(&self) -> bool {
        self.at == self.bytes.len()
    }

    pub(in crate::state) fn byte(&mut self) -> Option<u8> {
        Some(self.raw(1)?[0])
    }

    pub(super) fn ordinal(&mut self) -> Option<u32> {
        u32::try_from(self.int()?).ok()
    }

    pub(in crate::state) fn bool(&mut self) -> Option<bool> {
        match self.byte()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    pub(in crate::state) fn int(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                return None;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    pub(super) fn number(&mut self) -> Option<SegmentNumber> {
        u32::try_from(self.int()?).ok().map(SegmentNumber)
    }

    pub(in crate::state) fn id(&mut self) -> Option<u128> {
        Some(u128::from_le_bytes(self.raw(16)?.try_into().ok()?))
    }

    pub(in crate::state) fn sized(&mut self) -> Option<&'a [u8]> {
        let length = usize::try_from(self.int()?).ok()?;
        self.raw(length)
    }

    pub(in crate::state) fn text(&mut self) -> Option<&'a str> {
        std::str::from_utf8(self.sized()?).ok()
    }

    pub(in crate::state) fn time(&mut self) -> Option<Duration> {
        Some(Duration::from_millis(self.int()?))
    }

    pub(super) fn maybe_time(&mut self) -> Option<Option<Duration>> {
        if self.bool()? { self.time().map(Some) } else { Some(None) }
    }

    pub(super) fn checksum(&mut self) -> Option<Option<u64>> {
        if !self.bool()? {
            return Some(None);
        }
        Some(Some(u64::from_le_bytes(self.raw(8)?.try_into().ok()?)))
    }

    pub(super) fn object(&mut self) -> Option<ObjectName<'a>> {
        Some(ObjectName { tenant: self.text()?, key: self.sized()?, version: self.int()? })
    }

    pub(super) fn terms(&mut self) -> Option<Terms> {
        let if_version = Some(self.int()?).filter(|&version| version != 0);
        Some(Terms { if_version, ttl: self.maybe_time()?, tags: self.tags()? })
    }

    pub(super) fn tags(&mut self) -> Option<Tags> {
        let count = self.int()?;
        let tags = (0..count).map(|_| Some((self.text()?, self.text()?)));
        Tags::new(tags.collect::<Option<Vec<_>>>()?).ok()
    }

    pub(super) fn copy(&mut self) -> Option<LoggedCopy> {
        Some(LoggedCopy { segment: self.number()?, offset: self.int()?, ordinal: self.ordinal()? })
    }

    pub(super) fn spec(&mut self) -> Option<SegmentSpec> {
        Some(SegmentSpec {
            id: SegmentId::from_bits(self.id()?),
            incarnation: Incarnation(self.int()?),
            name: self.text()?.to_owned(),
            endpoint: self.text()?.to_owned(),
            base: self.int()?,
            length: self.int()?,
            protocol: self.text()?.to_owned(),
        })
    }

    pub(super) fn disk_spec(&mut self) -> Option<DiskSpec> {
        Some(DiskSpec {
            id: SegmentId::from_bits(self.id()?),
            incarnation: Incarnation(self.int()?),
            name: self.text()?.to_owned(),
            address: self.text()?.to_owned(),
            capacity: self.int()?,
        })
    }

    pub(super) fn value(&mut self) -> Option<Value<'a>> {
        let (tenant, key, length) = (self.text()?, self.sized()?, self.int()?);
        let count = self.int()?;
        // A damaged count must not allocate more memory than the bytes could fill. A collected
        // iterator of options has no lower size hint.
        let copies =
            (0..count).map(|_| self.copy()).collect::<Option<SmallVec<[LoggedCopy; 1]>>>()?;
        let (data_type, is_hard_pinned, group) = (self.byte()?, self.bool()?, self.sized()?);
        let pin = match self.byte()? {
            0 => LoggedPin::Preserve,
            1 => LoggedPin::None,
            2 => LoggedPin::For(self.time()?),
            _ => return None,
        };
        Some(Value { tenant, key, length, copies, data_type, is_hard_pinned, group, pin })
    }
}
