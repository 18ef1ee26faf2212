//! Clients and their segments: mounting, expiry, graceful unmounting, placement.

use super::*;

#[test]
fn expired_client_loses_its_objects() {
    let mut pool = Pool::new(4);
    pool.mount(B, 2, 4).unwrap();
    let on_b = PutOptions {
        preferred_segments: vec!["nowhere".to_owned(), "host-b:1".to_owned()],
        ..PutOptions::default()
    };
    let both = PutOptions { replicas: 2, ..PutOptions::default() };
    pool.put_with("b", MIB, false, &on_b).unwrap();
    pool.put_with("both", MIB, false, &both).unwrap();
    pool.put("a", MIB).unwrap();
    for _ in 0..10 {
        pool.now = pool.now + Duration::from_secs(1);
        pool.state.heartbeat(pool.now, A);
        pool.state.advance(pool.now);
    }
    assert_eq!(pool.state.totals().clients, 1);
    pool.advance_all();
    assert!(!pool.exists("b"));
    assert_eq!(pool.locate("both", false, false).unwrap().places.len(), 1);
    assert!(!pool.state.heartbeat(pool.now, B));
    assert_eq!(pool.state.registration(B), 0);
    fails(pool.mount(B, 2, 4), ErrorCode::CLIENT_NOT_FOUND);
    assert_eq!(pool.state.totals().capacity, 4 * MIB);
    assert_eq!(pool.state.inventory.segments().slot_count(), 2, "and its number can be used again");
    pool.state.register(pool.now, B, "host-b:1").unwrap();
    pool.mount(B, 3, 4).unwrap();
    assert_eq!(pool.state.inventory.segments().slot_count(), 2);
    let again = pool.state.registration(B);
    assert!(again > pool.state.registration(A), "the new registration differs from the first");
    pool.state.register(pool.now, B, "host-b:1").unwrap();
    assert_eq!(pool.state.registration(B), again, "known all the while");
}

#[test]
fn evictions_that_ssd_offload_would_write_are_counted() {
    let mut pool = Pool::new(4);
    let missed = |pool: &Pool| pool.state.totals().counters.offloads_missed;
    let fill = |pool: &mut Pool, name: &str| {
        for at in 0..8 {
            pool.put(&format!("{name}{at}"), MIB).unwrap();
        }
    };
    fill(&mut pool, "a");
    assert_eq!((missed(&pool), pool.state.totals().counters.evicted_keys), (0, 4));
    pool.state.set_wants_offload(A, true);
    pool.state.set_wants_offload(ClientId::from_bits(77), true);
    fill(&mut pool, "b");
    assert_eq!((missed(&pool), pool.state.totals().counters.evicted_keys), (8, 12));
    pool.state.set_wants_offload(A, false);
    fill(&mut pool, "c");
    assert_eq!(missed(&pool), 8);
}

#[test]
fn suspect_is_skipped_until_heartbeat() {
    let mut pool = Pool::new(4);
    pool.put("k", MIB).unwrap();
    pool.state.suspect(pool.now, A);
    fails(pool.locate("k", true, true), ErrorCode::TRANSFER_FAIL);
    assert!(!pool.exists("k"));
    assert_eq!(pool.list(Selector::All, None, 0), (vec![], true), "as a probe");
    fails(pool.put("new", MIB), ErrorCode::NO_AVAILABLE_HANDLE);
    assert!(pool.state.heartbeat(pool.now, A));
    assert!(pool.exists("k"));
    assert_eq!(pool.list(Selector::All, None, 0).0, ["k"]);
    pool.locate("k", true, true).unwrap();
    pool.put("new", MIB).unwrap();
}

