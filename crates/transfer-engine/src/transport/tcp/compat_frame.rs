//! The codec of upstream's data frames, without I/O: one range per request.
//!
//! A request is a header of 24 bytes, followed by the payload of a write. In version 2 a status of
//! 8 bytes precedes the payload of a read, and follows a write once its bytes were applied. Version
//! 1 has no status: the peer signals a refused request only by closing the connection.

use super::data_frame::{Malformed, array};
use crate::transfer_entry::{Opcode, RemoteRange};

/// The length of a request's header.
pub(super) const HEADER_BYTES: usize = 24;

/// The length of a status.
pub(super) const STATUS_BYTES: usize = 8;

const VERSION_2: u8 = 0x80;
const STATUS_MARK: u64 = 0x4D43_5456;

/// The header of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) opcode: Opcode,
    pub(super) range: RemoteRange,
    /// True if the client expects a status (version 2).
    pub(super) has_status: bool,
}

/// The outcome of a request.
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
        // Every number but 0 is a refusal, including those that later versions may add.
        Ok(if word as u32 == 0 { Self::Done } else { Self::Refused })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn encodes_the_bytes_of_upstream() {
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
        fn decoded_headers_encode_to_the_same_bytes(bytes: [u8; HEADER_BYTES]) {
            if let Ok(header) = Header::decode(&bytes) {
                // Everything but the padding.
                prop_assert_eq!(&header.encode()[..17], &bytes[..17]);
            }
        }

        #[test]
        fn arbitrary_status_bytes_never_panic(bytes: [u8; STATUS_BYTES]) {
            let _ = Status::decode(bytes);
        }
    }
}
