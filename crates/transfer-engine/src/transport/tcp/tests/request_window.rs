//! Large batches over several connections at once.

use std::{io::Read, net::TcpListener, sync::Arc, thread, time::Duration};

use mooncake_base::{Clock, ErrorKind, SystemClock};

use super::support::{AT_ONCE, Memory, Owner, WireProtocol, entries, moved, outcomes, soon};
use crate::{
    transfer_entry::{LocalRange, Opcode, TransferEntry},
    transport::{
        Path, Transport,
        tcp::{TcpSettings, TcpTransport, greeting},
    },
};

const LENGTH: usize = 12 << 20;

/// Returns a path whose large transfers use up to `connections` connections.
fn path_over(owner: &Owner, connections: usize) -> Arc<dyn Path> {
    let settings =
        TcpSettings { connections_per_transfer: Some(connections), ..TcpSettings::default() };
    TcpTransport::new(settings).connect(&owner.descriptor(WireProtocol::Native), soon()).unwrap()
}

#[test]
fn large_transfer_is_complete_over_any_number_of_connections() {
    for connections in [1, 2, 4] {
        let (owner, theirs) = Owner::with_memory(LENGTH);
        let path = path_over(&owner, connections);
        let ours = Memory::patterned(LENGTH, connections);
        // One entry, and entries whose ends do not coincide with ends of frames.
        for length in [LENGTH, 3_000_001, 777] {
            let there = |index| theirs.address() + (index * length) as u64;
            let mut batch = entries(&ours, length, there);
            path.transfer(Opcode::Write, &mut batch, soon().into());
            assert!(batch.iter().all(moved));
            let back = Memory::zeroed(LENGTH);
            let mut batch = entries(&back, length, there);
            path.transfer(Opcode::Read, &mut batch, soon().into());
            assert!(batch.iter().all(moved));
            let whole = LENGTH / length * length;
            assert!(back.bytes()[..whole] == ours.bytes()[..whole], "{connections} {length}");
            assert!(theirs.bytes()[..whole] == ours.bytes()[..whole], "{connections} {length}");
        }
        let pool = path.connections().unwrap();
        assert_eq!(
            (pool.open, pool.idle),
            (connections, connections),
            "all connections were released"
        );
    }
}

#[test]
fn only_bad_entries_of_a_large_batch_fail() {
    const PART: usize = 500 << 10;
    for opcode in [Opcode::Read, Opcode::Write] {
        let (owner, theirs) = Owner::with_memory(LENGTH);
        let path = path_over(&owner, 3);
        let ours = Memory::patterned(LENGTH, 5);
        let mut batch = entries(&ours, PART, |index| theirs.address() + (index * PART) as u64);
        let count = batch.len();
        // One range outside the region, and one unmapped local range.
        batch[7].remote = theirs.address() + LENGTH as u64 - 5;
        // SAFETY: no reference to unmapped memory can exist.
        let nowhere = unsafe { LocalRange::foreign(0x10, PART) };
        batch[20] = TransferEntry::new(nowhere, theirs.address() + (20 * PART) as u64);
        path.transfer(opcode, &mut batch, soon().into());
        let wanted: Vec<_> = (0..count).map(|index| index != 7 && index != 20).collect();
        assert_eq!(outcomes(&batch), wanted, "{opcode:?}");
        for index in (0..count).filter(|index| wanted[*index]) {
            let range = index * PART..(index + 1) * PART;
            assert!(ours.bytes()[range.clone()] == theirs.bytes()[range], "{opcode:?} {index}");
        }
        let bad = batch[20].outcome.take().unwrap().unwrap_err();
        assert_eq!(bad.kind(), ErrorKind::InvalidArgument, "{bad}");
        assert!(path.is_alive());
    }
}

