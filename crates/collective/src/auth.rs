//! The proof of a shared token at the start of each connection.
//!
//! The time limits of the exchange stay on the socket: the caller sets its own.
//!
//! Both sides send 32 random bytes, then a keyed hash of both, which differs by side. Without a
//! token the hash is zero.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
};

use mooncake_base::{
    Moment, Token,
    token::{NONCE_BYTES, PROOF_BYTES, Proof, nonce},
};
use mooncake_os::DeadlineStream;

const MAGIC: &[u8; 8] = b"MOONPG02";

/// Proves the token to the side that accepted the connection, and checks that side's proof.
pub(crate) fn dial(stream: &TcpStream, deadline: Moment, token: Option<&Token>) -> io::Result<()> {
    exchange(DeadlineStream::new(stream, deadline), token, b"dial", b"accept")
}

/// Proves the token to the side that opened the connection, and checks that side's proof.
pub(crate) fn accept(
    stream: &TcpStream,
    deadline: Moment,
    token: Option<&Token>,
) -> io::Result<()> {
    exchange(DeadlineStream::new(stream, deadline), token, b"accept", b"dial")
}

fn exchange(
    mut stream: DeadlineStream<&TcpStream>,
    token: Option<&Token>,
    own_side: &[u8],
    other_side: &[u8],
) -> io::Result<()> {
    let own = nonce();
    stream.write_all(MAGIC)?;
    stream.write_all(&own)?;
    let mut magic = [0; 8];
    stream.read_exact(&mut magic)?;
    if &magic != MAGIC {
        return Err(io::Error::other("the peer is no process group of mooncake"));
    }
    let mut other = [0; NONCE_BYTES];
    stream.read_exact(&mut other)?;
    let proof = |first: &[u8], second: &[u8], side: &[u8]| -> Proof {
        token.map_or([0; PROOF_BYTES], |token| token.proof(&[first, second, side]))
    };
    stream.write_all(&proof(&own, &other, own_side))?;
    let mut shown = [0; PROOF_BYTES];
    stream.read_exact(&mut shown)?;
    let is_proven = match token {
        Some(token) => token.verify(&[&other, &own, other_side], &shown),
        None => shown == [0; PROOF_BYTES],
    };
    if !is_proven {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "the peer has another token: set MC_TRANSFER_TOKEN to the same secret at all ranks",
        ));
    }
    Ok(())
}
