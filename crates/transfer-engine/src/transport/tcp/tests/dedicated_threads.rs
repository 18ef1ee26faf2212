//! Connections whose requests come thick and fast are served by threads of their own.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::support::{Memory, Owner, WireProtocol, moved, soon};
use crate::{piece::Opcode, transport::Path};

const BYTES: usize = 4096;

/// Moves small pieces, one at a time, until the owner has given so many connections a seat.
fn send_burst(path: &dyn Path, owner: &Owner, theirs: &Memory, seats: usize) {
    let ours = Memory::patterned(BYTES, 5);
    let until = Instant::now() + Duration::from_secs(30);
    while owner.server.dedicated_threads_in_use() < seats {
        assert!(Instant::now() < until, "nobody was given a seat");
        let mut batch = [ours.piece(0, BYTES, theirs, 0)];
        path.transfer(Opcode::Write, &mut batch, soon());
        assert!(moved(&batch[0]), "{batch:?}");
    }
}

fn wait_until_all_free(owner: &Owner) {
    let until = Instant::now() + Duration::from_secs(30);
    while owner.server.dedicated_threads_in_use() > 0 {
        assert!(Instant::now() < until, "a seat was not given back");
        thread::park_timeout(Duration::from_millis(2));
    }
}

#[test]
fn a_seat_is_taken_in_haste_and_given_back_in_peace() {
    let (owner, theirs) = Owner::with_memory(BYTES);
    let path = owner.path(WireProtocol::Native);
    for round in 0..3 {
        send_burst(&*path, &owner, &theirs, 1);
        wait_until_all_free(&owner);
        let ours = Memory::patterned(BYTES, round);
        let mut batch = [ours.piece(0, BYTES, &theirs, 0)];
        path.transfer(Opcode::Write, &mut batch, soon());
        assert!(moved(&batch[0]) && ours.bytes() == theirs.bytes());
        assert_eq!(owner.server.connections().open, 1);
    }
}

#[test]
fn more_busy_connections_than_seats_are_all_served() {
    const CALLERS: usize = 12;
    let (owner, theirs) = Owner::with_memory(CALLERS * BYTES);
    thread::scope(|scope| {
        for caller in 0..CALLERS {
            let (owner, theirs) = (&owner, &theirs);
            scope.spawn(move || {
                let path = owner.path(WireProtocol::Native);
                for round in 0..300 {
                    let ours = Memory::patterned(BYTES, caller + 7 * round);
                    let back = Memory::zeroed(BYTES);
                    let mut write = [ours.piece(0, BYTES, theirs, caller * BYTES)];
                    path.transfer(Opcode::Write, &mut write, soon());
                    let mut read = [back.piece(0, BYTES, theirs, caller * BYTES)];
                    path.transfer(Opcode::Read, &mut read, soon());
                    assert!(moved(&write[0]) && moved(&read[0]), "{write:?} {read:?}");
                    assert!(back.bytes() == ours.bytes(), "caller {caller} round {round}");
                }
            });
        }
    });
    wait_until_all_free(&owner);
}

#[test]
fn closing_ends_connections_on_seats_and_lets_go_of_memory() {
    let (owner, theirs) = Owner::with_memory(BYTES);
    let path = owner.path(WireProtocol::Native);
    send_burst(&*path, &owner, &theirs, 1);
    owner.server.close();
    wait_until_all_free(&owner);
    owner.unregister(&theirs);
    let ours = Memory::zeroed(BYTES);
    let mut batch = [ours.piece(0, BYTES, &theirs, 0)];
    path.transfer(Opcode::Read, &mut batch, soon());
    assert!(!moved(&batch[0]));
}

#[test]
fn memory_is_taken_back_from_under_a_busy_seat() {
    let (owner, theirs) = Owner::with_memory(BYTES);
    let path = owner.path(WireProtocol::Native);
    send_burst(&*path, &owner, &theirs, 1);
    thread::scope(|scope| {
        let caller = scope.spawn(|| {
            let ours = Memory::zeroed(BYTES);
            loop {
                let mut batch = [ours.piece(0, BYTES, &theirs, 0)];
                path.transfer(Opcode::Read, &mut batch, soon());
                if !moved(&batch[0]) {
                    break;
                }
            }
        });
        owner.unregister(&theirs);
        caller.join().unwrap();
    });
    drop(owner.lend(&theirs));
    send_burst(&*path, &owner, &theirs, 1);
}