#[test]
fn unreachable_object_can_be_put_again() {
    let mut pool = Pool::new(4);
    let first = pool.put("k", MIB).unwrap();
    let kept = pool.put("kept", MIB).unwrap();
    pool.mount(B, 2, 4).unwrap();
    pool.state.suspect(pool.now, A);
    // A put that fails leaves the old value to its holder.
    let failed = pool.start(B, "kept", MIB).unwrap();
    assert_eq!(pool.probe("kept"), ObjectState::Writing);
    fails(pool.start(B, "kept", MIB), ErrorCode::OBJECT_ALREADY_EXISTS);
    let unfinished = pool.state.unfinished_put(B, &pool.tenant, b"kept").unwrap();
    assert_eq!(unfinished.version, failed.version);
    pool.revoke(B, "kept", &failed).unwrap();
    let second = pool.start(B, "k", MIB).unwrap();
    pool.end(B, "k", &second).unwrap();
    assert!(pool.exists("k") && !pool.exists("kept"));
    fails(pool.start(B, "k", MIB), ErrorCode::OBJECT_ALREADY_EXISTS);
    assert!(pool.state.heartbeat(pool.now, A));
    let found = pool.locate("k", false, false).unwrap();
    assert_eq!(found.version, second.version);
    assert!(found.version > first.version);
    assert_eq!(pool.locate("kept", false, false).unwrap().version, kept.version);
    fails(pool.start(B, "kept", MIB), ErrorCode::OBJECT_ALREADY_EXISTS);
}

#[test]
fn holder_that_returns_does_not_undo_put() {
    let mut pool = Pool::new(4);
    let first = pool.put("k", MIB).unwrap();
    pool.mount(B, 2, 4).unwrap();
    pool.state.suspect(pool.now, A);
    let second = pool.start(B, "k", MIB).unwrap();
    pool.state.heartbeat(pool.now, A);
    assert_eq!(pool.locate("k", false, false).unwrap().version, first.version);
    pool.end(B, "k", &second).unwrap();
    assert_eq!(pool.locate("k", false, false).unwrap().version, second.version);
    // A client that left counts no longer as suspect.
    for client in [A, B] {
        pool.state.suspect(pool.now, client);
        pool.state.suspect(pool.now, client);
        pool.state.unregister(pool.now, client);
    }
    assert!(!pool.state.inventory.clients().has_suspects());
}

#[test]
fn remount_is_idempotent_per_incarnation() {
    let mut pool = Pool::new(4);
    pool.put("k", MIB).unwrap();
    pool.mount(A, 1, 4).unwrap();
    assert!(pool.exists("k"));
    fails(pool.mount(A, 1, 5), ErrorCode::SEGMENT_ALREADY_EXISTS);
    fails(pool.mount(B, 1, 4), ErrorCode::SEGMENT_ALREADY_EXISTS);
    pool.state.mount(pool.now, A, spec(A, 1, 2, 8)).unwrap();
    assert_eq!(pool.probe("k"), ObjectState::Absent);
    assert_eq!(pool.state.totals().capacity, 8 * MIB);
    pool.put("k", 8 * MIB).unwrap();
    let overlapping = SegmentSpec { base: spec(A, 1, 1, 1).base + 1, ..spec(A, 7, 1, 1) };
    fails(pool.state.mount(pool.now, A, overlapping), ErrorCode::INVALID_PARAMS);
    fails(pool.mount(A, 8, 0), ErrorCode::INVALID_PARAMS);
    let beyond = SegmentSpec { base: u64::MAX, ..spec(A, 9, 1, 1) };
    fails(pool.state.mount(pool.now, A, beyond), ErrorCode::INVALID_PARAMS);
}

#[test]
fn remounted_memory_is_quarantined_while_readable() {
    let mut pool = Pool::new(4);
    pool.put("k", MIB).unwrap();
    pool.wait(30);
    pool.locate("k", false, true).unwrap();
    pool.state.unmount(pool.now, A, SegmentId::from_bits(1), Duration::ZERO).unwrap();
    pool.mount(A, 1, 4).unwrap();
    fails(pool.put("new", MIB), ErrorCode::NO_AVAILABLE_HANDLE);
    pool.wait(3);
    pool.put("new", MIB).unwrap();
}

