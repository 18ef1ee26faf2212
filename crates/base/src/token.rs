//! A secret that processes share, and the keyed hashes by which they prove that they know it.
//!
//! The secret itself is never sent. A side proves it by HMAC-SHA256 of what both sides know about
//! one connection: random bytes of each, and who speaks. [`Exchange`] says what is hashed. In which
//! order the sides prove it is the matter of each protocol: engines do it in
//! `mooncake-transfer-engine`, clients and the master in `mooncake-proto`. The ranks of a process
//! group have a hash of their own, in `mooncake-collective`.

use std::{fmt, sync::Arc};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::{Error, Result};

/// The header of a metadata server with [`Token::metadata_owner`]. An entry that was written with it
/// is changed and removed only with it.
pub const METADATA_OWNER_HEADER: &str = "x-mooncake-owner";

/// Length of a nonce.
pub const NONCE_BYTES: usize = 32;

/// Length of a proof.
pub const PROOF_BYTES: usize = 32;

/// The shortest secret; a shorter one can be found by brute force.
const SECRET_BYTES_MIN: usize = 8;

/// Random bytes of one side, new for each connection.
pub type Nonce = [u8; NONCE_BYTES];

/// A keyed hash.
pub type Proof = [u8; PROOF_BYTES];

/// The side of a connection that proves something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prover {
    /// The side that connects.
    Caller = 1,
    /// The side that is connected to.
    Callee = 2,
}

/// The proofs of one connection. Each covers the name of the protocol, the side that speaks, and
/// random bytes of both sides, so that it is of no use on another connection or in the other
/// direction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exchange {
    /// Keeps the hashes of a protocol apart from others with the same secret.
    pub protocol: &'static [u8],
    /// What else is covered; of the same length in all exchanges of a protocol.
    pub scope: Vec<u8>,
    /// The random bytes of the side that is connected to.
    pub callee: Nonce,
    /// The random bytes of the side that connects.
    pub caller: Nonce,
}

/// A shared secret. Its text appears neither in messages nor in logs.
#[derive(Clone)]
pub struct Token(Arc<[u8]>);

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

    /// Returns the keyed hash of the parts. They are hashed as one text, so that all but one of
    /// them must have a fixed length.
    pub fn proof(&self, parts: &[&[u8]]) -> Proof {
        self.hash(parts).finalize().into_bytes().into()
    }

    /// Returns whether the proof is the keyed hash of the parts, in constant time.
    pub fn verify(&self, parts: &[&[u8]], proof: &Proof) -> bool {
        self.hash(parts).verify_slice(proof).is_ok()
    }

    /// Returns whether the text is the secret, in a time that depends on neither.
    pub fn is(&self, shown: &[u8]) -> bool {
        self.verify(&[shown], &self.proof(&[&self.0]))
    }

    /// Returns what shows a metadata server that an entry belongs to an engine with this token. It
    /// differs by key, and does not show the token.
    pub fn metadata_owner(&self, key: &str) -> String {
        let proof = self.proof(&[b"metadata entry ", key.as_bytes()]);
        hex(&proof)
    }

    fn hash(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut hash = Hmac::<Sha256>::new_from_slice(&self.0).expect("a key has any length");
        for part in parts {
            hash.update(part);
        }
        hash
    }
}

impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        self.is(&other.0)
    }
}

impl Eq for Token {}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

impl Exchange {
    /// Returns the proof of one side, which also covers a message.
    pub fn proof(&self, token: &Token, prover: Prover, message: &[u8]) -> Proof {
        token.proof(&self.parts(&[prover as u8], message))
    }

    /// Returns whether this is the proof of one side for a message, in constant time.
    pub fn is_proven(&self, token: &Token, prover: Prover, message: &[u8], proof: &Proof) -> bool {
        token.verify(&self.parts(&[prover as u8], message), proof)
    }

