//! Metrics of an engine, and its cost while idle.

use std::time::{Duration, Instant};

use mooncake_transfer_engine::{Engine, EngineConfig, Opcode, TransferEntry, TransportKind};

use crate::{
    child::ChildPeer,
    pair::{Lent, Pair, held, move_one, runtime, soon, start},
};

#[test]
fn counts_bytes_latencies_and_errors_per_transport() {
    for (kind, pair) in [
        (TransportKind::Memory, Pair::over_memory()),
        (TransportKind::Shm, Pair::over_shm()),
        (TransportKind::Tcp, Pair::over_tcp()),
    ] {
        let [lent, _other] = pair.lend(4096);
        pair.write(lent.base(), &mut [1; 100]).unwrap();
        pair.read(lent.base(), &mut [0; 30]).unwrap();
        pair.write(lent.base() + 4096, &mut [1; 1]).unwrap_err();
        let snapshot = pair.near.snapshot();
        let peer = &snapshot.peers[0];
        for transports in [&snapshot.transports, &peer.transports] {
            let one = transports.iter().find(|one| one.kind == kind).unwrap();
            assert_eq!((one.bytes_written, one.bytes_read, one.entries), (100, 30, 2), "{kind}");
            assert_eq!((one.batches, one.errors), (3, 1), "{kind}");
            assert_eq!(one.latency.count(), 3, "{kind}");
            let others = transports.iter().filter(|one| one.kind != kind);
            assert!(others.map(|one| one.batches).sum::<u64>() == 0, "{kind}");
        }
        let page = snapshot.prometheus();
        let line = format!("bytes_total{{transport=\"{kind}\",operation=\"write\"}} 100\n");
        assert!(page.contains(&line), "{page}");
        let far = pair.far.snapshot();
        assert_eq!(far.regions, 2);
        let refused = u64::from(kind == TransportKind::Tcp);
        assert_eq!(far.refused.ranges, refused, "{kind}");
    }
}

#[test]
fn reports_the_transport_used_and_follows_hints() {
    let runtime = runtime();
    let far = start(None, &runtime);
    let near = start(None, &runtime);
    let peer = near.open(far.segment_name(), soon()).unwrap();
    let lent = Lent::shared(&far, 4096);
    let mut bytes = [1; 9];
    let mut over = |hint| {
        let mut entries = [TransferEntry::new(held(&mut bytes), lent.base())];
        near.transfer_hinted(&peer, Opcode::Write, &mut entries, soon(), hint)
    };
    assert_eq!(over(None), Some(TransportKind::Memory));
    for kind in [TransportKind::Tcp, TransportKind::Shm, TransportKind::Memory] {
        assert_eq!(over(Some(kind)), Some(kind));
        assert_eq!(TransportKind::from_name(&kind.name().to_uppercase()), Some(kind));
    }
    // This transport does not exist here, so the engine chooses.
    assert_eq!(over(Some(TransportKind::Rdma)), Some(TransportKind::Memory));
    assert_eq!(TransportKind::from_name("any"), None);
    assert_eq!(near.transfer(&peer, Opcode::Write, &mut [], soon()), None);
}

#[test]
fn measures_every_transport_to_another_process() {
    let runtime = runtime();
    let near = start(None, &runtime);
    let child = ChildPeer::start();
    let peer = near.open(&child.segment, soon()).unwrap();
    let mut bytes = vec![1; 1 << 20];
    let begin = Instant::now();
    loop {
        for _ in 0..32 {
            move_one(&near, &peer, Opcode::Write, (held(&mut bytes), child.user)).unwrap();
        }
        let snapshot = near.snapshot();
        let measured = &snapshot.peers[0].measured;
        let of = |kind| measured.iter().find(|(one, _)| *one == kind).map(|(_, one)| *one);
        if let (Some(shm), Some(tcp)) = (of(TransportKind::Shm), of(TransportKind::Tcp)) {
            assert_eq!((shm.memory(), shm.size), ("process", "1MiB"));
            assert!(shm.bytes_per_second > 1 << 20 && tcp.bytes_per_second > 1 << 20);
            // Both transports have served batches.
            let moved = |kind| {
                let transports = &snapshot.transports;
                transports.iter().find(|one| one.kind == kind).unwrap().batches
            };
            assert!(moved(TransportKind::Shm) > 0 && moved(TransportKind::Tcp) > 0);
            return;
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "{measured:?}");
    }
}

#[test]
fn engine_has_few_threads_idle_and_busy() {
    let count = |child: &ChildPeer| child.threads();
    let runtime = runtime();
    let near = start(Some(TransportKind::Tcp), &runtime);
    let child = ChildPeer::start();
    let idle = count(&child);
    // The test program has its main thread and the thread of the test.
    assert!(idle <= 2 + 8, "{idle}");
    let peer = near.open(&child.segment, soon()).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..64 {
            scope.spawn(|| {
                let mut bytes = vec![1; 100_000];
                for _ in 0..5 {
                    let one = (held(&mut bytes), child.user);
                    move_one(&near, &peer, Opcode::Read, one).unwrap();
                }
            });
        }
        let busy = count(&child);
        assert!(busy <= 2 + 16, "{busy}");
    });
}

#[test]
fn reporting_engine_closes_on_drop() {
    let runtime = runtime();
    let config = EngineConfig {
        name: "127.0.0.1".to_owned(),
        report_interval: Some(Duration::from_millis(10)),
        ..EngineConfig::default()
    };
    let engine = Engine::start(config, runtime.handle().clone()).unwrap();
    let port = engine.rpc_port();
    let peer = engine.open(engine.segment_name(), soon()).unwrap();
    let lent = Lent::shared(&engine, 4096);
    move_one(&engine, &peer, Opcode::Write, (held(&mut [1; 9]), lent.base())).unwrap();
    drop((lent, peer));
    drop(engine);
    let begin = Instant::now();
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_ok() {
        assert!(begin.elapsed() < Duration::from_secs(20), "the port is still open");
    }
}
