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

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, thread};

    use mooncake_base::{Clock, SystemClock};

    use super::*;

    /// Plays the peer of an exchange byte by byte, with the proof of this token. Returns what the
    /// exchange makes of it.
    fn exchanged(own: Option<&Token>, of_peer: Option<&Token>) -> io::Result<()> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        let deadline = SystemClock.now() + std::time::Duration::from_secs(30);
        thread::scope(|scope| {
            let outcome = scope.spawn(move || accept(&stream, deadline, own));
            peer.write_all(&[&b"MOONPG02"[..], &[2; 32]].concat()).unwrap();
            let mut first = [0; 40];
            peer.read_exact(&mut first).unwrap();
            let (magic, nonce) = first.split_at(8);
            assert_eq!(magic, b"MOONPG02");
            let mut proof = [0; 32];
            peer.read_exact(&mut proof).unwrap();
            let wanted = |token: &Token| token.proof(&[nonce, &[2; 32], b"accept"]);
            assert_eq!(proof, own.map_or([0; 32], wanted));
            let shown = |token: &Token| token.proof(&[&[2; 32], nonce, b"dial"]);
            peer.write_all(&of_peer.map_or([0; 32], shown)).unwrap();
            outcome.join().unwrap()
        })
    }

    #[test]
    fn only_a_peer_with_the_same_token_is_accepted() {
        let (token, other) =
            (Token::new("a long secret").unwrap(), Token::new("another secret").unwrap());
        let sides = [None, Some(&token), Some(&other)];
        for (own, of_peer) in sides.iter().flat_map(|own| sides.map(|of_peer| (*own, of_peer))) {
            let outcome = exchanged(own, of_peer).map_err(|error| error.kind());
            let wanted = if own == of_peer { Ok(()) } else { Err(io::ErrorKind::PermissionDenied) };
            assert_eq!(outcome, wanted, "{own:?} {of_peer:?}");
        }
    }
}
