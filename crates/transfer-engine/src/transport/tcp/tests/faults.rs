//! Faults: unmapped memory, and peers that are silent, gone, slow, or violate the protocol.

use std::{
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{Mutex, mpsc},
    thread,
    time::{Duration, Instant},
};

use mooncake_base::{Clock, ErrorKind, SystemClock};
use socket2::SockRef;

use super::support::{AT_ONCE, Memory, Owner, WireProtocol, entries, moved, outcomes, soon};
use crate::{
    discovery::descriptor::SegmentDescriptor,
    memory::region::Backing,
    transfer_entry::{LocalRange, Opcode, RemoteRange, TransferEntry},
    transport::{
        Path, TimeLimits, Transport,
        tcp::{
            TcpServerSettings, TcpSettings, TcpTransport,
            data_frame::{RequestHeader, encode_entry},
            greeting::{GREETING_BYTES, Greeting, VERSION},
        },
    },
};

/// An address where nothing is mapped.
const NOWHERE: usize = 0x10;

fn nowhere(length: usize, remote: u64) -> TransferEntry {
    // SAFETY: no reference to unmapped memory can exist.
    TransferEntry::new(unsafe { LocalRange::foreign(NOWHERE, length) }, remote)
}

#[test]
fn unmapped_local_memory_fails_only_its_entry() {
    for protocol in [WireProtocol::Native, WireProtocol::CompatV2] {
        let (owner, theirs) = Owner::with_memory(50_000);
        let path = owner.path(protocol);
        for opcode in [Opcode::Read, Opcode::Write, Opcode::Read] {
            let ours = Memory::patterned(50_000, 4);
            let mut batch =
                entries(&ours, 10_000, |index| theirs.address() + index as u64 * 10_000);
            batch[1] = nowhere(10_000, theirs.address() + 10_000);
            batch[3] = nowhere(10_000, theirs.address() + 30_000);
            path.transfer(opcode, &mut batch, soon().into());
            assert_eq!(outcomes(&batch), [true, false, true, false, true], "{protocol:?}");
            let error = batch[1].outcome.take().unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            for index in [0, 2, 4] {
                let range = index * 10_000..(index + 1) * 10_000;
                assert!(ours.bytes()[range.clone()] == theirs.bytes()[range], "{protocol:?}");
            }
            assert!(path.is_alive());
        }
    }
}

#[test]
fn unmapped_remote_memory_fails_only_its_entry() {
    let (owner, theirs) = Owner::with_memory(100);
    owner.regions.register(NOWHERE as u64, 100, "*", Backing::User).unwrap();
    let path = owner.path(WireProtocol::Native);
    let ours = Memory::patterned(300, 4);
    let remote = |index| if index == 1 { NOWHERE as u64 } else { theirs.address() };
    let mut batch = entries(&ours, 100, remote);
    path.transfer(Opcode::Write, &mut batch, soon().into());
    assert_eq!(outcomes(&batch), [true, false, true]);
    let mut batch = [ours.part(0, 100, NOWHERE as u64)];
    path.transfer(Opcode::Read, &mut batch, soon().into());
    assert_eq!(outcomes(&batch), [false]);
    let mut batch = [ours.entry(0, 100, &theirs, 0)];
    path.transfer(Opcode::Read, &mut batch, soon().into());
    assert_eq!(outcomes(&batch), [true]);
}

/// Starts a listener that sends a valid greeting and then passes each connection to `serve`.
fn greeting_peer(serve: impl Fn(TcpStream) + Send + 'static) -> SegmentDescriptor {
    let owner = Owner::start("127.0.0.1");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let engine = owner.engine.bits();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            stream.read_exact(&mut [0; GREETING_BYTES]).unwrap();
            stream
                .write_all(&Greeting { version: VERSION, engine, requires_token: false }.encode())
                .unwrap();
            serve(stream);
        }
    });
    SegmentDescriptor { tcp_data_port: port, ..owner.descriptor(WireProtocol::Native) }
}

fn connect(descriptor: &SegmentDescriptor) -> std::sync::Arc<dyn Path> {
    TcpTransport::new(TcpSettings::default()).connect(descriptor, soon()).unwrap()
}