    /// Checks the caller's proof without a message. Returns the callee's own.
    pub fn answer(&self, token: &Token, proof: &Proof) -> Option<Proof> {
        let is_proven = self.is_proven(token, Prover::Caller, &[], proof);
        is_proven.then(|| self.proof(token, Prover::Callee, &[]))
    }

    fn parts<'a>(&'a self, prover: &'a [u8; 1], message: &'a [u8]) -> [&'a [u8]; 6] {
        [self.protocol, prover, &self.scope, &self.callee, &self.caller, message]
    }
}

/// Returns bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns a fresh nonce.
///
/// # Panics
/// If the system has no random source, because nonces would repeat.
pub fn nonce() -> Nonce {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).expect("the system has a random source");
    nonce
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proof_is_hmac_sha256_of_rfc_4231() {
        // RFC 4231, test case 4: the hash must be HMAC-SHA256 and not a relative of it.
        let key: Vec<u8> = (1..=25).collect();
        let token = Token(key.into());
        let wanted = "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b";
        let proof = token.proof(&[&[0xcd; 20], &[0xcd; 30]]);
        assert_eq!(hex(&proof), wanted);
        assert!(token.verify(&[&[0xcd; 50]], &proof));
        assert!(!token.verify(&[&[0xcd; 49]], &proof));
    }

    #[test]
    fn proof_is_bound_to_secret_and_all_that_is_hashed() {
        let token = Token::new("a long secret").unwrap();
        let exchange = || Exchange {
            protocol: b"a protocol",
            scope: vec![7],
            callee: [1; NONCE_BYTES],
            caller: [2; NONCE_BYTES],
        };
        let (good, side) = (exchange(), Prover::Caller);
        let proof = good.proof(&token, side, b"a message");
        assert!(good.is_proven(&token, side, b"a message", &proof));
        assert!(!good.is_proven(&token, side, b"another message", &proof));
        assert!(!good.is_proven(&token, Prover::Callee, b"a message", &proof), "reflected");
        let other = Token::new("a long secreT").unwrap();
        assert!(!good.is_proven(&other, side, b"a message", &proof));
        for other in [
            Exchange { protocol: b"b protocol", ..exchange() },
            Exchange { scope: vec![8], ..exchange() },
            Exchange { callee: [3; NONCE_BYTES], ..exchange() },
            Exchange { caller: [3; NONCE_BYTES], ..exchange() },
            Exchange { callee: good.caller, caller: good.callee, ..exchange() },
        ] {
            assert!(!other.is_proven(&token, side, b"a message", &proof), "{other:?}");
        }
        for index in 0..PROOF_BYTES {
            let mut bad = proof;
            bad[index] ^= 1;
            assert!(!good.is_proven(&token, side, b"a message", &bad));
        }
    }

    #[test]
    fn only_a_proven_caller_is_answered() {
        let token = Token::new("a long secret").unwrap();
        let (protocol, callee, caller) = (b"a protocol", nonce(), nonce());
        let exchange = Exchange { protocol, scope: Vec::new(), callee, caller };
        let answer = exchange.answer(&token, &exchange.proof(&token, Prover::Caller, &[])).unwrap();
        assert!(exchange.is_proven(&token, Prover::Callee, &[], &answer));
        assert_eq!(exchange.answer(&token, &answer), None, "the callee's own proof");
    }

    #[test]
    fn secret_is_compared_whole() {
        let token = Token::new("open sesame").unwrap();
        assert!(token.is(b"open sesame"));
        for shown in ["", "open", "open sesam", "open sesame ", "open sesamE"] {
            assert!(!token.is(shown.as_bytes()), "{shown:?}");
        }
    }

    #[test]
    fn short_secret_is_refused_and_no_secret_is_printed() {
        assert!(Token::new("1234567 ").is_err());
        let token = Token::new(" 12345678\n").unwrap();
        assert_eq!(token, Token::new("12345678").unwrap());
        assert_ne!(token, Token::new("123456789").unwrap());
        assert!(!format!("{token:?}").contains('1'));
    }

    #[test]
    fn nonces_do_not_repeat() {
        assert_ne!(nonce(), nonce());
    }
}
