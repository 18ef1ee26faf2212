//! Asynchronous batches and notifications.

use mooncake_base::{Clock, ErrorKind, SystemClock};
use mooncake_transfer_engine::{
    BatchId, BatchStatus, Engine, ManagedBuffers, Opcode, TransferEntry, TransportKind,
    discovery::handshake::Notification,
};

use crate::pair::{Lent, Pair, foreign, held, pattern, runtime, soon, start};

const LENGTH: usize = 1 << 20;

fn check_batches(pair: &Pair) {
    let [lent, _other] = pair.lend(LENGTH);
    let mut bytes = pattern(LENGTH, 3);
    for parts in [1, 64, 256] {
        let length = LENGTH / parts;
        let entries = |bytes: &mut [u8]| -> Vec<TransferEntry> {
            let chunks = bytes.chunks_exact_mut(length).enumerate();
            chunks
                .map(|(i, part)| TransferEntry::new(held(part), lent.base() + (i * length) as u64))
                .collect()
        };
        let peer = || std::sync::Arc::clone(&pair.peer);
        let write = pair.near.submit(peer(), Opcode::Write, entries(&mut bytes), soon()).unwrap();
        assert!(matches!(pair.near.wait(&[write]).unwrap()[..], [BatchStatus::Done]));
        let mut back = vec![0; LENGTH];
        let read = pair.near.submit(peer(), Opcode::Read, entries(&mut back), soon()).unwrap();
        while !pair.near.status(read).unwrap().has_ended() {
            std::thread::yield_now();
        }
        assert!(back == bytes, "{parts} parts");
        assert!(pair.near.status(read).is_err(), "the status was already returned");
    }
    pair.near.close(soon());
}

#[test]
fn moves_submitted_batches_within_a_process() {
    check_batches(&Pair::over_memory());
}

#[test]
fn moves_submitted_batches_over_shm() {
    check_batches(&Pair::over_shm());
}

#[test]
fn moves_submitted_batches_over_tcp() {
    check_batches(&Pair::over_tcp());
}

#[test]
fn submitted_batch_follows_the_transport_hint() {
    let runtime = runtime();
    let (near, far) = (start(None, &runtime), start(None, &runtime));
    let lent = Lent::shared(&far, LENGTH);
    for (kind, length) in [TransportKind::Tcp, TransportKind::Shm, TransportKind::Memory]
        .into_iter()
        .flat_map(|kind| [9, LENGTH].map(|length| (kind, length)))
    {
        let moved = |near: &Engine| {
            let transports = near.snapshot().transports;
            transports.iter().find(|one| one.kind == kind).map_or(0, |one| one.bytes_written)
        };
        let before = moved(&near);
        let mut bytes = pattern(length, 1);
        let entries = vec![TransferEntry::new(held(&mut bytes), lent.base())];
        let peer = near.open(far.segment_name(), soon()).unwrap();
        let batch = near.submit_hinted(peer, Opcode::Write, entries, soon(), Some(kind)).unwrap();
        assert!(matches!(near.wait(&[batch]).unwrap()[..], [BatchStatus::Done]));
        assert_eq!(moved(&near) - before, length as u64, "{kind}");
    }
}

#[test]
fn many_batches_of_many_threads_complete() {
    let pair = Pair::over_tcp();
    let [lent, _other] = pair.lend(LENGTH);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (pair, base) = (&pair, lent.base());
            scope.spawn(move || {
                let mut bytes = vec![thread as u8 + 1; 4096];
                let at = base + thread * 4096;
                let batches: Vec<BatchId> = (0..400)
                    .map(|_| {
                        let entries = vec![TransferEntry::new(held(&mut bytes), at)];
                        let peer = std::sync::Arc::clone(&pair.peer);
                        pair.near.submit(peer, Opcode::Write, entries, soon()).unwrap()
                    })
                    .collect();
                let ends = pair.near.wait(&batches).unwrap();
                assert!(ends.iter().all(|end| matches!(end, BatchStatus::Done)));
            });
        }
    });
    let mut back = vec![0; 4 * 4096];
    pair.read(lent.base(), &mut back).unwrap();
    assert!(back.chunks(4096).zip(1..).all(|(part, mark)| part.iter().all(|byte| *byte == mark)));
}

#[test]
fn batch_with_a_bad_entry_fails_and_moves_the_others() {
    let pair = Pair::over_tcp();
    let [lent, _other] = pair.lend(4096);
    let mut bytes = vec![7; 10];
    let beyond = lent.base() + lent.length();
    for bad in [
        TransferEntry::new(held(&mut [1; 10]), beyond),
        TransferEntry::new(foreign(8, 10), lent.base()),
    ] {
        let entries = vec![TransferEntry::new(held(&mut bytes), lent.base() + 100), bad];
        let peer = std::sync::Arc::clone(&pair.peer);
        let batch = pair.near.submit(peer, Opcode::Write, entries, soon()).unwrap();
        assert!(matches!(pair.near.wait(&[batch]).unwrap()[..], [BatchStatus::Failed(_)]));
    }
    let mut back = vec![0; 10];
    pair.read(lent.base() + 100, &mut back).unwrap();
    assert_eq!(back, bytes);
}

#[test]
fn batch_past_its_deadline_has_timed_out() {
    let pair = Pair::over_tcp();
    let [lent, _other] = pair.lend(4096);
    let entries = vec![TransferEntry::new(held(&mut [1; 10]), lent.base())];
    let peer = std::sync::Arc::clone(&pair.peer);
    let batch = pair.near.submit(peer, Opcode::Write, entries, SystemClock.now()).unwrap();
    assert!(matches!(pair.near.wait(&[batch]).unwrap()[..], [BatchStatus::TimedOut(_)]));
}