#[test]
fn unmounting_segment_is_read_but_not_written() {
    let mut pool = Pool::new(4);
    pool.put("k", MIB).unwrap();
    let segment = SegmentId::from_bits(1);
    let grace = Duration::from_secs(5);
    fails(pool.state.unmount(pool.now, B, segment, grace), ErrorCode::ILLEGAL_CLIENT);
    pool.state.unmount(pool.now, A, segment, grace).unwrap();
    assert_eq!(pool.state.list_segments()[0].status, SegmentStatus::GracefullyUnmounting);
    pool.locate("k", true, true).unwrap();
    fails(pool.put("new", MIB), ErrorCode::NO_AVAILABLE_HANDLE);
    pool.wait(5);
    assert!(pool.state.list_segments().is_empty());
    assert_eq!((pool.probe("k"), pool.state.totals().keys), (ObjectState::Absent, 0));
    let again = pool.state.unmount(pool.now, A, segment, grace);
    fails(again, ErrorCode::SEGMENT_NOT_FOUND);
}

#[test]
fn put_fails_when_its_segment_is_removed() {
    let mut pool = Pool::new(4);
    let started = pool.start(A, "k", MIB).unwrap();
    pool.state.unmount(pool.now, A, SegmentId::from_bits(1), Duration::ZERO).unwrap();
    fails(pool.end(A, "k", &started), ErrorCode::REPLICA_IS_GONE);
    assert_eq!(pool.probe("k"), ObjectState::Absent);
}

#[test]
fn each_strategy_places_as_named() {
    let place = |allocation: AllocationStrategy| {
        let mut pool = Pool::with(Rules { allocation, ..Rules::default() }, 8);
        pool.mount(B, 2, 64).unwrap();
        let mut hosts = std::collections::BTreeMap::<String, u32>::new();
        for index in 0..8 {
            let started = pool.put(&format!("k{index}"), MIB / 2).unwrap();
            let segment = pool.state.segment(started.places[0].segment);
            *hosts.entry(segment.spec.name.clone()).or_default() += 1;
        }
        (hosts.get("host-a:1").copied(), hosts.get("host-b:1").copied())
    };
    assert_eq!(place(AllocationStrategy::LocalFirst), (Some(8), None));
    let (a, b) = place(AllocationStrategy::FreeRatioFirst);
    assert!(a.unwrap_or(0) <= 2 && b.unwrap() >= 6);
    let (a, b) = place(AllocationStrategy::Random);
    assert!(a.is_some() && b.is_some());
    let (a, b) = place(AllocationStrategy::SsdFreeRatioFirst);
    assert!(a.unwrap_or(0) <= 2 && b.unwrap() >= 6, "by memory, since no disk is reported");
}

#[test]
fn cxl_strategy_prefers_but_does_not_require_cxl() {
    let rules = Rules { allocation: AllocationStrategy::CxlFirst, ..Rules::default() };
    let mut pool = Pool::with(rules, 8);
    let cxl = SegmentSpec { protocol: "cxl".to_owned(), ..spec(B, 2, 1, 2) };
    pool.state.mount(pool.now, B, cxl).unwrap();
    let mut place = |key: &str| {
        let started = pool.put(key, MIB).unwrap();
        pool.state.segment(started.places[0].segment).spec.name.clone()
    };
    let hosts = ["a", "b", "c"].map(&mut place);
    assert_eq!(hosts, ["host-b:1", "host-b:1", "host-a:1"], "then any segment with space");
}

