//! The list of the records of a sealed extent, and the trailer that says where it lies.

use super::{Name, take, take_slice};

const MAGIC: [u8; 8] = *b"mckINDEX";

/// The bytes of an entry before tenant and key.
const FIXED_BYTES: usize = 28;

/// A record in the index of its extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Where the record lies in the extent.
    pub offset: u64,
    /// The length of its payload.
    pub length: u64,
    /// What it is called.
    pub name: Name<'a>,
}

impl Entry<'_> {
    /// Appends the entry.
    pub fn encode(&self, into: &mut Vec<u8>) {
        into.extend_from_slice(&(self.offset as u32).to_le_bytes());
        into.extend_from_slice(&self.length.to_le_bytes());
        into.extend_from_slice(&self.name.version.to_le_bytes());
        into.extend_from_slice(&(self.name.tenant.len() as u32).to_le_bytes());
        into.extend_from_slice(&(self.name.key.len() as u32).to_le_bytes());
        into.extend_from_slice(self.name.tenant.as_bytes());
        into.extend_from_slice(self.name.key);
    }

    /// Returns the length of the encoded entry of a name.
    pub const fn bytes_of(name: Name<'_>) -> u64 {
        Self::bytes_of_lengths(name.tenant.len(), name.key.len())
    }

    /// Returns the length of the encoded entry of a tenant and a key of these lengths.
    pub const fn bytes_of_lengths(tenant_bytes: usize, key_bytes: usize) -> u64 {
        (FIXED_BYTES + tenant_bytes + key_bytes) as u64
    }
}

/// Returns the entries of an index; the last is `None` if the bytes are not whole entries.
pub fn entries(mut bytes: &[u8]) -> impl Iterator<Item = Option<Entry<'_>>> {
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let entry = entry(&mut bytes);
        if entry.is_none() {
            bytes = &[];
        }
        Some(entry)
    })
}

fn entry<'a>(rest: &mut &'a [u8]) -> Option<Entry<'a>> {
    let offset = u64::from(u32::from_le_bytes(take(rest)?));
    let length = u64::from_le_bytes(take(rest)?);
    let version = u64::from_le_bytes(take(rest)?);
    let tenant_bytes = u32::from_le_bytes(take(rest)?) as usize;
    let key_bytes = u32::from_le_bytes(take(rest)?) as usize;
    let tenant = std::str::from_utf8(take_slice(rest, tenant_bytes)?).ok()?;
    let key = take_slice(rest, key_bytes)?;
    let name = Name { tenant, key, version };
    name.is_valid().then_some(Entry { offset, length, name })
}

/// The last unit of a sealed extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trailer {
    /// The mark of the use of the extent.
    pub mark: u64,
    /// Where the index begins.
    pub index_at: u64,
    /// The length of the index.
    pub index_bytes: u64,
    /// The checksum of the index.
    pub index_sum: u32,
}

impl Trailer {
    /// The length of the encoded trailer.
    pub const BYTES: usize = 40;

    /// Encodes the trailer.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..16].copy_from_slice(&self.mark.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.index_at.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.index_bytes.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.index_sum.to_le_bytes());
        let sum = crc32c::crc32c(&bytes[..36]);
        bytes[36..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Decodes the trailer, or returns `None` for other bytes.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.get(..Self::BYTES)?;
        let mut rest = bytes;
        let is_ours = take::<8>(&mut rest)? == MAGIC;
        let mut number = || take(&mut rest).map(u64::from_le_bytes);
        let (mark, index_at, index_bytes) = (number()?, number()?, number()?);
        let index_sum = u32::from_le_bytes(take(&mut rest)?);
        let sum = u32::from_le_bytes(take(&mut rest)?);
        (is_ours && sum == crc32c::crc32c(&bytes[..36])).then_some(Self {
            mark,
            index_at,
            index_bytes,
            index_sum,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_and_trailers_are_read_as_they_were_written() {
        let written = [(4096, 10, "a", &b"key"[..], 1), (8192, 1 << 20, "", b"\xff\0", u64::MAX)]
            .map(|(offset, length, tenant, key, version)| Entry {
                offset,
                length,
                name: Name { tenant, key, version },
            });
        let mut bytes = Vec::new();
        written.iter().for_each(|entry| entry.encode(&mut bytes));
        let total: u64 = written.iter().map(|entry| Entry::bytes_of(entry.name)).sum();
        assert_eq!(bytes.len() as u64, total);
        assert_eq!(entries(&bytes).collect::<Option<Vec<_>>>(), Some(written.to_vec()));
        assert_eq!(entries(&bytes[..bytes.len() - 1]).last(), Some(None));

        let trailer = Trailer { mark: 7, index_at: 4096, index_bytes: 55, index_sum: 3 };
        let mut bytes = trailer.encode();
        assert_eq!(Trailer::decode(&bytes), Some(trailer));
        bytes[20] ^= 1;
        assert_eq!(Trailer::decode(&bytes), None);
    }
}