#[test]
fn owner_closing_mid_transfer_is_an_error_in_time() {
    for opcode in [Opcode::Read, Opcode::Write] {
        let (owner, theirs) = Owner::with_memory(LENGTH);
        let path = path_over(&owner, 4);
        let ours = Memory::patterned(LENGTH, 6);
        thread::scope(|scope| {
            let (path, ours, theirs) = (&path, &ours, &theirs);
            let busy = scope.spawn(move || {
                loop {
                    let mut batch = [ours.entry(0, LENGTH, theirs, 0)];
                    path.transfer(opcode, &mut batch, soon().into());
                    if let Some(Err(error)) = batch[0].outcome.take() {
                        return error;
                    }
                }
            });
            owner.server.close();
            let error = busy.join().unwrap();
            assert_ne!(error.kind(), ErrorKind::Timeout, "{error}");
        });
    }
}

#[test]
fn silent_peer_costs_a_large_transfer_its_deadline() {
    let owner = Owner::start("127.0.0.1");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let engine = owner.engine.bits();
    thread::spawn(move || {
        let mut held = Vec::new();
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut greeting = [0; greeting::GREETING_BYTES];
            if stream.read_exact(&mut greeting).is_err() {
                continue;
            }
            let ours =
                greeting::Greeting { version: greeting::VERSION, engine, requires_token: false };
            std::io::Write::write_all(&mut stream, &ours.encode()).unwrap();
            held.push(stream);
        }
    });
    let mut descriptor = owner.descriptor(WireProtocol::Native);
    descriptor.tcp_data_port = port;
    let settings = TcpSettings { connections_per_transfer: Some(4), ..TcpSettings::default() };
    let path = TcpTransport::new(settings).connect(&descriptor, soon()).unwrap();
    let ours = Memory::zeroed(LENGTH);
    for opcode in [Opcode::Read, Opcode::Write] {
        let begin = std::time::Instant::now();
        let mut batch = [ours.part(0, LENGTH, 1 << 20)];
        path.transfer(opcode, &mut batch, (SystemClock.now() + Duration::from_millis(150)).into());
        let error = batch[0].outcome.take().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert!(error.to_string().contains("deadline"), "{error}");
        assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
    }
}

/// The memory may belong to others then.
#[test]
fn nothing_is_written_past_the_deadline_however_fast_bytes_move() {
    let (owner, theirs) = Owner::with_memory(LENGTH);
    let path = path_over(&owner, 2);
    let ours = Memory::patterned(LENGTH, 7);
    let before = theirs.bytes();
    let mut batch = [ours.entry(0, LENGTH, &theirs, 0)];
    path.transfer(Opcode::Write, &mut batch, SystemClock.now().into());
    let error = batch[0].outcome.take().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(theirs.bytes() == before);
}

#[test]
fn small_transfers_get_connections_during_large_ones() {
    let (owner, theirs) = Owner::with_memory(LENGTH);
    let path = path_over(&owner, 4);
    let ours = Memory::patterned(LENGTH, 8);
    thread::scope(|scope| {
        for thread in 0..6 {
            let (path, ours, theirs) = (&path, &ours, &theirs);
            scope.spawn(move || {
                let length = if thread < 2 { LENGTH } else { 100 };
                for _ in 0..10 {
                    let mut batch = [ours.entry(0, length, theirs, 0)];
                    path.transfer(Opcode::Write, &mut batch, soon().into());
                    assert!(moved(&batch[0]), "{:?}", batch[0].outcome);
                }
            });
        }
    });
    let pool = path.connections().unwrap();
    assert!(pool.open <= 4 && pool.idle == pool.open, "{pool:?}");
}

#[test]
fn closed_path_has_no_connections_and_refuses_transfers() {
    let (owner, theirs) = Owner::with_memory(100);
    let path = path_over(&owner, 4);
    let ours = Memory::patterned(100, 8);
    path.transfer(Opcode::Write, &mut [ours.entry(0, 100, &theirs, 0)], soon().into());
    path.close();
    path.close();
    let pool = path.connections().unwrap();
    assert_eq!((pool.open, pool.idle), (0, 0));
    assert!(!path.is_alive());
    let mut batch = [ours.entry(0, 100, &theirs, 0)];
    path.transfer(Opcode::Write, &mut batch, soon().into());
    assert_eq!(outcomes(&batch), [false]);
}
