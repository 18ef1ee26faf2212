//! How engines prove a shared secret to each other.
//!
//! Each side sends random bytes and then a proof, which also covers the owner's engine id and the
//! channel. The data that follows on a data connection is neither encrypted nor authenticated; a
//! message on the handshake socket is covered by its proof.

pub use mooncake_base::token::Token;
pub(crate) use mooncake_base::token::{
    Exchange, NONCE_BYTES, Nonce, PROOF_BYTES, Proof, Prover, hex, nonce,
};

/// The kind of connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Channel {
    Tcp = 1,
    Shm = 2,
    Handshake = 3,
}

/// Returns the proofs of one connection to the engine that exports memory, the callee. Its id is 0 if
/// the caller does not know it yet.
pub(crate) fn exchange(channel: Channel, owner: u128, callee: Nonce, caller: Nonce) -> Exchange {
    let scope = [&[channel as u8][..], &owner.to_le_bytes()].concat();
    Exchange { protocol: b"mooncake transfer 1", scope, callee, caller }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proofs_are_those_of_the_protocol() {
        let token = Token::new("a long secret").unwrap();
        let proof = |channel, owner, side, message: &[u8]| {
            hex(&exchange(channel, owner, [1; 32], [2; 32]).proof(&token, side, message))
        };
        assert_eq!(
            proof(Channel::Tcp, 7, Prover::Caller, b""),
            "1f7dea7c5d0d2d34e9e0b5b5586d358ba80f2ad84bb4b1d493465754d411d189"
        );
        assert_eq!(
            proof(Channel::Shm, 7, Prover::Callee, b"content"),
            "87e3a8e47e2bd8cb993d80eed6a7a64ed175237c665225e167c5f39842cb069f"
        );
        assert_eq!(
            proof(Channel::Handshake, 0, Prover::Caller, b"content"),
            "f9c0eb692920ae09bbe1916b33857d61cbd79e52d61839892822f6f4417ec374"
        );
    }
}