#[test]
fn same_seed_gives_same_results() {
    let run = || {
        let mut pool = Pool::new(8);
        pool.mount(B, 2, 8).unwrap();
        (0..40).map(|index| pool.put(&format!("k{index}"), MIB).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(run(), run());
}

#[test]
fn memory_of_dead_writer_is_free_once_nothing_is_late() {
    let expire = |is_disconnected: bool| {
        let mut pool = Pool::new(4);
        pool.start(B, "k", 4 * MIB).unwrap();
        pool.state.suspect(pool.now, B);
        if is_disconnected {
            pool.state.record_disconnect(B);
        }
        let mut seconds = 0;
        while pool.put("new", 4 * MIB).is_err() {
            seconds += 1;
            pool.now = pool.now + Duration::from_secs(1);
            pool.state.heartbeat(pool.now, A);
            pool.advance_all();
        }
        seconds
    };
    let late_end = late_end().as_secs();
    assert_eq!(expire(true), late_end, "its host closed the connection");
    assert_eq!(expire(false), Rules::default().put_release.as_secs(), "it may only be stopped");
}

#[test]
fn heartbeat_after_a_disconnect_shows_a_live_writer() {
    let mut pool = Pool::new(4);
    pool.start(B, "k", 4 * MIB).unwrap();
    pool.state.record_disconnect(B);
    pool.state.heartbeat(pool.now, B);
    for _ in 0..100 {
        pool.now = pool.now + Duration::from_secs(1);
        pool.state.heartbeat(pool.now, A);
        pool.advance_all();
    }
    assert_eq!(pool.state.totals().clients, 1);
    fails(pool.put("new", 4 * MIB), ErrorCode::NO_AVAILABLE_HANDLE);
}

#[test]
fn client_has_a_limited_number_of_segments() {
    let rules = Rules { segments_per_client_max: 3, ..Rules::default() };
    let mut pool = Pool::with(rules, 1);
    pool.mount(A, 2, 1).unwrap();
    pool.mount(A, 3, 1).unwrap();
    let error = fails(pool.mount(A, 4, 1), ErrorCode::INVALID_PARAMS);
    assert!(error.to_string().contains("limit=3"), "{error}");
    pool.mount(A, 3, 1).unwrap();
    pool.mount(B, 5, 1).unwrap();
    pool.state.unmount(pool.now, A, SegmentId::from_bits(2), Duration::ZERO).unwrap();
    pool.mount(A, 4, 1).unwrap();
}

#[test]
fn indices_of_segments_agree_with_the_segments() {
    let mut pool = Pool::new(1);
    for round in 0..200_u128 {
        let client = if round % 3 == 0 { A } else { B };
        match round % 5 {
            0 => pool.state.suspect(pool.now, client),
            1 => {
                pool.state.heartbeat(pool.now, client);
            }
            2 => {
                let _ = pool.state.unmount(
                    pool.now,
                    client,
                    SegmentId::from_bits(2 + round / 3),
                    Duration::from_secs((round % 2) as u64),
                );
            }
            _ => {
                let _ = pool.mount(client, 2 + round, 1);
            }
        }
        let segments = pool.state.inventory.segments();
        let mut open: Vec<_> = segments.open().to_vec();
        let mut by_host: Vec<_> = segments.open_from("host-b").collect();
        let accepting = segments.mounted().filter(|(_, segment)| segment.accepts_new());
        let accepting: Vec<_> = accepting.map(|(slot, _)| slot).collect();
        let hosts: Vec<_> = by_host.iter().map(|&slot| &*segments.at(slot).host).collect();
        let turn = hosts.partition_point(|&host| host >= "host-b");
        assert!(hosts[turn..].iter().all(|&host| host < "host-b"), "around the circle: {hosts:?}");
        open.sort_unstable();
        by_host.sort_unstable();
        assert_eq!((&open, &by_host), (&accepting, &accepting));
        for client in [A, B] {
            let mut own = segments.of_client(client);
            own.sort_unstable();
            let mounted = segments.mounted().filter(|(_, segment)| segment.client == client);
            assert_eq!(own, mounted.map(|(slot, _)| slot).collect::<Vec<_>>());
        }
        let used: u64 = segments.mounted().map(|(_, segment)| segment.allocator.used()).sum();
        assert_eq!(segments.used_bytes, used);
    }
}

#[test]
fn avoided_endpoints_are_used_only_if_nothing_else_has_room() {
    let mut pool = Pool::new(4);
    pool.mount(B, 2, 2).unwrap();
    let start = |pool: &mut Pool, key: &str, avoided: &[&str]| {
        let endpoints: Vec<_> = avoided.iter().map(|&host| host.to_owned()).collect();
        let put_owner = pool.state.puts().put_owner(pool.now, A, &pool.tenant).unwrap();
        let put_owner = pool.state.puts().avoiding(put_owner, &endpoints);
        let options = PutOptions { replicas: 2, ..PutOptions::default() };
        let key = KeyRef::new(key.as_bytes()).unwrap();
        let keys = std::iter::once(key.as_bytes());
        let hash = pool.state.puts().prefetch_hashes(Some(&put_owner), keys)[0];
        let (length, group) = (MIB, &b""[..]);
        let put = Put {
            key,
            length,
            group,
            options: &options,
            is_replacing: false,
            if_version: None,
            request: 0,
        };
        let mut progress = PutProgress::default();
        let started = loop {
            let state = &mut pool.state;
            match state
                .puts()
                .put_step_hashed(pool.now, &put_owner, hash, &put, &mut progress)
                .unwrap()
            {
                PutStep::Started(started) => break started,
                PutStep::Pending(pending) => assert!(matches!(pending, Pending::Yield)),
            }
        };
        let segment = |place: &Place| pool.state.inventory.segment(place.segment).spec.id.bits();
        let mut used: Vec<u128> = started.places.iter().map(segment).collect();
        used.sort_unstable();
        used
    };
    assert_eq!(start(&mut pool, "both", &[]), [1, 2]);
    assert_eq!(start(&mut pool, "not on 1", &["host-a:1"]), [2]);
    // Segment 2 is full now, and nothing in it can be evicted.
    assert_eq!(start(&mut pool, "on 1 after all", &["host-a:1"]), [1]);
    assert_eq!(start(&mut pool, "nowhere else", &["host-a:1", "host-b:1"]), [1]);
}

#[test]
fn expired_client_is_reported_with_its_copies() {
    let mut pool = Pool::new(4);
    pool.put("k", MIB).unwrap();
    pool.put("l", MIB).unwrap();
    while pool.exists("k") {
        pool.now = pool.now + Duration::from_secs(1);
        pool.state.heartbeat(pool.now, B);
        pool.advance_all();
    }
    let gone = ExpiredClient { id: A, segments: 1, copies: 2, bytes: 2 * MIB };
    assert_eq!(pool.state.take_expired(), [gone]);
    assert_eq!(pool.state.take_expired(), []);
}

/// The cost of a put must not grow with avoided peers times segments.
#[test]
fn avoided_peers_are_looked_up_per_segment_only_once() {
    let rules = Rules { segments_per_client_max: usize::MAX, ..Rules::default() };
    let mut pool = Pool::with(rules, 1);
    let peers = 500_u128;
    for id in 2..2 + 4 * peers {
        let mut segment = spec(A, id, 1, 1);
        segment.endpoint = format!("peer-{}:1", id % peers);
        pool.state.mount(pool.now, A, segment).unwrap();
    }
    let avoided: Vec<String> = (0..peers).map(|peer| format!("peer-{peer}:1")).collect();
    let owner = |pool: &mut Pool, endpoints: &[String]| {
        let owner = pool.state.puts().put_owner(pool.now, A, &pool.tenant).unwrap();
        pool.state.puts().avoiding(owner, endpoints).avoided_segments()
    };
    assert_eq!(owner(&mut pool, &avoided[..10]).len(), 40);
    assert_eq!(owner(&mut pool, &avoided).len(), 4 * 256, "the first 256 peers are avoided");
    // Peers that left are not looked for.
    pool.state.unmount(pool.now, A, SegmentId::from_bits(peers), Duration::ZERO).unwrap();
    assert_eq!(owner(&mut pool, &avoided[..1]).len(), 3);
    // Most segments are avoided: a put looks at each candidate once.
    let before = pool.state.steps();
    let put_owner = pool.state.puts().put_owner(pool.now, A, &pool.tenant).unwrap();
    let put_owner = pool.state.puts().avoiding(put_owner, &avoided[..200]);
    let key = KeyRef::new(b"k").unwrap();
    let hash = pool.state.puts().prefetch_hashes(Some(&put_owner), [&b"k"[..]].into_iter())[0];
    let options = PutOptions::default();
    let (length, group) = (MIB, &b""[..]);
    let put = Put {
        key,
        length,
        group,
        options: &options,
        is_replacing: false,
        if_version: None,
        request: 0,
    };
    let mut progress = PutProgress::default();
    let now = pool.now;
    let step = pool.state.puts().put_step_hashed(now, &put_owner, hash, &put, &mut progress);
    assert!(matches!(step, Ok(PutStep::Started(_))), "{step:?}");
    assert!(pool.state.steps() - before <= 8);
}
