//! Loopback tests of both protocols: client against server, and each against a hand-written
//! counterpart.

mod compat;
mod dedicated_threads;
mod faults;
mod request_window;
mod strangers;
mod support;
mod token;

use mooncake_base::ErrorKind;

use self::support::{AT_ONCE, Memory, Owner, WireProtocol, entries, moved, outcomes, soon};
use super::*;
use crate::transfer_entry::{Opcode, TransferEntry};

const PAYLOAD_BYTES_MAX: usize = data_frame::PAYLOAD_BYTES_MAX as usize;

#[test]
fn moves_any_length_in_both_directions() {
    for protocol in WireProtocol::ALL {
        let owner = Owner::start("127.0.0.1");
        let path = owner.path(protocol);
        let sizes = [1, 7, 4096, 65_537, 1 << 20, 8 << 20, PAYLOAD_BYTES_MAX + 3];
        for length in sizes {
            let theirs = Memory::patterned(length, 1);
            let _region = owner.lend(&theirs);
            let ours = Memory::patterned(length, 2);
            path.transfer(Opcode::Write, &mut [ours.entry(0, length, &theirs, 0)], soon().into());
            let back = Memory::zeroed(length);
            let mut read = [back.entry(0, length, &theirs, 0)];
            path.transfer(Opcode::Read, &mut read, soon().into());
            assert!(moved(&read[0]), "{protocol:?} {length} {:?}", read[0].outcome);
            assert!(back.bytes() == ours.bytes(), "{protocol:?} {length}");
            assert!(theirs.bytes() == ours.bytes(), "{protocol:?} {length}");
            owner.unregister(&theirs);
        }
    }
}

#[test]
fn acknowledged_writes_have_been_applied() {
    for protocol in [WireProtocol::Native, WireProtocol::CompatV2] {
        let (owner, theirs) = Owner::with_memory(100_000);
        let path = owner.path(protocol);
        for seed in 0..50 {
            let ours = Memory::patterned(100_000, seed);
            let mut batch = [ours.entry(0, 100_000, &theirs, 0)];
            path.transfer(Opcode::Write, &mut batch, soon().into());
            assert!(moved(&batch[0]));
            assert!(theirs.bytes() == ours.bytes(), "{protocol:?}");
        }
    }
}

#[test]
fn moves_batches_of_20000_entries() {
    const COUNT: usize = 20_000;
    let length = |index: usize| 1 + index % 61;
    let (owner, theirs) = Owner::with_memory(COUNT * 64);
    let ours = Memory::patterned(COUNT * 64, 3);
    let back = Memory::zeroed(COUNT * 64);
    let path = owner.path(WireProtocol::Native);
    let batch = |local: &Memory| -> Vec<TransferEntry> {
        (0..COUNT)
            .map(|index| {
                // The peer's ranges in reverse order.
                let theirs_at = (COUNT - 1 - index) * 64;
                local.part(index * 64, length(index), theirs.address() + theirs_at as u64)
            })
            .collect()
    };
    for (opcode, local) in [(Opcode::Write, &ours), (Opcode::Read, &back)] {
        let mut entries = batch(local);
        path.transfer(opcode, &mut entries, soon().into());
        assert!(entries.iter().all(moved));
    }
    let (ours, back) = (ours.bytes(), back.bytes());
    for index in 0..COUNT {
        let range = index * 64..index * 64 + length(index);
        assert_eq!(back[range.clone()], ours[range], "{index}");
    }
}

#[test]
fn refused_ranges_do_not_fail_others() {
    for protocol in [WireProtocol::Native, WireProtocol::CompatV2] {
        let (owner, theirs) = Owner::with_memory(1000);
        let path = owner.path(protocol);
        for opcode in [Opcode::Write, Opcode::Read] {
            let ours = Memory::patterned(500, 4);
            let mut batch = entries(&ours, 100, |index| match index {
                1 => 8,                      // not registered
                3 => theirs.address() + 950, // ends outside the region
                _ => theirs.address() + 100 * index as u64,
            });
            path.transfer(opcode, &mut batch, soon().into());
            assert_eq!(outcomes(&batch), [true, false, true, false, true], "{protocol:?}");
            let error = batch[3].outcome.take().unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TransferFailed);
            assert!(error.to_string().contains("not in a registered range"), "{error}");
            for index in [0, 2, 4] {
                let range = index * 100..index * 100 + 100;
                assert_eq!(ours.bytes()[range.clone()], theirs.bytes()[range], "{protocol:?}");
            }
            assert!(path.is_alive());
        }
    }
}

