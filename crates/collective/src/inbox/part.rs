//! What a member sent: bytes, or where they are.

use crate::{peer_memory::Loan, rank_frame::Kind};

/// A part of a collective: attempt, sequence, step, source.
pub(crate) type PartKey = (u32, u64, u32, u32);

/// What a member sent.
#[derive(Debug)]
pub(crate) enum Part {
    Bytes(Vec<u8>),
    /// Memory of another process of this host.
    Lent {
        process: u32,
        loan: Loan,
    },
    /// Memory of a process of another host, which is read through a fabric.
    Remote {
        address: u64,
        length: u64,
    },
    /// Bytes that wait at their sender until they are requested.
    Offered(u64),
}

impl Part {
    /// Returns what a frame of a link to `process` brings; `None` if its payload does not fit its kind.
    pub(super) fn decode(kind: Kind, payload: Vec<u8>, process: Option<u32>) -> Option<Self> {
        match kind {
            Kind::CollectiveLoan | Kind::MessageLoan => {
                Some(Self::Lent { process: process?, loan: Loan::decode(&payload)? })
            }
            Kind::Offer => {
                payload.as_slice().try_into().ok().map(u64::from_le_bytes).map(Self::Offered)
            }
            Kind::CollectiveFetch => match payload.as_chunks() {
                ([address, length], []) => Some(Self::Remote {
                    address: u64::from_le_bytes(*address),
                    length: u64::from_le_bytes(*length),
                }),
                _ => None,
            },
            _ => Some(Self::Bytes(payload)),
        }
    }

    pub(crate) fn length(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Lent { loan, .. } => loan.length,
            Self::Remote { length, .. } | Self::Offered(length) => *length,
        }
    }
}
