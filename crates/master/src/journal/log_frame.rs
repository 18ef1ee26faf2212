//! The file format of the log: a header, then frames, each with its length, a checksum and its
//! number.

use mooncake_base::{Error, ErrorCode, Result};

use super::LogSync;

/// The first bytes of every file.
const MAGIC: [u8; 8] = *b"MOONLOG\n";
/// The format version, raised when an older master cannot read newer files. A file of each version
/// that is read is among the test data. Version 1 was never released and is not read.
pub(super) const VERSION: u32 = 2;
/// Bytes of a header: magic, version, kind, sync, two spare, timeline id, number, boot, checksum.
pub(super) const HEADER_BYTES: usize = 8 + 4 + 4 + 16 + 8 + 16 + 4;
/// Bytes before the payload of a frame: length, checksum, number, synced frames.
pub(super) const FRAME_BYTES: usize = 4 + 4 + 8 + 8;
/// The maximum length of a payload that is read.
pub(super) const PAYLOAD_MAX: usize = 1 << 30;
/// A payload that reaches this length is ended at the end of a record.
pub(super) const PAYLOAD_TARGET: usize = 4 << 20;

/// The kind of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Effects in the order in which they happened.
    Log,
    /// The whole state at the moment when the log of the same number began.
    Snapshot,
}

/// What a crash of the machine can take from a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Synced {
    /// Changes since the last sync. Memory that was released is not reused before that is on disk.
    AtInterval,
    /// Nothing acknowledged.
    Always,
    /// Anything, and memory may have been reused since: the file is of no use then.
    Never,
}

impl From<LogSync> for Synced {
    fn from(sync: LogSync) -> Self {
        match sync {
            LogSync::Always => Self::Always,
            LogSync::Interval(_) => Self::AtInterval,
            LogSync::Never => Self::Never,
        }
    }
}

/// The header of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: Kind,
    pub(super) synced: Synced,
    /// The timeline that the file belongs to.
    pub(super) timeline_id: [u8; 16],
    /// The number of the file within the timeline.
    pub(super) number: u64,
    /// The boot of the machine that wrote the file.
    pub(super) boot: [u8; 16],
}

impl Header {
    /// Returns a header of the present format.
    pub(super) fn new(kind: Kind, synced: Synced, number: u64) -> Self {
        Self { kind, synced, timeline_id: [0; 16], number, boot: [0; 16] }
    }

    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend([self.kind as u8, self.synced as u8, 0, 0]);
        bytes.extend(self.timeline_id);
        bytes.extend(self.number.to_le_bytes());
        bytes.extend(self.boot);
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        bytes.try_into().expect("the fields are as long as the header")
    }

    /// Decodes a header. Returns `None` if the header is incomplete, as after a crash during the
    /// first write.
    ///
    /// # Errors
    /// The file is not a file of the log, or has another format version.
    pub(super) fn decode(bytes: &[u8]) -> Result<Option<Self>> {
        let Some(bytes) = bytes.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let mut input = &bytes[..];
        let mut take = |length: usize| {
            let (taken, rest) = input.split_at(length);
            input = rest;
            taken
        };
        let (magic, version, kind) = (take(8), number_of(take(4)), take(4));
        let (timeline_id, number, boot) =
            (array_of(take(16)), number_of(take(8)), array_of(take(16)));
        if magic != MAGIC {
            // File systems leave zeros in a file whose pages never reached the disk.
            return if bytes.iter().all(|byte| *byte == 0) {
                Ok(None)
            } else {
                Err(foreign_error())
            };
        }
        if version != u64::from(VERSION) {
            let why = "the log was written by a master with another format: start that version, or \
                       set the log aside, which forgets all objects";
            return Err(Error::new(ErrorCode::PERSISTENT_FAIL, why)
                .with("file_version", version)
                .with("our_version", VERSION));
        }
        if number_of(take(4)) != u64::from(crc32fast::hash(&bytes[..HEADER_BYTES - 4])) {
            return Ok(None);
        }
        let synced = match kind[1] {
            0 => Synced::AtInterval,
            1 => Synced::Always,
            2 => Synced::Never,
            _ => return Err(foreign_error()),
        };
        let kind = match kind[0] {
            0 => Kind::Log,
            1 => Kind::Snapshot,
            _ => return Err(foreign_error()),
        };
        Ok(Some(Self { kind, synced, timeline_id, number, boot }))
    }
}

/// Fills in the head of a frame, for which space was reserved before the payload.
pub(super) fn seal(frame: &mut [u8], number: u64, synced: u64) {
    let length = u32::try_from(frame.len() - FRAME_BYTES).expect("a frame has a limit below");
    frame[8..16].copy_from_slice(&number.to_le_bytes());
    frame[16..24].copy_from_slice(&synced.to_le_bytes());
    let checksum = crc32fast::hash(&frame[8..]);
    frame[..4].copy_from_slice(&length.to_le_bytes());
    frame[4..8].copy_from_slice(&checksum.to_le_bytes());
}