#[test]
fn skips_finished_entries_and_completes_empty_ones() {
    let (owner, theirs) = Owner::with_memory(100);
    let ours = Memory::patterned(100, 5);
    let mut batch = entries(&ours, 50, |_| theirs.address());
    batch[0].outcome = Some(Ok(()));
    batch.push(ours.part(0, 0, 8));
    owner.path(WireProtocol::Native).transfer(Opcode::Write, &mut batch, soon().into());
    assert_eq!(outcomes(&batch), [true, true, true]);
    assert_eq!(theirs.bytes()[..50], ours.bytes()[50..]);
}

#[test]
fn serves_ipv4_and_ipv6_addresses() {
    let owner = Owner::start("::1");
    let theirs = Memory::patterned(10, 6);
    let _region = owner.lend(&theirs);
    for protocol in WireProtocol::ALL {
        for host in ["::1", "[::1]"] {
            let mut descriptor = owner.descriptor(protocol);
            descriptor.tcp_data_host = host.to_owned();
            let path =
                TcpTransport::new(TcpSettings::default()).connect(&descriptor, soon()).unwrap();
            let back = Memory::zeroed(10);
            path.transfer(Opcode::Read, &mut [back.entry(0, 10, &theirs, 0)], soon().into());
            assert_eq!(back.bytes(), theirs.bytes());
        }
    }
}

#[test]
fn many_threads_share_few_connections() {
    let settings = TcpServerSettings { connections_max: 4, ..TcpServerSettings::default() };
    let owner = Owner::start_with("127.0.0.1:0", settings);
    let theirs = Memory::patterned(64 * 1000, 7);
    let _region = owner.lend(&theirs);
    let path = owner.path(WireProtocol::Native);
    std::thread::scope(|scope| {
        for thread in 0..64 {
            let (path, theirs) = (&path, &theirs);
            scope.spawn(move || {
                for _ in 0..20 {
                    let back = Memory::zeroed(1000);
                    let mut batch = [back.entry(0, 1000, theirs, thread * 1000)];
                    path.transfer(Opcode::Read, &mut batch, soon().into());
                    assert!(moved(&batch[0]), "{:?}", batch[0].outcome);
                    assert_eq!(back.bytes(), theirs.bytes()[thread * 1000..][..1000]);
                }
            });
        }
    });
    // The server would have ended a connection to make room for a fifth one.
    assert_eq!(owner.server.connections().refused, 0);
}

#[test]
fn closing_the_server_closes_its_connections() {
    let (owner, theirs) = Owner::with_memory(10);
    let path = owner.path(WireProtocol::Native);
    let begin = std::time::Instant::now();
    owner.server.close();
    owner.server.close();
    assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
    let back = Memory::zeroed(10);
    let mut batch = [back.entry(0, 10, &theirs, 0)];
    path.transfer(Opcode::Read, &mut batch, soon().into());
    assert_eq!(outcomes(&batch), [false]);
    assert!(!path.is_alive());
    let refused = TcpTransport::new(TcpSettings::default())
        .connect(&owner.descriptor(WireProtocol::Native), soon())
        .unwrap_err();
    assert!(refused.to_string().contains("127.0.0.1"), "{refused}");
}

#[test]
fn segment_without_data_listener_has_no_path() {
    let descriptor = SegmentDescriptor { name: "h:1".into(), ..SegmentDescriptor::default() };
    let error = TcpTransport::new(TcpSettings::default()).connect(&descriptor, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotSupported);
}

#[test]
fn regions_can_be_unregistered_after_a_transfer() {
    let (owner, theirs) = Owner::with_memory(10);
    let path = owner.path(WireProtocol::Native);
    let back = Memory::zeroed(10);
    path.transfer(Opcode::Read, &mut [back.entry(0, 10, &theirs, 0)], soon().into());
    // The pins are released right after the response was sent.
    owner.unregister(&theirs);
    let mut batch = [back.entry(0, 10, &theirs, 0)];
    path.transfer(Opcode::Read, &mut batch, soon().into());
    let error = batch[0].outcome.take().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TransferFailed);
    // The connection can be reused although the response contained only a refusal.
    drop(owner.lend(&theirs));
    let mut batch = [back.entry(0, 10, &theirs, 0)];
    path.transfer(Opcode::Read, &mut batch, soon().into());
    assert_eq!(outcomes(&batch), [true]);
}
