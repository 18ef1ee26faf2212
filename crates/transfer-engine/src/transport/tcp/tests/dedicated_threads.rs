//! Connections with bursts of requests are served by dedicated threads.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::support::{Memory, Owner, WireProtocol, moved, soon};
use crate::{transfer_entry::Opcode, transport::Path};

const BYTES: usize = 4096;

/// Moves small entries one at a time until the owner uses that many dedicated threads.
fn send_burst(path: &dyn Path, owner: &Owner, theirs: &Memory, threads: usize) {
    let ours = Memory::patterned(BYTES, 5);
    let until = Instant::now() + Duration::from_secs(30);
    while owner.server.dedicated_threads_in_use() < threads {
        assert!(Instant::now() < until, "no dedicated thread was assigned");
        let mut batch = [ours.entry(0, BYTES, theirs, 0)];
        path.transfer(Opcode::Write, &mut batch, soon().into());
        assert!(moved(&batch[0]), "{batch:?}");
    }
}

fn wait_until_all_free(owner: &Owner) {
    let until = Instant::now() + Duration::from_secs(30);
    while owner.server.dedicated_threads_in_use() > 0 {
        assert!(Instant::now() < until, "a dedicated thread was not returned");
        thread::park_timeout(Duration::from_millis(2));
    }
}

#[test]
fn burst_gets_a_dedicated_thread_until_idle() {
    let (owner, theirs) = Owner::with_memory(BYTES);
    let path = owner.path(WireProtocol::Native);
    for round in 0..3 {
        send_burst(&*path, &owner, &theirs, 1);
        wait_until_all_free(&owner);
        let ours = Memory::patterned(BYTES, round);
        let mut batch = [ours.entry(0, BYTES, &theirs, 0)];
        path.transfer(Opcode::Write, &mut batch, soon().into());
        assert!(moved(&batch[0]) && ours.bytes() == theirs.bytes());
        assert_eq!(owner.server.connections().open, 1);
    }
}

#[test]
fn serves_more_bursts_than_dedicated_threads() {
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
                    let mut write = [ours.entry(0, BYTES, theirs, caller * BYTES)];
                    path.transfer(Opcode::Write, &mut write, soon().into());
                    let mut read = [back.entry(0, BYTES, theirs, caller * BYTES)];
                    path.transfer(Opcode::Read, &mut read, soon().into());
                    assert!(moved(&write[0]) && moved(&read[0]), "{write:?} {read:?}");
                    assert!(back.bytes() == ours.bytes(), "caller {caller} round {round}");
                }
            });
        }
    });
    wait_until_all_free(&owner);
}

#[test]
fn close_ends_dedicated_threads_and_releases_memory() {
    let (owner, theirs) = Owner::with_memory(BYTES);
    let path = owner.path(WireProtocol::Native);
    send_burst(&*path, &owner, &theirs, 1);
    owner.server.close();
    wait_until_all_free(&owner);
    owner.unregister(&theirs);
    let ours = Memory::zeroed(BYTES);
    let mut batch = [ours.entry(0, BYTES, &theirs, 0)];
    path.transfer(Opcode::Read, &mut batch, soon().into());
    assert!(!moved(&batch[0]));
}

#[test]
fn unregisters_memory_used_by_a_dedicated_thread() {
    let (owner, theirs) = Owner::with_memory(BYTES);
    let path = owner.path(WireProtocol::Native);
    send_burst(&*path, &owner, &theirs, 1);
    thread::scope(|scope| {
        let caller = scope.spawn(|| {
            let ours = Memory::zeroed(BYTES);
            loop {
                let mut batch = [ours.entry(0, BYTES, &theirs, 0)];
                path.transfer(Opcode::Read, &mut batch, soon().into());
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
