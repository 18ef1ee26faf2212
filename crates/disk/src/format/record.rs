//! The head of a record: what it holds and the checksums of its payload.

use super::{BLOCK_BYTES, LARGE_BYTES, Name, RECORD_ALIGNMENT, round_up, take, take_slice};

const MAGIC: [u8; 4] = *b"mckR";

/// The bytes before checksums and name.
const FIXED_BYTES: usize = 48;

/// Where the parts of a record lie, counted from its first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// The multiple on which the record begins.
    pub alignment: u64,
    /// The length of the encoded head.
    pub head_bytes: u64,
    /// Where the payload begins.
    pub payload_at: u64,
    /// The length of the whole record, padding included.
    pub record_bytes: u64,
}

impl Layout {
    /// Computes the layout of a record; lengths are those of its parts.
    pub const fn new(tenant_bytes: usize, key_bytes: usize, length: u64, unit: u64) -> Self {
        let sums = length.div_ceil(BLOCK_BYTES as u64).saturating_mul(4);
        let head_bytes =
            (FIXED_BYTES as u64 + 4 + tenant_bytes as u64 + key_bytes as u64).saturating_add(sums);
        if length >= LARGE_BYTES {
            let payload_at = round_up(head_bytes, unit);
            let record_bytes = round_up(payload_at.saturating_add(length), unit);
            return Self { alignment: unit, head_bytes, payload_at, record_bytes };
        }
        let record_bytes = round_up(head_bytes + length, RECORD_ALIGNMENT);
        Self { alignment: RECORD_ALIGNMENT, head_bytes, payload_at: head_bytes, record_bytes }
    }

    /// Computes the layout of the record of this name and length.
    pub const fn of(name: Name<'_>, length: u64, unit: u64) -> Self {
        Self::new(name.tenant.len(), name.key.len(), length, unit)
    }
}

/// The head of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordHead<'a> {
    /// The mark of the use of the extent that the record was written in.
    pub mark: u64,
    /// Where the record lies in its extent; a record that was written elsewhere does not count.
    pub offset: u64,
    /// The length of the payload.
    pub length: u64,
    /// What the record is called.
    pub name: Name<'a>,
    /// The checksums of the payload, 4 bytes for each block.
    sums: &'a [u8],
}

impl<'a> RecordHead<'a> {
    /// Appends the head of a record of this payload.
    pub fn encode(name: Name<'_>, mark: u64, offset: u64, payload: &[u8], into: &mut Vec<u8>) {
        let start = into.len();
        let head_bytes = Layout::of(name, payload.len() as u64, 1).head_bytes;
        into.extend_from_slice(&MAGIC);
        into.extend_from_slice(&(head_bytes as u32).to_le_bytes());
        for number in [mark, offset, name.version, payload.len() as u64] {
            into.extend_from_slice(&number.to_le_bytes());
        }
        into.extend_from_slice(&(name.tenant.len() as u32).to_le_bytes());
        into.extend_from_slice(&(name.key.len() as u32).to_le_bytes());
        for block in payload.chunks(BLOCK_BYTES) {
            into.extend_from_slice(&crc32c::crc32c(block).to_le_bytes());
        }
        into.extend_from_slice(name.tenant.as_bytes());
        into.extend_from_slice(name.key);
        let sum = crc32c::crc32c(&into[start..]);
        into.extend_from_slice(&sum.to_le_bytes());
    }

    /// Decodes a head at the start of the bytes, or returns `None` if there is none whose checksum
    /// holds.
    pub fn decode(bytes: &'a [u8]) -> Option<Self> {
        let mut rest = bytes;
        let magic: [u8; 4] = take(&mut rest)?;
        let head_bytes = u32::from_le_bytes(take(&mut rest)?) as usize;
        if magic != MAGIC || head_bytes < FIXED_BYTES + 4 || head_bytes > bytes.len() {
            return None;
        }
        let (body, sum) = bytes[..head_bytes].split_last_chunk()?;
        if crc32c::crc32c(body) != u32::from_le_bytes(*sum) {
            return None;
        }
        let mut number = || take(&mut rest).map(u64::from_le_bytes);
        let (mark, offset, version, length) = (number()?, number()?, number()?, number()?);
        let tenant_bytes = u32::from_le_bytes(take(&mut rest)?) as usize;
        let key_bytes = u32::from_le_bytes(take(&mut rest)?) as usize;
        if Layout::new(tenant_bytes, key_bytes, length, 1).head_bytes != head_bytes as u64 {
            return None;
        }
        let sums = take_slice(&mut rest, length.div_ceil(BLOCK_BYTES as u64) as usize * 4)?;
        let tenant = std::str::from_utf8(take_slice(&mut rest, tenant_bytes)?).ok()?;
        let key = take_slice(&mut rest, key_bytes)?;
        let name = Name { tenant, key, version };
        name.is_valid().then_some(Self { mark, offset, length, name, sums })
    }

