//! Messages between a process that reads records of a disk and the process that owns the directory.
//!
//! A connection begins with the reader's greeting. The owner answers with a
//! [`ServerGreeting`](crate::native_frame::ServerGreeting); both then prove the token of the pool if
//! there is one, by [`native_token`](crate::native_token) with the secret of [`token`]. After that the
//! reader sends [`RecordCall`]s and the owner answers each with a [`RecordAnswer`], in frames of
//! [`native_frame`](crate::native_frame) and in the order of the calls.
//!
//! A reader has the owner load records into memory that is registered with the owner's engine, reads
//! that memory with its own engine, and gives it back. The bytes count only if the answer to that
//! says that the memory was still held for the reader.

use mooncake_base::{Error, ErrorCode, Result, Token, token::hex};
use prost::Message;

use crate::{columns::Column, v1};

/// The first bytes of a connection.
pub const MAGIC: [u8; 8] = *b"MOONDISK";

/// The version of these messages, for changes that protobuf's rules do not cover.
pub const VERSION: u32 = 1;

/// The largest frame of a call.
pub const CALL_BYTES_MAX: usize = 1 << 20;

/// The largest frame of an answer.
pub const ANSWER_BYTES_MAX: usize = 1 << 18;

/// The maximum number of records of a call.
pub const RECORDS_MAX: usize = 4096;

/// Returns a reader's greeting: [`MAGIC`], then [`VERSION`] in four bytes, little-endian.
pub fn reader_greeting() -> [u8; 12] {
    let mut greeting = [0; 12];
    greeting[..8].copy_from_slice(&MAGIC);
    greeting[8..].copy_from_slice(&VERSION.to_le_bytes());
    greeting
}

/// Checks a reader's greeting.
///
/// # Errors
/// If the peer does not read records, or has another version.
pub fn check_reader_greeting(greeting: &[u8; 12]) -> Result<()> {
    if greeting[..8] != MAGIC {
        return Err(Error::new(ErrorCode::RPC_FAIL, "the peer does not read records of disks"));
    }
    let version = u32::from_le_bytes([greeting[8], greeting[9], greeting[10], greeting[11]]);
    if version == VERSION {
        return Ok(());
    }
    let why = "the reader of a disk speaks another version of the protocol; install one version on \
               all hosts";
    Err(Error::new(ErrorCode::INVALID_VERSION, why)
        .with("reader_version", version)
        .with("our_version", VERSION))
}

/// Returns the secret by which readers and owners know each other. It follows from the token of the
/// master, and no proof of one of them is a proof of the other.
pub fn token(of_master: &Token) -> Token {
    let proof = of_master.proof(&[b"mooncake records 1"]);
    Token::new(&hex(&proof)).expect("the text of a proof is long enough")
}

/// One call; exactly one of the fields is set.
#[derive(Clone, PartialEq, Message)]
pub struct RecordCall {
    /// Loads records into memory of the owner.
    #[prost(message, optional, tag = "1")]
    pub load: Option<LoadRecords>,
    /// Gives memory back.
    #[prost(message, optional, tag = "2")]
    pub release: Option<ReleaseRecords>,
}

/// Loads ranges of records into memory of the owner, for this connection.
#[derive(Clone, PartialEq, Message)]
pub struct LoadRecords {
    /// The id of the directory, 16 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub disk: Vec<u8>,
    /// The records. The lengths are those of the ranges.
    #[prost(message, optional, tag = "2")]
    pub records: Option<v1::RecordColumns>,
    /// Where the ranges begin within the records; may be one value for all.
    #[prost(fixed64, repeated, tag = "3")]
    pub offsets: Vec<u64>,
    /// How long the owner may wait until it has memory.
    #[prost(uint64, tag = "4")]
    pub wait_ms: u64,
}

/// Gives the memory of a load back.
#[derive(Clone, PartialEq, Message)]
pub struct ReleaseRecords {
    /// The number in the answer to the load.
    #[prost(uint64, tag = "1")]
    pub lease: u64,
}

/// The answer to a call; exactly one of the fields is set.
#[derive(Clone, PartialEq, Message)]
pub struct RecordAnswer {
    /// The answer to a load.
    #[prost(message, optional, tag = "1")]
    pub loaded: Option<RecordsLoaded>,
    /// The answer to a release.
    #[prost(message, optional, tag = "2")]
    pub released: Option<RecordsReleased>,
    /// The call has failed.
    #[prost(message, optional, tag = "3")]
    pub failure: Option<v1::Failure>,
}

/// Where the ranges lie.
#[derive(Clone, PartialEq, Message)]
pub struct RecordsLoaded {
    /// The number of the memory, for its release; 0 if no record was loaded.
    #[prost(uint64, tag = "1")]
    pub lease: u64,
    /// The name under which a transfer engine opens the owner.
    #[prost(string, tag = "2")]
    pub endpoint: String,
    /// What became of each record, as [`Loaded`].
    #[prost(enumeration = "Loaded", repeated, tag = "3")]
    pub outcomes: Vec<i32>,
    /// The address of each range in the owner's process; 0 where there is none.
    #[prost(fixed64, repeated, tag = "4")]
    pub addresses: Vec<u64>,
    /// The id of the memory, 16 bytes, by which a reader recognizes the engine; empty if no record was
    /// loaded.
    #[prost(bytes = "vec", tag = "5")]
    pub segment: Vec<u8>,
}