#[test]
fn unknown_batches_fail_and_empty_batches_are_done() {
    let pair = Pair::over_tcp();
    for number in [0, 1, 77, u64::MAX] {
        let batch = BatchId::from_number(number);
        assert!(pair.near.status(batch).is_err());
        assert!(matches!(pair.near.wait(&[batch]).unwrap()[..], [BatchStatus::Failed(_)]));
    }
    assert!(pair.near.wait(&[]).unwrap().is_empty());
    let peer = std::sync::Arc::clone(&pair.peer);
    let batch = pair.near.submit(peer, Opcode::Write, Vec::new(), soon()).unwrap();
    assert!(matches!(pair.near.status(batch), Ok(BatchStatus::Done)));
}

#[test]
fn batch_is_refused_while_too_many_results_wait() {
    const BATCHES_MAX: usize = 65_536;
    let pair = Pair::over_memory();
    let submit = || {
        let peer = std::sync::Arc::clone(&pair.peer);
        pair.near.submit(peer, Opcode::Write, Vec::new(), soon())
    };
    let batches: Vec<BatchId> = (0..BATCHES_MAX).map(|_| submit().unwrap()).collect();
    let error = submit().unwrap_err();
    assert!(error.to_string().contains("results"), "{error}");
    assert_eq!(pair.near.snapshot().batches.refused, 1);
    assert!(matches!(pair.near.status(batches[0]), Ok(BatchStatus::Done)));
    let last = submit().unwrap();
    let ends = pair.near.wait(&[&batches[1..], &[last]].concat()).unwrap();
    assert!(ends.iter().all(|end| matches!(end, BatchStatus::Done)));
}

#[test]
fn closed_engine_refuses_batches_and_queries() {
    let pair = Pair::over_tcp();
    let peer = std::sync::Arc::clone(&pair.peer);
    let batch = pair.near.submit(peer, Opcode::Write, Vec::new(), soon()).unwrap();
    pair.near.close(soon());
    let peer = std::sync::Arc::clone(&pair.peer);
    let refused = pair.near.submit(peer, Opcode::Write, Vec::new(), soon()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Closed);
    assert_eq!(pair.near.status(batch).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(pair.near.wait(&[batch]).unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn notifications_arrive_once_and_in_order() {
    let pair = Pair::over_tcp();
    for i in 0..20 {
        let notification = Notification { name: "n".to_owned(), message: i.to_string() };
        pair.near.notify(pair.far.segment_name(), &notification, soon()).unwrap();
    }
    let taken = pair.far.take_notifications();
    let messages: Vec<_> = taken.into_iter().map(|taken| taken.message).collect();
    assert_eq!(messages, (0..20).map(|i| i.to_string()).collect::<Vec<_>>());
    assert!(pair.far.take_notifications().is_empty());
    pair.near.probe(pair.far.segment_name(), soon()).unwrap();
    pair.far.close(soon());
    assert!(pair.near.probe(pair.far.segment_name(), soon()).is_err());
}

#[test]
fn notification_is_refused_from_the_length_limit_on() {
    const BYTES_MAX: usize = 1 << 20;
    let pair = Pair::over_tcp();
    let send = |length: usize| {
        let notification = Notification { name: String::new(), message: "x".repeat(length) };
        let checked = pair.near.check_notification(&notification);
        let sent = pair.near.notify(pair.far.segment_name(), &notification, soon());
        assert_eq!(checked.is_ok(), sent.is_ok());
        sent
    };
    let overhead = Notification::default().to_json().len() + 1;
    send(BYTES_MAX - overhead).unwrap();
    let error = send(BYTES_MAX - overhead + 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.to_string().contains("MC_HANDSHAKE_MAX_LENGTH"), "{error}");
    assert_eq!(pair.far.take_notifications().len(), 1);
}

#[test]
fn managed_buffers_are_accessible_until_freed() {
    let pair = Pair::over_shm();
    let buffers = ManagedBuffers::new(pair.far.clone());
    let address = buffers.allocate(10_000).unwrap();
    let mut bytes = pattern(10_000, 9);
    pair.write(address, &mut bytes).unwrap();
    let mut back = vec![0; 10_000];
    pair.read(address, &mut back).unwrap();
    assert!(back == bytes);
    let large = buffers.allocate((256 << 20) + 1).unwrap();
    pair.write(large + (256 << 20), &mut [1]).unwrap();
    buffers.free(large, (256 << 20) + 1).unwrap();
    assert!(pair.write(large, &mut [1]).is_err());
    assert!(buffers.free(large, (256 << 20) + 1).is_err());
    buffers.free(address, 10_000).unwrap();
    assert!(buffers.free(address, 10_000).is_err());
    drop(buffers);
    assert!(pair.write(address, &mut [1]).is_err());
}

#[test]
fn registers_ranges_all_or_none_and_in_order() {
    let runtime = runtime();
    let engine = start(None, &runtime);
    let registry = engine.regions();
    let memory = [0_u8; 100];
    let at = |offset| memory.as_ptr() as u64 + offset;
    registry.register_all(&[(at(50), 10), (at(0), 10)], "*").unwrap();
    assert!(registry.register_all(&[(at(20), 10), (at(53), 1)], "*").is_err());
    let described = engine.metadata().resolve(engine.segment_name(), soon()).unwrap();
    let bases: Vec<_> = described.buffers.iter().map(|buffer| buffer.addr).collect();
    assert_eq!(bases, [at(50), at(0)]);
    assert!(registry.unregister_all(&[at(50), 77, at(0)]).is_err());
    assert!(registry.all().is_empty());
}