#[test]
fn silent_peer_costs_at_most_the_deadline() {
    let held = Mutex::new(Vec::new());
    let path = connect(&greeting_peer(move |stream| held.lock().unwrap().push(stream)));
    // A write larger than the socket buffers blocks in sending, a read in receiving.
    let ours = Memory::zeroed(PAYLOAD);
    for opcode in [Opcode::Read, Opcode::Write] {
        let begin = Instant::now();
        let mut batch = [ours.part(0, PAYLOAD, 1 << 20)];
        path.transfer(opcode, &mut batch, (SystemClock.now() + Duration::from_millis(150)).into());
        let error = batch[0].outcome.take().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        let elapsed = begin.elapsed();
        assert!(elapsed >= Duration::from_millis(140), "{elapsed:?}");
        assert!(elapsed < AT_ONCE, "{elapsed:?}");
    }
}

const PAYLOAD: usize = 16 << 20;

#[test]
fn silent_peer_costs_the_stall_limit() {
    let held = Mutex::new(Vec::new());
    let path = connect(&greeting_peer(move |stream| held.lock().unwrap().push(stream)));
    let ours = Memory::zeroed(PAYLOAD);
    for (opcode, length) in [(Opcode::Read, 100), (Opcode::Write, 100), (Opcode::Write, PAYLOAD)] {
        let begin = Instant::now();
        let stall = Some(Duration::from_millis(150));
        let mut batch = [ours.part(0, length, 1 << 20)];
        path.transfer(opcode, &mut batch, TimeLimits { deadline: soon(), stall });
        let error = batch[0].outcome.take().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert!(error.to_string().contains("stall limit"), "{error}");
        assert!(begin.elapsed() >= Duration::from_millis(140), "{:?}", begin.elapsed());
        assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
    }
}

#[test]
fn slow_peer_is_not_left_while_bytes_move() {
    let pause = Duration::from_millis(60);
    let path = connect(&greeting_peer(move |mut stream| {
        let mut request = vec![0; 64 << 10];
        // Takes the request in pieces: sequence number, count and length come back in the response.
        let _ = stream.read(&mut request);
        for byte in [0_u8; 12] {
            thread::park_timeout(pause);
            if stream.write_all(&[byte]).is_err() {
                return;
            }
        }
        // The response is never completed, so that the stall limit applies from here on.
        thread::park_timeout(AT_ONCE);
    }));
    let ours = Memory::zeroed(100);
    let begin = Instant::now();
    let stall = Some(pause * 5);
    let mut batch = [ours.part(0, 100, 1 << 20)];
    path.transfer(Opcode::Read, &mut batch, TimeLimits { deadline: soon(), stall });
    assert!(batch[0].outcome.take().unwrap().is_err());
    assert!(begin.elapsed() >= pause * 12, "{:?}", begin.elapsed());
}

#[test]
fn peer_that_closes_mid_frame_is_an_error() {
    let cases =
        [(Opcode::Read, 0), (Opcode::Read, 40), (Opcode::Write, 10), (Opcode::Write, 1 << 16)];
    for (opcode, taken) in cases {
        let path = connect(&greeting_peer(move |mut stream| {
            let _ = stream.read_exact(&mut vec![0; taken]);
            let _ = stream.write_all(&[1, 0, 0]); // only a part of the response
        }));
        let ours = Memory::zeroed(PAYLOAD);
        let mut batch = [ours.part(0, PAYLOAD, 1 << 20)];
        path.transfer(opcode, &mut batch, soon().into());
        let error = batch[0].outcome.take().unwrap().unwrap_err();
        assert_ne!(error.kind(), ErrorKind::Timeout, "{error}");
    }
}

#[test]
fn connection_reset_mid_frame_is_an_error() {
    for (opcode, taken) in [(Opcode::Read, 40), (Opcode::Write, 40), (Opcode::Write, 1 << 16)] {
        let path = connect(&greeting_peer(move |mut stream| {
            let _ = stream.read_exact(&mut vec![0; taken]);
            let _ = stream.write_all(&[1, 0, 0]);
            // A close with unsent or unread bytes and no linger time resets the connection.
            SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
        }));
        let ours = Memory::zeroed(PAYLOAD);
        // The second transfer opens a new connection.
        for _ in 0..2 {
            let begin = Instant::now();
            let mut batch = [ours.part(0, PAYLOAD, 1 << 20)];
            path.transfer(opcode, &mut batch, soon().into());
            let error = batch[0].outcome.take().unwrap().unwrap_err();
            assert_ne!(error.kind(), ErrorKind::Timeout, "{opcode:?} {taken}: {error}");
            assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
        }
    }
}

