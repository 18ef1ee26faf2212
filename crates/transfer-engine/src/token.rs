//! How engines prove a shared secret to each other.
//!
//! Each side sends a nonce of 32 random bytes and then a keyed hash of both nonces, the owner's
//! engine id, the channel, and the side that speaks. A proof is therefore valid for one connection,
//! one direction and one engine. The data that follows on a data connection is neither encrypted nor
//! authenticated; a message on the handshake socket is part of the hash.

pub use mooncake_base::token::Token;
pub(crate) use mooncake_base::token::{NONCE_BYTES, Nonce, PROOF_BYTES, Proof, nonce};

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

impl Exchange {
    /// Returns the proof of one side.
    pub(crate) fn proof(&self, token: &Token, side: HandshakeSide) -> Proof {
        self.seal(token, side, &[])
    }

    /// Verifies the proof of one side, in constant time.
    pub(crate) fn verify(&self, token: &Token, side: HandshakeSide, proof: &Proof) -> bool {
        self.verify_seal(token, side, &[], proof)
    }

    /// Returns the proof of one side that also covers a message.
    pub(crate) fn seal(&self, token: &Token, side: HandshakeSide, content: &[u8]) -> Proof {
        self.hashed(side, content, |parts| token.proof(parts))
    }

    /// Verifies a proof that also covers a message, in constant time.
    pub(crate) fn verify_seal(
        &self,
        token: &Token,
        side: HandshakeSide,
        content: &[u8],
        proof: &Proof,
    ) -> bool {
        self.hashed(side, content, |parts| token.verify(parts, proof))
    }

    fn hashed<T>(
        &self,
        side: HandshakeSide,
        content: &[u8],
        hash: impl FnOnce(&[&[u8]]) -> T,
    ) -> T {
        hash(&[
            b"mooncake transfer 1",
            &[side as u8, self.channel as u8],
            &self.owner.to_le_bytes(),
            &self.owner_nonce,
            &self.caller_nonce,
            content,
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exchange() -> Exchange {
        Exchange { channel: Channel::Tcp, owner: 7, owner_nonce: [1; 32], caller_nonce: [2; 32] }
    }

    #[test]
    fn proofs_are_those_of_the_protocol() {
        let token = Token::new("a long secret").unwrap();
        let hex = |bytes: Proof| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let tcp = exchange();
        assert_eq!(
            hex(tcp.proof(&token, HandshakeSide::Caller)),
            "1f7dea7c5d0d2d34e9e0b5b5586d358ba80f2ad84bb4b1d493465754d411d189"
        );
        let shm = Exchange { channel: Channel::Shm, ..tcp };
        assert_eq!(
            hex(shm.seal(&token, HandshakeSide::Owner, b"content")),
            "87e3a8e47e2bd8cb993d80eed6a7a64ed175237c665225e167c5f39842cb069f"
        );
        let handshake = Exchange { channel: Channel::Handshake, owner: 0, ..tcp };
        assert_eq!(
            hex(handshake.seal(&token, HandshakeSide::Caller, b"content")),
            "f9c0eb692920ae09bbe1916b33857d61cbd79e52d61839892822f6f4417ec374"
        );
    }

    #[test]
    fn proof_is_bound_to_secret_side_channel_engine_and_nonces() {
        let token = Token::new("a long secret").unwrap();
        let (good, side) = (exchange(), HandshakeSide::Caller);
        let proof = good.proof(&token, side);
        assert!(good.verify(&token, side, &proof));
        assert!(!good.verify(&Token::new("a long secreT").unwrap(), side, &proof));
        assert!(!good.verify(&token, HandshakeSide::Owner, &proof));
        for other in [
            Exchange { channel: Channel::Shm, ..good },
            Exchange { owner: 8, ..good },
            Exchange { owner_nonce: [3; 32], ..good },
            Exchange { caller_nonce: [3; 32], ..good },
        ] {
            assert!(!other.verify(&token, side, &proof), "{other:?}");
        }
        for index in 0..PROOF_BYTES {
            let mut bad = proof;
            bad[index] ^= 1;
            assert!(!good.verify(&token, side, &bad));
        }
    }
}
