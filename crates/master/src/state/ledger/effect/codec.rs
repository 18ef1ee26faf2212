//! The encoding of effects: a tag, then the fields. Integers are varints: groups of 7 bits, lowest
//! first.

use std::time::Duration;

use mooncake_base::{ClientId, Incarnation, SegmentId};
use smallvec::SmallVec;

use crate::state::{
    ledger::effect::{DecodeError, Effect, LoggedCopy, LoggedPin, ObjectName, Value},
    options::Terms,
    pool::{
        disks::DiskSpec,
        segment::{SegmentNumber, SegmentSpec},
    },
    tags::Tags,
};

impl<'a> Effect<'a> {
    /// Appends the encoded effect.
    pub fn encode(&self, into: &mut Vec<u8>) {
        let out = &mut Writer(into);
        match self {
            Self::Mounted { number, client, spec } => {
                out.tag(1).number(number.0).id(client.bits()).segment(spec);
            }
            Self::DiskMounted { number, client, spec } => {
                out.tag(21).number(number.0).id(client.bits()).disk(spec);
            }
            Self::SegmentStatus { number, status, grace } => {
                out.tag(2).number(number.0).byte(*status).time(*grace);
            }
            Self::SegmentDropped { number } => {
                out.tag(3).number(number.0);
            }
            Self::Started { version, client, value, is_replacing, request, terms } => {
                // Tags 4 and 18 are those of earlier masters, and shorter: without a request id, and
                // without terms.
                let tag = if terms.is_some() { 19 } else { [18, 4][usize::from(*request == 0)] };
                out.tag(tag).int(*version).id(client.bits()).value(value).bool(*is_replacing);
                if tag != 4 {
                    out.int(*request);
                }
                if let Some(terms) = terms {
                    out.int(terms.if_version.unwrap_or_default()).maybe_time(terms.ttl);
                    out.tags(&terms.tags);
                }
            }
            Self::Annotated { object, expires, tags } => {
                out.tag(20).object(object).maybe_time(*expires).tags(tags);
            }
            Self::Published { version, failed, checksum, pin } => {
                out.tag(5).int(*version).bytes(failed).checksum(*checksum).maybe_time(*pin);
            }
            Self::Displaced { version } => {
                out.tag(6).int(*version);
            }
            Self::WriteDropped { version } => {
                out.tag(7).int(*version);
            }
            Self::ObjectSnapshot { version, value, checksum, pin } => {
                out.tag(8).int(*version).value(value).checksum(*checksum).maybe_time(*pin);
            }
            Self::Dropped { object } => {
                out.tag(9).object(object);
            }
            Self::ReplicaAdded { object, copy } => {
                out.tag(10).object(object).copy(copy);
            }
            Self::ReplicaDropped { object, ordinal } => {
                out.tag(11).object(object).int(u64::from(*ordinal));
            }
            Self::Pinned { object, pin } => {
                out.tag(12).object(object).maybe_time(*pin);
            }
            Self::Quarantined { number, offset, length, time } => {
                out.tag(13).number(number.0).int(*offset).int(*length).time(*time);
            }
            Self::MaxGranted { fence, lease } => {
                out.tag(14).time(*fence).time(*lease);
            }
            Self::NextIds { version, number } => {
                out.tag(15).int(*version).number(number.0);
            }
            Self::Task { id, record } => {
                out.tag(16).id(*id).bool(record.is_some()).bytes(record.unwrap_or_default());
            }
            Self::Quota { tenant, bytes } => {
                out.tag(17).text(tenant).bool(bytes.is_some()).int(bytes.unwrap_or_default());
            }
        }
    }

    /// Decodes every effect in the bytes.
    ///
    /// # Errors
    /// The bytes are damaged or of a later version. Effects before the damage have been handed
    /// over.
    pub fn decode_all(bytes: &'a [u8], mut each: impl FnMut(Self)) -> Result<(), DecodeError> {
        let mut input = Reader::new(bytes);
        while input.at < bytes.len() {
            let at = input.at;
            each(input.effect().ok_or(DecodeError { at })?);
        }
        Ok(())
    }
}