#[test]
fn malformed_response_is_an_error() {
    let path = connect(&greeting_peer(|mut stream| {
        let _ = stream.read_exact(&mut [0; 40]);
        let _ = stream.write_all(&[0xFF; 4096]);
    }));
    let ours = Memory::patterned(100, 1);
    let before = ours.bytes();
    let mut batch = [ours.part(0, 100, 1 << 20)];
    path.transfer(Opcode::Read, &mut batch, soon().into());
    let error = batch[0].outcome.take().unwrap().unwrap_err();
    assert!(error.to_string().contains("broke the protocol"), "{error}");
    assert_eq!(ours.bytes(), before);
}

#[test]
fn replaces_connections_that_broke_while_idle() {
    let (owner, theirs) = Owner::with_memory(100);
    let path = owner.path(WireProtocol::Native);
    let (address, engine) = (owner.server.address(), owner.engine);
    owner.server.close();
    let settings = TcpServerSettings { engine: Some(engine), ..TcpServerSettings::default() };
    let again = Owner::start_with(&address.to_string(), settings);
    drop(again.lend(&theirs));
    let back = Memory::zeroed(100);
    let mut batch = [back.entry(0, 100, &theirs, 0)];
    path.transfer(Opcode::Read, &mut batch, soon().into());
    assert!(moved(&batch[0]), "{:?}", batch[0].outcome);
    assert_eq!(back.bytes(), theirs.bytes());
}

/// The peer may still read the bytes that were sent over the connection that broke.
#[test]
fn write_that_was_sent_again_says_so() {
    for length in [100, 12 << 20] {
        let (owner, theirs) = Owner::with_memory(length);
        let path = owner.path(WireProtocol::Native);
        let ours = Memory::patterned(length, 4);
        let write = || {
            let mut batch = [ours.entry(0, length, &theirs, 0)];
            path.transfer(Opcode::Write, &mut batch, soon().into());
            assert!(moved(&batch[0]), "{:?}", batch[0].outcome);
            batch[0].may_arrive_late
        };
        assert!(!write(), "it was sent once");
        let (address, engine) = (owner.server.address(), owner.engine);
        owner.server.close();
        let settings = TcpServerSettings { engine: Some(engine), ..TcpServerSettings::default() };
        let again = Owner::start_with(&address.to_string(), settings);
        drop(again.lend(&theirs));
        assert!(write(), "{length}");
        assert!(!write(), "nothing is left of the first attempt of another write");
        assert_eq!(theirs.bytes(), ours.bytes());
    }
}

#[test]
fn rejects_another_engine_at_the_same_address() {
    let (owner, theirs) = Owner::with_memory(100);
    let path = owner.path(WireProtocol::Native);
    let address = owner.server.address();
    owner.server.close();
    let other = Owner::start_with(&address.to_string(), TcpServerSettings::default());
    drop(other.lend(&theirs));
    let ours = Memory::zeroed(100);
    let before = theirs.bytes();
    let mut batch = [ours.entry(0, 100, &theirs, 0)];
    path.transfer(Opcode::Write, &mut batch, soon().into());
    let error = batch[0].outcome.take().unwrap().unwrap_err();
    assert!(error.to_string().contains("restarted"), "{error}");
    assert_eq!(theirs.bytes(), before);
    assert!(!path.is_alive());
}

