//! The encoding of effects: a tag, then the fields. Integers are varints: groups of 7 bits, lowest
//! first.

use mooncake_base::ClientId;

use crate::state::ledger::effect::{DecodeError, Effect, reader::Reader, writer::Writer};

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
            each(Self::decode(&mut input).ok_or(DecodeError { at })?);
        }
        Ok(())
    }

    /// Splits encoded effects into parts of at least `part_bytes` bytes and at most one effect more,
    /// but for the last.
    pub(crate) fn split(bytes: &'a [u8], part_bytes: usize) -> Vec<&'a [u8]> {
        let (mut parts, mut start) = (Vec::new(), 0);
        let mut input = Reader::new(bytes);
        while input.at < bytes.len() && Self::decode(&mut input).is_some() {
            if input.at - start >= part_bytes {
                parts.push(&bytes[start..input.at]);
                start = input.at;
            }
        }
        parts.extend(Some(&bytes[start..]).filter(|rest| !rest.is_empty()));
        parts
    }

    /// Decodes the next effect; `None` if its bytes are damaged or of a later version.
    fn decode(input: &mut Reader<'a>) -> Option<Self> {
        Some(match input.byte()? {
            1 => Self::Mounted {
                number: input.number()?,
                client: ClientId::from_bits(input.id()?),
                spec: input.spec()?,
            },
            2 => Self::SegmentStatus {
                number: input.number()?,
                status: input.byte()?,
                grace: input.time()?,
            },
            3 => Self::SegmentDropped { number: input.number()? },
            tag @ (4 | 18 | 19) => Self::Started {
                version: input.int()?,
                client: ClientId::from_bits(input.id()?),
                value: input.value()?,
                is_replacing: input.bool()?,
                request: if tag == 4 { 0 } else { input.int()? },
                terms: if tag == 19 { Some(Box::new(input.terms()?)) } else { None },
            },
            5 => Self::Published {
                version: input.int()?,
                failed: input.sized()?,
                checksum: input.checksum()?,
                pin: input.maybe_time()?,
            },
            6 => Self::Displaced { version: input.int()? },
            7 => Self::WriteDropped { version: input.int()? },
            8 => Self::ObjectSnapshot {
                version: input.int()?,
                value: input.value()?,
                checksum: input.checksum()?,
                pin: input.maybe_time()?,
            },
            9 => Self::Dropped { object: input.object()? },
            10 => Self::ReplicaAdded { object: input.object()?, copy: input.copy()? },
            11 => Self::ReplicaDropped { object: input.object()?, ordinal: input.ordinal()? },
            12 => Self::Pinned { object: input.object()?, pin: input.maybe_time()? },
            13 => Self::Quarantined {
                number: input.number()?,
                offset: input.int()?,
                length: input.int()?,
                time: input.time()?,
            },
            14 => Self::MaxGranted { fence: input.time()?, lease: input.time()? },
            15 => Self::NextIds { version: input.int()?, number: input.number()? },
            16 => {
                let (id, is_some, record) = (input.id()?, input.bool()?, input.sized()?);
                Self::Task { id, record: is_some.then_some(record) }
            }
            17 => {
                let (tenant, is_some, bytes) = (input.text()?, input.bool()?, input.int()?);
                Self::Quota { tenant, bytes: is_some.then_some(bytes) }
            }
            21 => Self::DiskMounted {
                number: input.number()?,
                client: ClientId::from_bits(input.id()?),
                spec: input.disk_spec()?,
            },
            20 => Self::Annotated {
                object: input.object()?,
                expires: input.maybe_time()?,
                tags: input.tags()?,
            },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mooncake_base::{Incarnation, SegmentId};
    use proptest::prelude::*;
    use smallvec::SmallVec;

    use super::*;
    use crate::state::{
        ledger::effect::{LoggedCopy, LoggedPin, ObjectName, Value},
        options::Terms,
        pool::{
            disks::DiskSpec,
            segment::{SegmentNumber, SegmentSpec},
        },
        tags::Tags,
    };

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