impl Effect<'_> {
    /// Splits encoded effects into parts of at least `part_bytes` bytes and at most one effect more,
    /// but for the last.
    pub(crate) fn split(bytes: &[u8], part_bytes: usize) -> Vec<&[u8]> {
        let (mut parts, mut start) = (Vec::new(), 0);
        let mut input = Reader::new(bytes);
        while input.at < bytes.len() && input.effect().is_some() {
            if input.at - start >= part_bytes {
                parts.push(&bytes[start..input.at]);
                start = input.at;
            }
        }
        parts.extend(Some(&bytes[start..]).filter(|rest| !rest.is_empty()));
        parts
    }
}

/// Encodes fields.
pub(in crate::state) struct Writer<'b>(pub(in crate::state) &'b mut Vec<u8>);

impl Writer<'_> {
    fn tag(&mut self, tag: u8) -> &mut Self {
        self.byte(tag)
    }

    pub(in crate::state) fn byte(&mut self, byte: u8) -> &mut Self {
        self.0.push(byte);
        self
    }

    pub(in crate::state) fn bool(&mut self, value: bool) -> &mut Self {
        self.byte(u8::from(value))
    }

    fn number(&mut self, number: u32) -> &mut Self {
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

    fn maybe_time(&mut self, time: Option<Duration>) -> &mut Self {
        self.bool(time.is_some());
        match time {
            Some(time) => self.time(time),
            None => self,
        }
    }

    /// Fixed width: all bits are random, so that a varint would be longer.
    fn checksum(&mut self, checksum: Option<u64>) -> &mut Self {
        self.bool(checksum.is_some());
        if let Some(checksum) = checksum {
            self.0.extend_from_slice(&checksum.to_le_bytes());
        }
        self
    }

    fn object(&mut self, object: &ObjectName<'_>) -> &mut Self {
        self.text(object.tenant).bytes(object.key).int(object.version)
    }

    fn tags(&mut self, tags: &Tags) -> &mut Self {
        self.int(tags.iter().len() as u64);
        tags.iter().fold(self, |out, (name, value)| out.text(name).text(value))
    }

    fn copy(&mut self, copy: &LoggedCopy) -> &mut Self {
        self.number(copy.segment.0).int(copy.offset).int(u64::from(copy.ordinal))
    }

    fn segment(&mut self, spec: &SegmentSpec) -> &mut Self {
        self.id(spec.id.bits()).int(spec.incarnation.0).text(&spec.name).text(&spec.endpoint);
        self.int(spec.base).int(spec.length).text(&spec.protocol)
    }

    fn disk(&mut self, spec: &DiskSpec) -> &mut Self {
        self.id(spec.id.bits()).int(spec.incarnation.0).text(&spec.name).text(&spec.address);
        self.int(spec.capacity)
    }

    fn value(&mut self, value: &Value<'_>) -> &mut Self {
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

/// Decodes fields; `None` at the first invalid one.
pub(in crate::state) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(in crate::state) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    fn effect(&mut self) -> Option<Effect<'a>> {
        Some(match self.byte()? {
            1 => Effect::Mounted {
                number: self.number()?,
                client: ClientId::from_bits(self.id()?),
                spec: self.spec()?,
            },
            2 => Effect::SegmentStatus {
                number: self.number()?,
                status: self.byte()?,
                grace: self.time()?,
            },
            3 => Effect::SegmentDropped { number: self.number()? },
            tag @ (4 | 18 | 19) => Effect::Started {
                version: self.int()?,
                client: ClientId::from_bits(self.id()?),
                value: self.value()?,
                is_replacing: self.bool()?,
                request: if tag == 4 { 0 } else { self.int()? },
                terms: if tag == 19 { Some(Box::new(self.terms()?)) } else { None },
            },
            5 => Effect::Published {
                version: self.int()?,
                failed: self.sized()?,
                checksum: self.checksum()?,
                pin: self.maybe_time()?,
            },
            6 => Effect::Displaced { version: self.int()? },
            7 => Effect::WriteDropped { version: self.int()? },
            8 => Effect::ObjectSnapshot {
                version: self.int()?,
                value: self.value()?,
                checksum: self.checksum()?,
                pin: self.maybe_time()?,
            },
            9 => Effect::Dropped { object: self.object()? },
            10 => Effect::ReplicaAdded { object: self.object()?, copy: self.copy()? },
            11 => Effect::ReplicaDropped { object: self.object()?, ordinal: self.ordinal()? },
            12 => Effect::Pinned { object: self.object()?, pin: self.maybe_time()? },
            13 => Effect::Quarantined {
                number: self.number()?,
                offset: self.int()?,
                length: self.int()?,
                time: self.time()?,
            },
            14 => Effect::MaxGranted { fence: self.time()?, lease: self.time()? },
            15 => Effect::NextIds { version: self.int()?, number: self.number()? },
            16 => {
                let (id, is_some, record) = (self.id()?, self.bool()?, self.sized()?);
                Effect::Task { id, record: is_some.then_some(record) }
            }
            17 => {
                let (tenant, is_some, bytes) = (self.text()?, self.bool()?, self.int()?);
                Effect::Quota { tenant, bytes: is_some.then_some(bytes) }
            }
            21 => Effect::DiskMounted {
                number: self.number()?,
                client: ClientId::from_bits(self.id()?),
                spec: self.disk_spec()?,
            },
            20 => Effect::Annotated {
                object: self.object()?,
                expires: self.maybe_time()?,
                tags: self.tags()?,
            },
            _ => return None,
        })
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

    fn ordinal(&mut self) -> Option<u32> {
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

    fn number(&mut self) -> Option<SegmentNumber> {
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

    fn maybe_time(&mut self) -> Option<Option<Duration>> {
        if self.bool()? { self.time().map(Some) } else { Some(None) }
    }

    fn checksum(&mut self) -> Option<Option<u64>> {
        if !self.bool()? {
            return Some(None);
        }
        Some(Some(u64::from_le_bytes(self.raw(8)?.try_into().ok()?)))
    }

    fn object(&mut self) -> Option<ObjectName<'a>> {
        Some(ObjectName { tenant: self.text()?, key: self.sized()?, version: self.int()? })
    }

    fn terms(&mut self) -> Option<Terms> {
        let if_version = Some(self.int()?).filter(|&version| version != 0);
        Some(Terms { if_version, ttl: self.maybe_time()?, tags: self.tags()? })
    }

    fn tags(&mut self) -> Option<Tags> {
        let count = self.int()?;
        let tags = (0..count).map(|_| Some((self.text()?, self.text()?)));
        Tags::new(tags.collect::<Option<Vec<_>>>()?).ok()
    }

    fn copy(&mut self) -> Option<LoggedCopy> {
        Some(LoggedCopy { segment: self.number()?, offset: self.int()?, ordinal: self.ordinal()? })
    }

    fn spec(&mut self) -> Option<SegmentSpec> {
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

    fn disk_spec(&mut self) -> Option<DiskSpec> {
        Some(DiskSpec {
            id: SegmentId::from_bits(self.id()?),
            incarnation: Incarnation(self.int()?),
            name: self.text()?.to_owned(),
            address: self.text()?.to_owned(),
            capacity: self.int()?,
        })
    }

    fn value(&mut self) -> Option<Value<'a>> {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn disk() -> DiskSpec {
        DiskSpec {
            id: SegmentId::from_bits(7),
            incarnation: Incarnation(2),
            name: "host:1".to_owned(),
            address: "host:3".to_owned(),
            capacity: 1 << 40,
        }
    }

    fn each() -> Vec<Effect<'static>> {
        let copies = [
            LoggedCopy { segment: SegmentNumber(0), offset: 0, ordinal: 0 },
            LoggedCopy { segment: SegmentNumber(u32::MAX), offset: u64::MAX, ordinal: u32::MAX },
        ];
        let value = Value {
            tenant: "t",
            key: b"key",
            length: 1 << 40,
            copies: copies.iter().cloned().collect(),
            data_type: 7,
            is_hard_pinned: true,
            group: b"g",
            pin: LoggedPin::For(Duration::from_millis(300)),
        };
        let plain = Value {
            tenant: "",
            copies: SmallVec::new(),
            group: b"",
            pin: LoggedPin::None,
            ..value.clone()
        };
        let spec = SegmentSpec {
            id: SegmentId::from_bits(u128::MAX),
            incarnation: Incarnation(3),
            name: "host:1".to_owned(),
            endpoint: "host:2".to_owned(),
            base: 1 << 47,
            length: 1 << 30,
            protocol: "tcp".to_owned(),
        };
        let number = SegmentNumber(300);
        let client = ClientId::from_bits(5);
        let second = Duration::from_secs(1);
        let object = ObjectName { tenant: "", key: b"k", version: 1 << 50 };
        let tags = Tags::new([("b", "2"), ("a", "")]).unwrap();
        let terms = Terms { if_version: Some(8), ttl: Some(second), tags: tags.clone() };
        let started = |request, terms: Option<Terms>| {
            let (value, terms) = (value.clone(), terms.map(Box::new));
            Effect::Started { version: 9, client, value, is_replacing: true, request, terms }
        };
        vec![
            Effect::Mounted { number, client, spec },
            Effect::DiskMounted { number, client, spec: disk() },
            Effect::SegmentStatus { number, status: 2, grace: second },
            Effect::SegmentDropped { number },
            started(0, None),
            started(u64::MAX, None),
            started(0, Some(terms)),
            started(7, Some(Terms::default())),
            Effect::Annotated { object: object.clone(), expires: Some(second), tags },
            Effect::Annotated { object: object.clone(), expires: None, tags: Tags::default() },
            Effect::Published { version: 9, failed: &[1], checksum: Some(u64::MAX), pin: None },
            Effect::Published { version: 9, failed: &[], checksum: None, pin: Some(second) },
            Effect::Displaced { version: 9 },
            Effect::WriteDropped { version: 9 },
            Effect::ObjectSnapshot { version: 10, value, checksum: Some(1), pin: Some(second) },
            Effect::ObjectSnapshot { version: 10, value: plain, checksum: None, pin: None },
            Effect::Dropped { object: object.clone() },
            Effect::ReplicaAdded { object: object.clone(), copy: copies[1].clone() },
            Effect::ReplicaDropped { object: object.clone(), ordinal: 1 },
            Effect::Pinned { object, pin: Some(second) },
            Effect::Quarantined { number, offset: 64, length: 4096, time: second },
            Effect::MaxGranted { fence: second, lease: second * 10 },
            Effect::NextIds { version: u64::MAX, number },
            Effect::Task { id: 1, record: Some(b"task") },
            Effect::Task { id: 1, record: None },
            Effect::Quota { tenant: "t", bytes: Some(1) },
            Effect::Quota { tenant: "t", bytes: None },
        ]
    }

    #[test]
    fn effects_round_trip_and_prefixes_fail() {
        let mut all = Vec::new();
        for effect in each() {
            let mut bytes = Vec::new();
            effect.encode(&mut bytes);
            all.extend_from_slice(&bytes);
            for length in 1..bytes.len() {
                assert!(Effect::decode_all(&bytes[..length], |_| ()).is_err(), "{effect:?}");
            }
        }
        let mut read = Vec::new();
        Effect::decode_all(&all, |effect| read.push(effect)).unwrap();
        assert_eq!(read, each());
    }

    #[test]
    fn reads_put_of_earlier_log_without_request() {
        // As a master wrote it that did not log request ids.
        let mut bytes = vec![4, 9];
        bytes.extend_from_slice(&5_u128.to_le_bytes());
        bytes.extend_from_slice(b"\x00\x01k\x40\x01\x02\x07\x00\x03\x00\x00\x00\x01");
        let mut read = Vec::new();
        Effect::decode_all(&bytes, |effect| read.push(effect)).unwrap();
        let copies = [LoggedCopy { segment: SegmentNumber(2), offset: 7, ordinal: 0 }];
        let value = Value {
            tenant: "",
            key: b"k",
            length: 64,
            copies: copies.into_iter().collect(),
            data_type: 3,
            is_hard_pinned: false,
            group: b"",
            pin: LoggedPin::Preserve,
        };
        let client = ClientId::from_bits(5);
        let (request, terms) = (0, None);
        let expected =
            Effect::Started { version: 9, client, value, is_replacing: true, request, terms };
        assert_eq!(read, [expected]);
        let mut written = Vec::new();
        read[0].encode(&mut written);
        assert_eq!(written, bytes);
    }

    proptest! {
        #[test]
        fn decoding_arbitrary_bytes_terminates(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
        ) {
            let _ = Effect::decode_all(&bytes, |_| ());
        }
    }
}