    /// Returns the length of a head from its first 8 bytes, which may be of anything.
    pub fn announced_bytes(bytes: &[u8]) -> Option<usize> {
        let mut rest = bytes;
        let magic: [u8; 4] = take(&mut rest)?;
        let head_bytes = u32::from_le_bytes(take(&mut rest)?) as usize;
        (magic == MAGIC && head_bytes >= FIXED_BYTES + 4).then_some(head_bytes)
    }

    /// Tells whether a block of the payload is what was written.
    pub fn holds(&self, block: usize, bytes: &[u8]) -> bool {
        let sum = self.sums.get(block * 4..block * 4 + 4);
        sum.is_some_and(|sum| *sum == crc32c::crc32c(bytes).to_le_bytes())
    }

    /// Tells whether a whole payload is what was written.
    pub fn holds_all(&self, payload: &[u8]) -> bool {
        payload.len() as u64 == self.length
            && payload
                .chunks(BLOCK_BYTES)
                .enumerate()
                .all(|(block, bytes)| self.holds(block, bytes))
    }

    /// Returns the layout of the record.
    pub const fn layout(&self, unit: u64) -> Layout {
        Layout::of(self.name, self.length, unit)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::format::UNIT_MIN;

    proptest! {
        #[test]
        fn heads_are_read_as_they_were_written(
            tenant in ".{0,20}",
            key in proptest::collection::vec(any::<u8>(), 1..300),
            numbers in any::<[u64; 3]>(),
            length in 0..600_000_usize,
        ) {
            let [version, mark, offset] = numbers;
            let payload: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            let name = Name { tenant: &tenant, key: &key, version };
            let mut bytes = Vec::new();
            RecordHead::encode(name, mark, offset, &payload, &mut bytes);
            let layout = Layout::of(name, length as u64, UNIT_MIN);
            prop_assert_eq!(bytes.len() as u64, layout.head_bytes);
            let head = RecordHead::decode(&bytes).expect("the head holds");
            prop_assert_eq!((head.name, head.length), (name, length as u64));
            prop_assert_eq!((head.mark, head.offset), (mark, offset));
            prop_assert!(head.holds_all(&payload));
            prop_assert!(RecordHead::decode(&bytes[..bytes.len() - 1]).is_none());
        }

        #[test]
        fn a_changed_bit_is_noticed(at in any::<prop::sample::Index>(), bit in 0..8_u8) {
            let payload = [7; 1000];
            let name = Name { tenant: "default", key: b"key", version: 3 };
            let mut bytes = Vec::new();
            RecordHead::encode(name, 1, 4096, &payload, &mut bytes);
            let head_bytes = bytes.len();
            bytes.extend_from_slice(&payload);
            bytes[at.index(head_bytes + payload.len())] ^= 1 << bit;
            let is_good = RecordHead::decode(&bytes[..head_bytes])
                .is_some_and(|head| head.holds_all(&bytes[head_bytes..]));
            prop_assert!(!is_good);
        }
    }

    #[test]
    fn large_payloads_lie_on_units_and_small_ones_are_packed() {
        let name = Name { tenant: "default", key: b"key", version: 1 };
        let large = Layout::of(name, LARGE_BYTES, UNIT_MIN);
        assert_eq!((large.alignment, large.payload_at), (UNIT_MIN, UNIT_MIN));
        assert_eq!(large.record_bytes, UNIT_MIN + LARGE_BYTES);
        let small = Layout::of(name, LARGE_BYTES - 1, UNIT_MIN);
        assert_eq!((small.alignment, small.payload_at), (8, small.head_bytes));
        assert!(small.record_bytes < small.head_bytes + LARGE_BYTES + 8);
    }
}
