//! A secret that the engines of a fleet share, and how one proves to another that it knows it.
//!
//! The secret itself is never sent. Each side sends 32 random bytes and then a keyed hash
//! (HMAC-SHA256) of both, of who is meant, over which way, and of which of the two speaks: a proof
//! is good for one connection, one direction and one engine. What follows on a data connection is
//! neither encrypted nor sealed; a message on the handshake socket is hashed with the rest.

use std::{fmt, sync::Arc};

use hmac::{Hmac, KeyInit, Mac};
use mooncake_base::{EngineId, Error, Result};
use sha2::Sha256;

/// Length of the random bytes of each side.
pub(crate) const NONCE_BYTES: usize = 32;

/// Length of a proof.
pub(crate) const PROOF_BYTES: usize = 32;

/// The shortest secret; a shorter one is found by trying.
const SECRET_BYTES_MIN: usize = 8;

/// Random bytes of one side.
pub(crate) type Nonce = [u8; NONCE_BYTES];

/// A keyed hash.
pub(crate) type Proof = [u8; PROOF_BYTES];

/// A shared secret. Its text is shown to nobody, in messages and logs neither.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(Arc<[u8]>);

/// Which way a connection is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Channel {
    Tcp = 1,
    Shm = 2,
    Handshake = 3,
}

/// Who proves something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandshakeSide {
    /// The one that connects.
    Caller = 1,
    /// The one that lends its memory.
    Owner = 2,
}

/// What one connection's proofs are about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Exchange {
    pub(crate) channel: Channel,
    /// The engine that lends its memory; nobody in particular if it has no name.
    pub(crate) owner: u128,
    pub(crate) owner_nonce: Nonce,
    pub(crate) caller_nonce: Nonce,
}

impl Token {
    /// A secret, without white space around it.
    ///
    /// # Errors
    /// It has fewer than 8 bytes.
    pub fn new(secret: &str) -> Result<Self> {
        let secret = secret.trim();
        if secret.len() < SECRET_BYTES_MIN {
            return Err(Error::invalid("a token has at least 8 bytes").with("bytes", secret.len()));
        }
        Ok(Self(secret.as_bytes().into()))
    }

    /// The proof of one side.
    pub(crate) fn proof(&self, side: HandshakeSide, exchange: &Exchange) -> Proof {
        self.hash(side, exchange).finalize().into_bytes().into()
    }

    /// Whether that is the proof of one side. Takes as long for a wrong one.
    pub(crate) fn verify(&self, side: HandshakeSide, exchange: &Exchange, proof: &Proof) -> bool {
        self.hash(side, exchange).verify_slice(proof).is_ok()
    }

    /// The proof of one side for what it says.
    pub(crate) fn seal(&self, side: HandshakeSide, exchange: &Exchange, content: &[u8]) -> Proof {
        self.hash(side, exchange).chain_update(content).finalize().into_bytes().into()
    }

    /// Whether that is the proof of one side for what it says. Takes as long for a wrong one.
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

/// Random bytes for one side.
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
    fn a_proof_holds_for_its_secret_side_door_engine_and_connection_only() {
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
    fn the_hash_is_the_published_one() {
        // RFC 4231, test case 2: what we rely on is HMAC-SHA256 and no relative of it.
        let mut hash = Hmac::<Sha256>::new_from_slice(b"Jefe").unwrap();
        hash.update(b"what do ya want for nothing?");
        let wanted = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        let found: String =
            hash.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(found, wanted);
    }

    #[test]
    fn a_short_secret_is_refused_and_none_is_shown() {
        assert!(Token::new("1234567 ").is_err());
        let token = Token::new(" 12345678\n").unwrap();
        assert_eq!(token, Token::new("12345678").unwrap());
        assert!(!format!("{token:?}").contains('1'));
    }

    #[test]
    fn random_bytes_do_not_come_twice() {
        assert_ne!(nonce(), nonce());
    }
}
