//! Strangers that fill the data port.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use super::{
    super::greeting::{Greeting, VERSION},
    support::{Memory, Owner, WireProtocol, moved, soon},
};
use crate::{transfer_entry::Opcode, transport::tcp::TcpServerSettings};

/// A limit that a test may reach with few descriptors.
const CONNECTIONS_MAX: usize = 64;

/// What a stranger sends before it falls silent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Opening {
    Nothing,
    /// A valid greeting of the native frames.
    Greeting,
    /// A request of upstream's frames without its payload, to an address that is not registered.
    Request,
}

fn stranger(owner: &Owner, opening: Opening) -> TcpStream {
    let mut stream = TcpStream::connect(owner.server.address()).unwrap();
    let greeting = Greeting { version: VERSION, engine: 0, requires_token: false }.encode();
    let mut request = [0; 24];
    request[..8].copy_from_slice(&1000_u64.to_le_bytes());
    request[16] = 1;
    match opening {
        Opening::Nothing => {}
        Opening::Greeting => stream.write_all(&greeting).unwrap(),
        Opening::Request => stream.write_all(&request).unwrap(),
    }
    stream
}

#[test]
fn silent_strangers_keep_no_peer_away_from_the_data_port() {
    for opening in [Opening::Nothing, Opening::Greeting, Opening::Request] {
        let settings =
            TcpServerSettings { connections_max: CONNECTIONS_MAX, ..TcpServerSettings::default() };
        let owner = Owner::start_with("127.0.0.1:0", settings);
        let theirs = Memory::patterned(1000, 7);
        let _region = owner.lend(&theirs);
        let strangers: Vec<_> =
            (0..CONNECTIONS_MAX + 16).map(|_| stranger(&owner, opening)).collect();
        let begin = Instant::now();
        while owner.server.connections().open < CONNECTIONS_MAX {
            assert!(begin.elapsed() < Duration::from_secs(20), "the strangers are accepted");
            std::thread::yield_now();
        }
        let (begin, back) = (Instant::now(), Memory::zeroed(1000));
        let mut batch = [back.entry(0, 1000, &theirs, 0)];
        owner.path(WireProtocol::Native).transfer(Opcode::Read, &mut batch, soon().into());
        assert!(moved(&batch[0]), "{opening:?}: {:?}", batch[0].outcome);
        assert!(begin.elapsed() < Duration::from_secs(1), "{opening:?}: {:?}", begin.elapsed());
        drop(strangers);
    }
}

#[test]
fn stranger_that_sends_no_greeting_is_disconnected_soon() {
    let greeting_timeout = Duration::from_millis(50);
    let settings = TcpServerSettings { greeting_timeout, ..TcpServerSettings::default() };
    let owner = Owner::start_with("127.0.0.1:0", settings);
    let mut stream = stranger(&owner, Opening::Nothing);
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    // A connection that has sent a greeting may stay.
    let mut stream = stranger(&owner, Opening::Greeting);
    stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let mut answer = Vec::new();
    let end = stream.read_to_end(&mut answer).unwrap_err();
    assert_eq!(end.kind(), std::io::ErrorKind::WouldBlock);
    assert!(!answer.is_empty(), "the server has sent its greeting");
}
