//! A secret that the engines of a fleet share, and the mutual proof of knowing it.
//!
//! The secret itself is never sent. Each side sends a nonce of 32 random bytes and then a keyed
//! hash (HMAC-SHA256) of both nonces, the owner's engine id, the channel, and the side that speaks.
//! A proof is therefore valid for one connection, one direction and one engine. The data that
//! follows on a data connection is neither encrypted nor authenticated; a message on the handshake
//! socket is part of the hash.

use std::{fmt, sync::Arc};

use hmac::{Hmac, KeyInit, Mac};
use mooncake_base::{EngineId, Error, Result};
use sha2::Sha256;

/// Length of a nonce.
pub(crate) const NONCE_BYTES: usize = 32;

/// Length of a proof.
pub(crate) const PROOF_BYTES: usize = 32;

/// The shortest secret; a shorter one can be found by brute force.
const SECRET_BYTES_MIN: usize = 8;

/// Random bytes of one side.
pub(crate) type Nonce = [u8; NONCE_BYTES];

/// A keyed hash.
pub(crate) type Proof = [u8; PROOF_BYTES];

/// A shared secret. Its text appears neither in messages nor in logs.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(Arc<[u8]>);

/// The kind of connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Channel {
    Tcp = 1,
    Shm = 2,
    Handshake = 3,
}

/// The side that proves something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandshakeSide {
    /// The side that connects.
    Caller = 1,
    /// The side that exports memory.
    Owner = 2,
}

/// The input of the proofs of one connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Exchange {
    pub(crate) channel: Channel,
    /// The engine that exports memory; 0 if its id is not known yet.
    pub(crate) owner: u128,
    pub(crate) owner_nonce: Nonce,
    pub(crate) caller_nonce: Nonce,
}

impl Token {
    /// Creates a token from a secret, without surrounding white space.
    ///
    /// # Errors
    /// The secret has fewer than 8 bytes.
    pub fn new(secret: &str) -> Result<Self> {
        let secret = secret.trim();
        if secret.len() < SECRET_BYTES_MIN {
            return Err(
                Error::invalid("a token needs at least 8 bytes").with("bytes", secret.len())
            );
        }
        Ok(Self(secret.as_bytes().into()))
    }

    /// Returns the proof of one side.
    pub(crate) fn proof(&self, side: HandshakeSide, exchange: &Exchange) -> Proof {
        self.hash(side, exchange).finalize().into_bytes().into()
    }

    /// Verifies the proof of one side, in constant time.
    pub(crate) fn verify(&self, side: HandshakeSide, exchange: &Exchange, proof: &Proof) -> bool {
        self.hash(side, exchange).verify_slice(proof).is_ok()
    }

    /// Returns the proof of one side that also covers a message.
    pub(crate) fn seal(&self, side: HandshakeSide, exchange: &Exchange, content: &[u8]) -> Proof {
        self.hash(side, exchange).chain_update(content).finalize().into_bytes().into()
    }

    /// Verifies a proof that also covers a message, in constant time.
    pub(crate) fn verify_seal(
        &self,
        side: HandshakeSide,
        exchange: &Exchange,
        content: &[u8],
        proof: &Proof,
    ) -> bool {
        self.hash(side, exchange).chain_update(content).verify_slice(proof).is_ok()
    }

    fn hash(&self, side: HandshakeSide, exchange: &Exchange) -> Hmac<Sha256> {
        let mut hash = Hmac::<Sha256>::new_from_slice(&self.0).expect("a key has any length");
        hash.update(b"mooncake transfer 1");
        hash.update(&[side as u8, exchange.channel as u8]);
        hash.update(&exchange.owner.to_le_bytes());
        hash.update(&exchange.owner_nonce);
        hash.update(&exchange.caller_nonce);
        hash
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// Returns a fresh nonce.
pub(crate) fn nonce() -> Nonce {
    let mut nonce = [0; NONCE_BYTES];
    for half in nonce.chunks_exact_mut(16) {
        half.copy_from_slice(&EngineId::random().to_bytes());
    }
    nonce
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exchange() -> Exchange {
        Exchange { channel: Channel::Tcp, owner: 7, owner_nonce: [1; 32], caller_nonce: [2; 32] }
    }

    #[test]
    fn proof_is_bound_to_secret_side_channel_engine_and_nonces() {
        let token = Token::new("a long secret").unwrap();
        let (good, side) = (exchange(), HandshakeSide::Caller);
        let proof = token.proof(side, &good);
        assert!(token.verify(side, &good, &proof));
        assert!(!Token::new("a long secreT").unwrap().verify(side, &good, &proof));
        assert!(!token.verify(HandshakeSide::Owner, &good, &proof));
        for other in [
            Exchange { channel: Channel::Shm, ..good },
            Exchange { owner: 8, ..good },
            Exchange { owner_nonce: [3; 32], ..good },
            Exchange { caller_nonce: [3; 32], ..good },
        ] {
            assert!(!token.verify(side, &other, &proof), "{other:?}");
        }
        for index in 0..PROOF_BYTES {
            let mut bad = proof;
            bad[index] ^= 1;
            assert!(!token.verify(side, &good, &bad));
        }
    }

    #[test]
    fn hash_is_hmac_sha256_of_rfc_4231() {
        // RFC 4231, test case 2: the hash must be HMAC-SHA256 and not a relative of it.
        let mut hash = Hmac::<Sha256>::new_from_slice(b"Jefe").unwrap();
        hash.update(b"what do ya want for nothing?");
        let wanted = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        let found: String =
            hash.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(found, wanted);
    }

    #[test]
    fn short_secret_is_refused_and_no_secret_is_printed() {
        assert!(Token::new("1234567 ").is_err());
        let token = Token::new(" 12345678\n").unwrap();
        assert_eq!(token, Token::new("12345678").unwrap());
        assert!(!format!("{token:?}").contains('1'));
    }

    #[test]
    fn nonces_do_not_repeat() {
        assert_ne!(nonce(), nonce());
    }
}