/// Returns a connection that sent a greeting and a part of a write of 100 bytes.
fn half_a_write(owner: &Owner, theirs: &Memory) -> TcpStream {
    let mut stream = TcpStream::connect(owner.server.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut wire =
        Greeting { version: VERSION, engine: 0, requires_token: false }.encode().to_vec();
    let header = RequestHeader { opcode: Opcode::Write, count: 1, sequence: 1, payload: 100 };
    header.encode(&mut wire);
    encode_entry(RemoteRange { address: theirs.address(), length: 100 }, &mut wire);
    wire.extend_from_slice(&[7; 50]);
    stream.write_all(&wire).unwrap();
    stream.read_exact(&mut [0; GREETING_BYTES]).unwrap();
    stream
}

#[test]
fn stalled_peer_does_not_pin_memory_forever() {
    let progress_timeout = Duration::from_millis(50);
    let settings = TcpServerSettings { progress_timeout, ..TcpServerSettings::default() };
    let owner = Owner::start_with("127.0.0.1:0", settings);
    let theirs = Memory::zeroed(100);
    drop(owner.lend(&theirs));
    let mut stuck = half_a_write(&owner, &theirs);
    assert_eq!(stuck.read(&mut [0; 8]).unwrap_or(0), 0, "the server closes the connection");
    owner.unregister(&theirs);
}

#[test]
fn closing_the_server_releases_memory_being_written() {
    let (owner, theirs) = Owner::with_memory(100);
    let _stuck = half_a_write(&owner, &theirs);
    let begin = Instant::now();
    owner.server.close();
    owner.unregister(&theirs);
    assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
}

#[test]
fn malformed_bytes_close_only_their_connection() {
    let (owner, theirs) = Owner::with_memory(100);
    let path = owner.path(WireProtocol::Native);
    let greeting = Greeting { version: VERSION, engine: 0, requires_token: false }.encode();
    let with_greeting = |rest: &[u8]| [&greeting[..], rest].concat();
    let malformed = [
        vec![0; 7],
        vec![0xFF; 24],
        [&[0; 16][..], &[9; 8]].concat(),
        with_greeting(&[0; 40]),
        with_greeting(&[0xFF; 40]),
        with_greeting(&[1, 0, 0, 0, 7, 0, 0, 0]),
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(),
    ];
    for bytes in malformed {
        let mut stream = TcpStream::connect(owner.server.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let _ = stream.write_all(&bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        // The connection is reset or closed, but over.
        if let Err(failure) = stream.read_to_end(&mut answer) {
            assert_eq!(failure.kind(), io::ErrorKind::ConnectionReset, "{bytes:?}");
        }
    }
    let back = Memory::zeroed(100);
    let mut batch = [back.entry(0, 100, &theirs, 0)];
    path.transfer(Opcode::Read, &mut batch, soon().into());
    assert!(moved(&batch[0]));
}

/// A peer that was stopped, or not reached, would get them much later.
#[test]
fn unsent_bytes_of_an_abandoned_write_are_dropped() {
    for length in [PAYLOAD / 4, 2 * PAYLOAD] {
        let (given_up, goes_on) = mpsc::sync_channel::<()>(1);
        let (received, end) = mpsc::sync_channel(1);
        let goes_on = Mutex::new(goes_on);
        let path = connect(&greeting_peer(move |mut stream| {
            let mut part = vec![0; 64 << 10];
            // The peer is stopped within the write.
            stream.read_exact(&mut part[..1]).unwrap();
            let _ = goes_on.lock().unwrap().recv();
            let failure = loop {
                match stream.read(&mut part) {
                    Ok(0) => break None,
                    Ok(_) => {}
                    Err(failure) => break Some(failure.kind()),
                }
            };
            let _ = received.send(failure);
        }));
        let ours = Memory::zeroed(length);
        let mut batch = [ours.part(0, length, 1 << 20)];
        let stall = Some(Duration::from_millis(150));
        path.transfer(Opcode::Write, &mut batch, TimeLimits { deadline: soon(), stall });
        assert_eq!(outcomes(&batch), [false]);
        drop(given_up);
        let failure = end.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(failure, Some(io::ErrorKind::ConnectionReset), "{length}");
    }
}

#[test]
fn moves_nothing_after_the_deadline() {
    let (owner, theirs) = Owner::with_memory(100);
    let path = owner.path(WireProtocol::Native);
    let before = theirs.bytes();
    let ours = Memory::zeroed(100);
    let mut batch = [ours.entry(0, 100, &theirs, 0)];
    path.transfer(Opcode::Write, &mut batch, SystemClock.now().into());
    assert_eq!(batch[0].outcome.take().unwrap().unwrap_err().kind(), ErrorKind::Timeout);
    assert_eq!(theirs.bytes(), before);
}
