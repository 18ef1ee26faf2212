//! The codec of what begins a connection with native frames, without I/O.
//!
//! A greeting goes in each direction, by which both sides check that they reach the expected engine. A
//! server that requires a token appends a nonce to its greeting. The client answers with its own nonce
//! and a proof, and the server with a verdict and a proof ([`crate::token`]). Integers are little-endian.

use super::data_frame::{Malformed, array};
use crate::token::{NONCE_BYTES, Nonce, PROOF_BYTES, Proof};

/// The first 8 bytes of a connection that uses native frames. Read as the size field of an upstream
/// header they would exceed 2^63, so the two protocols cannot be confused.
pub(super) const MAGIC: [u8; 8] = *b"mncake1\xF7";

/// The version of the native frames.
pub(super) const VERSION: u16 = 1;

/// The length of a greeting, including the magic.
pub(super) const GREETING_BYTES: usize = 32;

/// The length of a claim.
pub(super) const CLAIM_BYTES: usize = NONCE_BYTES + PROOF_BYTES;

/// The length of a verdict.
pub(super) const VERDICT_BYTES: usize = 8 + PROOF_BYTES;

/// The first message in each direction: version and engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Greeting {
    pub(super) version: u16,
    /// From the client: the engine it wants to reach, 0 for any. From the server: its own id.
    pub(super) engine: u128,
    /// From the server: a nonce follows, and a claim is expected.
    pub(super) requires_token: bool,
}

/// The client's proof that it knows the token, sent to a server that requires one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TokenClaim {
    pub(super) nonce: Nonce,
    pub(super) proof: Proof,
}

/// The server's reply to a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Refused,
    /// The claim is valid; carries the server's own proof.
    Accepted(Proof),
}

impl Greeting {
    pub(super) fn encode(self) -> [u8; GREETING_BYTES] {
        let mut bytes = [0; GREETING_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&self.version.to_le_bytes());
        bytes[10] = u8::from(self.requires_token);
        bytes[16..].copy_from_slice(&self.engine.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; GREETING_BYTES]) -> Result<Self, Malformed> {
        if bytes[..8] != MAGIC {
            return Err(Malformed("not a greeting"));
        }
        Ok(Self {
            version: u16::from_le_bytes(array(bytes, 8)),
            engine: u128::from_le_bytes(array(bytes, 16)),
            // The other bits are reserved for later versions.
            requires_token: bytes[10] & 1 != 0,
        })
    }
}

impl TokenClaim {
    pub(super) fn encode(self) -> [u8; CLAIM_BYTES] {
        let mut bytes = [0; CLAIM_BYTES];
        bytes[..NONCE_BYTES].copy_from_slice(&self.nonce);
        bytes[NONCE_BYTES..].copy_from_slice(&self.proof);
        bytes
    }

    pub(super) fn decode(bytes: &[u8; CLAIM_BYTES]) -> Self {
        Self { nonce: array(bytes, 0), proof: array(bytes, NONCE_BYTES) }
    }
}

impl Verdict {
    pub(super) fn encode(self) -> [u8; VERDICT_BYTES] {
        let mut bytes = [0; VERDICT_BYTES];
        if let Self::Accepted(proof) = self {
            bytes[0] = 1;
            bytes[8..].copy_from_slice(&proof);
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8; VERDICT_BYTES]) -> Result<Self, Malformed> {
        match u64::from_le_bytes(array(bytes, 0)) {
            0 => Ok(Self::Refused),
            1 => Ok(Self::Accepted(array(bytes, 8))),
            _ => Err(Malformed("not a verdict on a token")),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn native_magic_is_no_plausible_upstream_size() {
        assert!(u64::from_le_bytes(MAGIC) > 1 << 63);
        for requires_token in [false, true] {
            let greeting = Greeting { version: VERSION, engine: 7 << 100, requires_token };
            assert_eq!(Greeting::decode(&greeting.encode()), Ok(greeting));
        }
        assert!(Greeting::decode(&[0; GREETING_BYTES]).is_err());
    }

    #[test]
    fn claims_and_verdicts_round_trip() {
        let claim = TokenClaim { nonce: [3; NONCE_BYTES], proof: [4; PROOF_BYTES] };
        assert_eq!(TokenClaim::decode(&claim.encode()), claim);
        for verdict in [Verdict::Refused, Verdict::Accepted([9; PROOF_BYTES])] {
            assert_eq!(Verdict::decode(&verdict.encode()), Ok(verdict));
        }
        assert!(Verdict::decode(&[2; VERDICT_BYTES]).is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 32..200)) {
            let _ = Greeting::decode(&array(&bytes, 0));
        }
    }
}
