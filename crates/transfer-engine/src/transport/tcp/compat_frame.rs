//! The established engine's data frames, without I/O: one range a request.
//!
//! A request is a header of 24 bytes and, to write, the bytes. In version 2 a status of 8 bytes
//! comes before the bytes of a read, and after those of a write have been applied. In version 1
//! there is no status: a refused request shows only by the connection's end.

use super::frame::{Malformed, array};
use crate::piece::{Opcode, RemoteRange};

/// Length of a request's header.
pub(super) const HEADER_BYTES: usize = 24;

/// Length of a status.
pub(super) const STATUS_BYTES: usize = 8;

const VERSION_2: u8 = 0x80;
const STATUS_MARK: u64 = 0x4D43_5456;

/// The header of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) opcode: Opcode,
    pub(super) range: RemoteRange,
    /// Version 2: whether a status is expected.
    pub(super) has_status: bool,
}

/// What became of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    Done,
    /// The address is not in a registered range.
    Refused,
}

impl Header {
    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&self.range.length.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.range.address.to_le_bytes());
        bytes[16] = match self.opcode {
            Opcode::Read => 0,
            Opcode::Write => 1,
        };
        bytes[16] |= if self.has_status { VERSION_2 } else { 0 };
        bytes
    }

    pub(super) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, Malformed> {
        let opcode = match bytes[16] & !VERSION_2 {
            0 => Opcode::Read,
            1 => Opcode::Write,
            _ => return Err(Malformed("unknown operation")),
        };
        let length = u64::from_le_bytes(array(bytes, 0));
        let address = u64::from_le_bytes(array(bytes, 8));
        let has_status = bytes[16] & VERSION_2 != 0;
        Ok(Self { opcode, range: RemoteRange { address, length }, has_status })
    }
}

impl Status {
    pub(super) fn encode(self) -> [u8; STATUS_BYTES] {
        let low = match self {
            Self::Done => 0,
            Self::Refused => 1,
        };
        ((STATUS_MARK << 32) | low).to_le_bytes()
    }

    pub(super) fn decode(bytes: [u8; STATUS_BYTES]) -> Result<Self, Malformed> {
        let word = u64::from_le_bytes(bytes);
        if word >> 32 != STATUS_MARK {
            return Err(Malformed("no status"));
        }
        // Any other number than 0 is a refusal, also one that a later version adds.
        Ok(if word as u32 == 0 { Self::Done } else { Self::Refused })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_bytes_are_the_established_ones() {
        let range = RemoteRange { address: 0x0102, length: 0x0304 };
        let header = Header { opcode: Opcode::Write, range, has_status: true };
        let mut expected = [0; HEADER_BYTES];
        (expected[0], expected[1]) = (4, 3);
        (expected[8], expected[9]) = (2, 1);
        expected[16] = 0x81;
        assert_eq!(header.encode(), expected);
        assert_eq!(Status::Done.encode(), [0, 0, 0, 0, 0x56, 0x54, 0x43, 0x4D]);
        assert_eq!(Status::decode([1, 0, 0, 0, 0x56, 0x54, 0x43, 0x4D]), Ok(Status::Refused));
        assert!(Status::decode([0; STATUS_BYTES]).is_err());
    }

    proptest! {
        #[test]
        fn what_can_be_read_is_written_the_same_again(bytes: [u8; HEADER_BYTES]) {
            if let Ok(header) = Header::decode(&bytes) {
                // All but the padding.
                prop_assert_eq!(&header.encode()[..17], &bytes[..17]);
            }
        }

        #[test]
        fn arbitrary_status_bytes_never_panic(bytes: [u8; STATUS_BYTES]) {
            let _ = Status::decode(bytes);
        }
    }
}