/// Returns the size of the frame at the start of `bytes` as its head says; `None` if there is no head
/// of a valid frame.
pub(super) fn frame_bytes(bytes: &[u8]) -> Option<usize> {
    let head = bytes.first_chunk::<FRAME_BYTES>()?;
    let length = number_of(&head[..4]) as usize;
    (length <= PAYLOAD_MAX).then_some(FRAME_BYTES + length)
}

/// A complete frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Frame<'a> {
    pub(super) number: u64,
    /// All frames with a lower number than this, of all files, were on disk before this frame was
    /// written.
    pub(super) synced: u64,
    pub(super) payload: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Decodes the frame at the start of `bytes`, if there is a valid one.
    pub(super) fn read(bytes: &'a [u8]) -> Option<Self> {
        let head = bytes.first_chunk::<FRAME_BYTES>()?;
        let length = number_of(&head[..4]) as usize;
        if length > PAYLOAD_MAX {
            return None;
        }
        let whole = bytes.get(..FRAME_BYTES + length)?;
        let is_sound = number_of(&head[4..8]) == u64::from(crc32fast::hash(&whole[8..]));
        is_sound.then(|| Self {
            number: number_of(&head[8..16]),
            synced: number_of(&head[16..24]),
            payload: &whole[FRAME_BYTES..],
        })
    }

    /// Returns the encoded size of the frame.
    pub(super) fn bytes(&self) -> usize {
        FRAME_BYTES + self.payload.len()
    }

    /// Finds the first valid frame at any offset whose number is `at_least` or slightly higher.
    /// Returns the bytes behind it, too.
    pub(super) fn find(bytes: &'a [u8], at_least: u64) -> Option<(Self, &'a [u8])> {
        let plausible = at_least..at_least.saturating_add(1 << 32);
        (0..bytes.len().saturating_sub(FRAME_BYTES - 1)).find_map(|at| {
            // The number is checked first, because a checksum per byte would take too long.
            let number = number_of(&bytes[at + 8..at + 16]);
            if !plausible.contains(&number) {
                return None;
            }
            let frame = Self::read(&bytes[at..])?;
            Some((frame, &bytes[at + frame.bytes()..]))
        })
    }
}

fn foreign_error() -> Error {
    Error::new(ErrorCode::PERSISTENT_FAIL, "the file is not a log of a master")
}

fn number_of(bytes: &[u8]) -> u64 {
    let mut number = [0; 8];
    number[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(number)
}

fn array_of(bytes: &[u8]) -> [u8; 16] {
    bytes.try_into().expect("sixteen bytes were taken")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HEADER: Header = Header {
        kind: Kind::Snapshot,
        synced: Synced::Always,
        timeline_id: [7; 16],
        number: 3,
        boot: [9; 16],
    };

    fn frame(number: u64, payload: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; FRAME_BYTES];
        bytes.extend(payload);
        seal(&mut bytes, number, 11);
        bytes
    }

    #[test]
    fn header_round_trips_and_detects_damage() {
        let bytes = HEADER.encode();
        assert_eq!(Header::decode(&bytes).unwrap(), Some(HEADER));
        assert_eq!(Header::decode(&bytes[..HEADER_BYTES - 1]).unwrap(), None);
        assert_eq!(Header::decode(&[0; HEADER_BYTES]).unwrap(), None);
        for at in 12..HEADER_BYTES {
            let mut damaged = bytes;
            damaged[at] ^= 1;
            assert_eq!(Header::decode(&damaged).unwrap(), None, "at={at}");
        }
        for at in 0..12 {
            let mut foreign = bytes;
            foreign[at] ^= 1;
            Header::decode(&foreign).unwrap_err();
        }
    }

    #[test]
    fn frame_is_read_whole_or_not_at_all() {
        let bytes = frame(5, b"payload");
        let read = Frame::read(&bytes).unwrap();
        assert_eq!((read.number, read.synced, read.payload), (5, 11, &b"payload"[..]));
        for length in 0..bytes.len() {
            assert_eq!(Frame::read(&bytes[..length]), None);
        }
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x10;
            assert_eq!(Frame::read(&damaged), None, "at={at}");
        }
    }

    proptest! {
        #[test]
        fn finds_frame_behind_garbage(rubbish in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut bytes = rubbish;
            bytes.extend(frame(8, b"x"));
            prop_assert_eq!(Frame::find(&bytes, 7).unwrap().0.number, 8);
            prop_assert!(Frame::find(&bytes, 9).is_none());
        }
    }
}
