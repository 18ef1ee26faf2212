//! The bytes on disk. Encodes and decodes, without I/O; no input makes a decoder panic.
//!
//! All numbers are little-endian. A *unit* is the alignment of the directory, 4096 bytes or more.
//!
//! | Extent | Content |
//! |---|---|
//! | first unit | [`ExtentHead`] |
//! | then | records, each on a multiple of 8 bytes |
//! | after the records, on a unit, if sealed | the [`index`] of the records |
//! | last unit, if sealed | the [`index::Trailer`], which says where the index lies |
//!
//! A record below [`LARGE_BYTES`] is its head and then its payload. The head of a larger one has
//! units of its own, and its payload begins on a unit, so that one vectored read brings the payload
//! to its place.

pub mod identity;
pub mod index;
mod record;

pub use record::{Layout, RecordHead};

/// The version of this format. A directory with a larger one is refused.
pub const VERSION: u32 = 1;

/// From this size on a payload begins on a unit.
pub const LARGE_BYTES: u64 = 64 * 1024;

/// The payload bytes that one checksum covers.
pub const BLOCK_BYTES: usize = 256 * 1024;

/// Records begin on multiples of this.
pub const RECORD_ALIGNMENT: u64 = 8;

/// The smallest unit, and the unit of file systems that report none.
pub const UNIT_MIN: u64 = 4096;

/// The largest unit.
pub const UNIT_MAX: u64 = 64 * 1024;

/// The maximum length of the name of a tenant.
pub const TENANT_BYTES_MAX: usize = u16::MAX as usize;

const EXTENT_MAGIC: [u8; 8] = *b"mckEXTNT";

/// What a record is called: it is looked up, and compared when it is read, by all three.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name<'a> {
    /// The tenant.
    pub tenant: &'a str,
    /// The key within the tenant.
    pub key: &'a [u8],
    /// The version of the object.
    pub version: u64,
}

impl Name<'_> {
    /// Returns a copy that owns its parts.
    pub fn to_owned(&self) -> OwnedName {
        OwnedName { tenant: self.tenant.into(), key: self.key.into(), version: self.version }
    }

    /// Tells whether the parts are of lengths that a record can hold.
    pub fn is_valid(&self) -> bool {
        self.tenant.len() <= TENANT_BYTES_MAX
            && (1..=mooncake_base::key::KEY_BYTES_MAX).contains(&self.key.len())
    }
}

/// A [`Name`] that owns its parts.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OwnedName {
    /// The tenant.
    pub tenant: Box<str>,
    /// The key within the tenant.
    pub key: Box<[u8]>,
    /// The version of the object.
    pub version: u64,
}

impl OwnedName {
    /// Borrows the name.
    pub fn borrow(&self) -> Name<'_> {
        Name { tenant: &self.tenant, key: &self.key, version: self.version }
    }
}

/// The first bytes of an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExtentHead {
    /// The id of the directory.
    pub directory: [u8; 16],
    /// Counts the uses of all extents, from 1.
    pub generation: u64,
    /// A random number of this use, which its records repeat. Records of an earlier use do not
    /// count, nor do payloads that look like a record: who stores them does not know the mark.
    pub mark: u64,
}

impl ExtentHead {
    /// The length of the encoded head.
    pub const BYTES: usize = 48;

    /// Encodes the head.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&EXTENT_MAGIC);
        bytes[8..24].copy_from_slice(&self.directory);
        bytes[24..32].copy_from_slice(&self.generation.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.mark.to_le_bytes());
        bytes[40..44].copy_from_slice(&VERSION.to_le_bytes());
        let sum = crc32c::crc32c(&bytes[..44]);
        bytes[44..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Decodes the head, or returns `None` for other bytes.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.get(..Self::BYTES)?;
        let mut rest = bytes;
        let is_ours = take::<8>(&mut rest)? == EXTENT_MAGIC;
        let directory = take(&mut rest)?;
        let generation = u64::from_le_bytes(take(&mut rest)?);
        let mark = u64::from_le_bytes(take(&mut rest)?);
        let version = u32::from_le_bytes(take(&mut rest)?);
        let sum = u32::from_le_bytes(take(&mut rest)?);
        (is_ours && version == VERSION && sum == crc32c::crc32c(&bytes[..44])).then_some(Self {
            directory,
            generation,
            mark,
        })
    }
}

/// Rounds up to a multiple; saturates.
pub const fn round_up(bytes: u64, multiple: u64) -> u64 {
    match bytes.checked_next_multiple_of(multiple) {
        Some(rounded) => rounded,
        None => u64::MAX,
    }
}

/// Takes the first bytes off a slice.
fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (first, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(*first)
}

/// Takes a number of bytes off a slice.
fn take_slice<'a>(rest: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (first, after) = rest.split_at_checked(length)?;
    *rest = after;
    Some(first)
}