/// Whether the memory was still held.
#[derive(Clone, PartialEq, Message)]
pub struct RecordsReleased {
    /// Whether the memory was held for this connection until now.
    #[prost(bool, tag = "1")]
    pub was_held: bool,
}

/// What became of a record of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum Loaded {
    /// Its bytes are in the memory, and its checksums hold.
    Good = 0,
    /// The owner does not have it.
    Missing = 1,
    /// It was damaged; the owner has dropped it.
    Damaged = 2,
    /// The system could not read it, or the range is not inside of it.
    Failed = 3,
    /// There was no memory for it: ask for it again.
    Later = 4,
}

/// A range of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted<'a> {
    /// The tenant.
    pub tenant: &'a str,
    /// The key.
    pub key: &'a [u8],
    /// The version.
    pub version: u64,
    /// Where the range begins.
    pub offset: u64,
    /// The length of the range.
    pub length: u64,
}

impl LoadRecords {
    /// Returns the ranges that the call names.
    ///
    /// # Errors
    /// If the columns are inconsistent, there are too many records or none, or a range is empty or
    /// has no end.
    pub fn read(&self) -> Result<Vec<Wanted<'_>>> {
        let records = crate::columns::require(self.records.as_ref())?.read()?;
        let count = records.len();
        if !(1..=RECORDS_MAX).contains(&count) {
            return Err(Error::invalid("a call loads no record, or too many")
                .with("records", count)
                .with("limit", RECORDS_MAX));
        }
        let offsets = Column::each_or_uniform(&self.offsets, count)?;
        let mut wanted = Vec::with_capacity(count);
        for (at, record) in records.enumerate() {
            let (offset, length) = (*offsets.at(at), record.length);
            if length == 0 || offset.checked_add(length).is_none() {
                return Err(Error::invalid("a range of a record is empty or has no end")
                    .with("offset", offset)
                    .with("length", length));
            }
            let crate::columns::Record { tenant, key, version, .. } = record;
            wanted.push(Wanted { tenant, key, version, offset, length });
        }
        Ok(wanted)
    }
}

impl RecordsLoaded {
    /// Returns what became of each record, with its address, for so many records.
    ///
    /// # Errors
    /// If the answer has another number of records, or one with an outcome that is not known.
    pub fn read(&self, count: usize) -> Result<Vec<(Loaded, u64)>> {
        let mismatch = || {
            Error::new(ErrorCode::RPC_FAIL, "the answer of the owner of a disk is inconsistent")
                .with("records", count)
        };
        if self.outcomes.len() != count || self.addresses.len() != count {
            return Err(mismatch());
        }
        let outcome = |(&outcome, &address): (&i32, &u64)| {
            Loaded::try_from(outcome).map(|outcome| (outcome, address)).map_err(|_| mismatch())
        };
        self.outcomes.iter().zip(&self.addresses).map(outcome).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::columns::Record;

    fn load(lengths: &[u64], offsets: &[u64]) -> LoadRecords {
        let records =
            lengths.iter().map(|&length| Record { tenant: "t", key: b"key", version: 7, length });
        LoadRecords {
            disk: vec![1; 16],
            records: Some(v1::RecordColumns::pack(records)),
            offsets: offsets.to_vec(),
            wait_ms: 0,
        }
    }

    #[test]
    fn load_names_ranges_that_have_an_end() {
        let call = load(&[4, 5], &[0, 8]);
        let wanted = call.read().unwrap();
        assert_eq!((wanted[1].offset, wanted[1].length, wanted[1].key), (8, 5, &b"key"[..]));
        assert!(load(&[4, 5], &[3]).read().is_ok(), "one offset for all");
        for (lengths, offsets) in [
            (&[][..], &[][..]),
            (&[0, 1], &[0, 0]),
            (&[1, 2], &[0, 0, 0]),
            (&[2, 1], &[0, u64::MAX]),
        ] {
            assert!(load(lengths, offsets).read().is_err(), "{lengths:?} {offsets:?}");
        }
        assert!(load(&vec![1; RECORDS_MAX + 1], &[0]).read().is_err());
        assert!(LoadRecords::default().read().is_err());
    }

    #[test]
    fn answer_with_another_number_of_records_is_refused() {
        let answer = RecordsLoaded {
            lease: 1,
            endpoint: "host:1".to_owned(),
            outcomes: vec![Loaded::Good as i32, Loaded::Later as i32],
            addresses: vec![4096, 0],
            segment: Vec::new(),
        };
        assert_eq!(answer.read(2).unwrap(), [(Loaded::Good, 4096), (Loaded::Later, 0)]);
        assert!(answer.read(1).is_err());
        assert!(RecordsLoaded { addresses: vec![1], ..answer.clone() }.read(2).is_err());
        assert!(RecordsLoaded { outcomes: vec![0, 99], ..answer }.read(2).is_err());
    }

    #[test]
    fn greeting_of_another_protocol_or_version_is_refused() {
        assert!(check_reader_greeting(&reader_greeting()).is_ok());
        assert!(check_reader_greeting(&crate::native_frame::client_greeting()).is_err());
        let mut newer = reader_greeting();
        newer[8] += 1;
        let error = check_reader_greeting(&newer).unwrap_err();
        assert_eq!(error.code(), ErrorCode::INVALID_VERSION);
    }

    #[test]
    fn secret_of_records_is_not_that_of_the_master() {
        let master = Token::new("open sesame").unwrap();
        assert_ne!(token(&master), master);
        assert_eq!(token(&master), token(&Token::new("open sesame").unwrap()));
    }
}
