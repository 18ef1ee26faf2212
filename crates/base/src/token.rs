//! A secret that processes share, and the keyed hashes by which they prove that they know it.
//!
//! The secret itself is never sent. A side proves it by HMAC-SHA256 of what both sides know about
//! one connection: random bytes of each, and who speaks to whom. What exactly is hashed, and in
//! which order the sides prove it, is the matter of each protocol: engines do it in
//! `mooncake-transfer-engine`, clients and the master in `mooncake-proto`.

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
        proof.iter().map(|byte| format!("{byte:02x}")).collect()
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
        let found: String = proof.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(found, wanted);
        assert!(token.verify(&[&[0xcd; 50]], &proof));
        assert!(!token.verify(&[&[0xcd; 49]], &proof));
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
