//! Puts: start, end, revoke, displacement, upsert, eviction.

use super::*;
use crate::state::tests::{recovery, recovery::Log};

#[test]
fn put_is_visible_after_end_and_keeps_first_value() {
    let mut pool = Pool::new(16);
    let started = pool.start(A, "k", MIB).unwrap();
    assert_eq!(pool.probe("k"), ObjectState::Writing);
    fails(pool.locate("k", true, true), ErrorCode::REPLICA_IS_NOT_READY);
    fails(pool.start(B, "k", MIB), ErrorCode::OBJECT_ALREADY_EXISTS);
    fails(pool.end(B, "k", &started), ErrorCode::ILLEGAL_CLIENT);
    pool.end(A, "k", &started).unwrap();
    fails(pool.end(A, "", &started), ErrorCode::OBJECT_NOT_FOUND);
    let located = pool.locate("k", false, false).unwrap();
    assert_eq!((located.version, located.length), (started.version, MIB));
    assert_eq!((located.places, located.checksum), (started.places, Some(7)));
    fails(pool.put("k", 2 * MIB), ErrorCode::OBJECT_ALREADY_EXISTS);
}

#[test]
fn revoked_put_leaves_nothing() {
    let mut pool = Pool::new(1);
    let started = pool.start(A, "k", MIB).unwrap();
    assert_eq!(pool.state.totals().writing, MIB);
    pool.revoke(A, "k", &started).unwrap();
    assert_eq!(pool.probe("k"), ObjectState::Absent);
    assert_eq!((pool.state.totals().used, pool.state.totals().writing), (0, 0));
    pool.put("k", MIB).unwrap();
}

#[test]
fn stale_put_is_displaced_and_freed_later() {
    let mut pool = Pool::new(4);
    let old = pool.start(A, "k", MIB).unwrap();
    pool.wait(29);
    fails(pool.start(B, "k", MIB), ErrorCode::OBJECT_ALREADY_EXISTS);
    pool.wait(1);
    let new = pool.start(B, "k", MIB).unwrap();
    fails(pool.end(A, "k", &old), ErrorCode::OBJECT_NOT_FOUND);
    pool.end(B, "k", &new).unwrap();
    pool.wait(569);
    assert_eq!(pool.state.totals().used, 2 * MIB, "the space of the old writer is kept back");
    pool.wait(1);
    assert_eq!((pool.state.totals().used, pool.state.totals().writing), (MIB, 0));
    assert_eq!(pool.state.totals().counters.puts_released, 1);
}

#[test]
fn released_put_cannot_end() {
    let mut pool = Pool::new(4);
    let started = pool.start(A, "k", MIB).unwrap();
    pool.wait(599);
    pool.now = pool.now + Duration::from_secs(1);
    fails(pool.end(A, "k", &started), ErrorCode::OBJECT_NOT_FOUND);
    pool.advance_all();
    fails(pool.end(A, "k", &started), ErrorCode::OBJECT_NOT_FOUND);
    assert_eq!((pool.probe("k"), pool.state.totals().used), (ObjectState::Absent, 0));
}

#[test]
fn unregistered_and_expired_writers_free_space_differently() {
    let check = |how: fn(&mut Pool), at_once: u64, soon: u64| {
        let mut pool = Pool::new(4);
        pool.start(B, "k", MIB).unwrap();
        how(&mut pool);
        assert_eq!(pool.probe("k"), ObjectState::Absent);
        assert_eq!(pool.state.totals().used, at_once);
        pool.wait(35);
        assert_eq!(pool.state.totals().used, soon);
        pool.start(A, "k", MIB).unwrap();
    };
    check(|pool| assert!(pool.state.unregister(pool.now, B)), MIB, 0);
    let silence = |pool: &mut Pool| {
        for _ in 0..10 {
            pool.now = pool.now + Duration::from_secs(1);
            pool.state.heartbeat(pool.now, A);
            pool.advance_all();
        }
    };
    check(silence, MIB, MIB);
}

#[test]
fn upsert_may_evict_object_it_replaces() {
    let mut pool = Pool::new(1);
    pool.mount(B, 2, 16).unwrap();
    pool.start(B, "b", 8 * MIB).unwrap();
    // The same memory is mounted again, and is quarantined until no late write is possible.
    pool.state.unmount(pool.now, B, SegmentId::from_bits(2), Duration::ZERO).unwrap();
    pool.mount(B, 2, 16).unwrap();
    pool.wait(21);
    pool.start(A, "k", MIB).unwrap();
    // A sends no more heartbeats, so that it expires just before the quarantine ends.
    for _ in 0..10 {
        pool.now = pool.now + Duration::from_millis(990);
        pool.state.heartbeat(pool.now, B);
        pool.advance_all();
    }
    pool.state.suspect(pool.now, A);
    fails(pool.start(B, "l", 2 * MIB), ErrorCode::NO_AVAILABLE_HANDLE);
    pool.now = pool.now + Duration::from_millis(1200);
    pool.state.heartbeat(pool.now, B);
    let options = PutOptions::default();
    let started = pool.start_with(B, "k", 2 * MIB, true, &options).unwrap();
    pool.end(B, "k", &started).unwrap();
    assert_eq!(pool.locate("k", false, false).unwrap().places, started.places);
}

#[test]
fn put_end_checks_key_client_and_tenant() {
    let mut pool = Pool::new(4);
    pool.mount(B, 2, 4).unwrap();
    let started = pool.start(A, "k", MIB).unwrap();
    pool.start(A, "other", MIB).unwrap();
    fails(pool.end(A, "other", &started), ErrorCode::OBJECT_NOT_FOUND);
    fails(pool.end(B, "", &started), ErrorCode::ILLEGAL_CLIENT);
    let put = PutRef { key: b"", version: started.version, failed_replicas: &[], checksum: None };
    let stranger = TenantId::new("stranger");
    fails(pool.state.puts().put_end(pool.now, A, &stranger, put), ErrorCode::OBJECT_NOT_FOUND);
    pool.end(A, "", &started).unwrap();
    assert_eq!(pool.locate("k", false, false).unwrap().places, started.places);
    let error = fails(pool.end(A, "", &started), ErrorCode::OBJECT_NOT_FOUND).to_string();
    assert!(!error.contains("key"), "{error}");
    fails(pool.locate("other", false, false), ErrorCode::REPLICA_IS_NOT_READY);
}

#[test]
fn failed_replica_is_dropped_and_quarantined() {
    let mut pool = Pool::new(4);
    pool.mount(B, 2, 4).unwrap();
    let options = PutOptions { replicas: 2, ..PutOptions::default() };
    let started = pool.start_with(A, "k", MIB, false, &options).unwrap();
    let [first, second] = started.places[..] else { panic!("two copies") };
    assert_ne!(first.segment, second.segment);
    let put = PutRef {
        key: b"k",
        version: started.version,
        failed_replicas: &[first.replica],
        checksum: None,
    };
    pool.state.puts().put_end(pool.now, A, &pool.tenant, put).unwrap();
    assert_eq!(pool.locate("k", false, false).unwrap().places[..], [second]);
    assert!(!pool.state.verify(&pool.tenant, b"k", started.version, first.replica));
    assert_eq!(pool.state.totals().fenced, MIB);
    pool.wait(32);
    assert_eq!((pool.state.totals().fenced, pool.state.totals().used), (0, MIB));
}

#[test]
fn upsert_replaces_at_end_and_later_end_wins() {
    let mut pool = Pool::new(16);
    let old = pool.put("k", MIB).unwrap();
    let options = PutOptions::default();
    let first = pool.start_with(A, "k", MIB, true, &options).unwrap();
    let second = pool.start_with(B, "k", 2 * MIB, true, &options).unwrap();
    assert_eq!(pool.locate("k", true, false).unwrap().version, old.version);
    pool.end(B, "k", &second).unwrap();
    assert_eq!(pool.locate("k", true, false).unwrap().length, 2 * MIB);
    pool.end(A, "k", &first).unwrap();
    assert_eq!(pool.locate("k", true, false).unwrap().version, first.version);
    assert_eq!(pool.state.totals().used, MIB);
    // The lease is still held.
    fails(pool.remove("k", false), ErrorCode::OBJECT_HAS_LEASE);
}

#[test]
fn put_ending_after_upsert_does_not_replace_it() {
    let mut pool = Pool::new(16);
    let put = pool.start(A, "k", MIB).unwrap();
    let upsert = pool.start_with(B, "k", MIB, true, &PutOptions::default()).unwrap();
    pool.end(B, "k", &upsert).unwrap();
    pool.end(A, "k", &put).unwrap();
    assert_eq!(pool.locate("k", false, false).unwrap().version, upsert.version);
    assert_eq!(pool.state.totals().used, MIB);
}

#[test]
fn failed_upsert_keeps_old_value() {
    let mut pool = Pool::new(3);
    let old = pool.put("k", 2 * MIB).unwrap();
    fails(pool.upsert("k", 2 * MIB), ErrorCode::NO_AVAILABLE_HANDLE);
    fails(pool.upsert("k", 9 * MIB), ErrorCode::NO_AVAILABLE_HANDLE);
    assert_eq!(pool.locate("k", false, false).unwrap().version, old.version);
    pool.upsert("k", MIB).unwrap();
}

#[test]
fn full_pool_evicts_oldest_first() {
    let mut pool = Pool::new(8);
    for index in 0..8 {
        pool.put(&format!("k{index}"), MIB).unwrap();
    }
    pool.locate("k0", false, false).unwrap();
    pool.put("new", 2 * MIB).unwrap();
    let (names, _) = pool.list(Selector::All, None, 0);
    assert_eq!(names, ["k0", "k3", "k4", "k5", "k6", "k7", "new"]);
    assert_eq!(pool.state.totals().counters.evicted_keys, 2);
}

#[test]
fn evicts_nothing_when_it_cannot_help() {
    let mut pool = Pool::new(8);
    for index in 0..4 {
        pool.put(&format!("k{index}"), MIB).unwrap();
    }
    fails(pool.put("huge", 9 * MIB), ErrorCode::NO_AVAILABLE_HANDLE);
    let options = PutOptions { is_hard_pinned: true, ..PutOptions::default() };
    pool.put_with("pinned", 2 * MIB, false, &options).unwrap();
    fails(pool.put("large", 7 * MIB), ErrorCode::NO_AVAILABLE_HANDLE);
    // Refusals show the use of the memory a moment ago.
    pool.now = pool.now + Duration::from_millis(200);
    pool.locate("k0", true, false).unwrap();
    let error = fails(pool.put("large", 6 * MIB), ErrorCode::NO_AVAILABLE_HANDLE);
    assert!(error.to_string().contains("leased=1048576 hard_pinned=2097152"), "{error}");
    assert_eq!(pool.state.totals().counters.evicted_keys, 0);
    // Victims that could not be evicted keep their order: the oldest is evicted first.
    pool.put("rest", 2 * MIB).unwrap();
    pool.put("fits", MIB).unwrap();
    assert!(!pool.exists("k1") && pool.exists("k0") && pool.exists("k2") && pool.exists("k3"));
}

#[test]
fn out_of_space_error_counts_held_bytes() {
    let mut pool = Pool::new(8);
    pool.put("read", MIB).unwrap();
    let options = PutOptions { is_hard_pinned: true, ..PutOptions::default() };
    pool.put_with("pinned", 2 * MIB, false, &options).unwrap();
    pool.start(A, "written", 3 * MIB).unwrap();
    pool.locate("read", true, false).unwrap();
    let error = fails(pool.put("large", 3 * MIB), ErrorCode::NO_AVAILABLE_HANDLE).to_string();
    for part in ["bytes=3145728", "free=2097152", "leased=1048576", "hard_pinned=2097152"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    assert!(error.contains("writing=3145728"), "{error}");
    assert!(pool.exists("read") && pool.exists("pinned"), "nothing was evicted without need");
}

#[test]
fn memory_use_adds_up_to_the_pool() {
    let mut pool = Pool::new(8);
    let options = PutOptions { is_hard_pinned: true, ..PutOptions::default() };
    pool.put_with("pinned", 2 * MIB, false, &options).unwrap();
    pool.put("read", MIB).unwrap();
    pool.put("idle", MIB).unwrap();
    pool.start(A, "written", 3 * MIB).unwrap();
    pool.locate("read", true, false).unwrap();
    let parts = MemoryUse {
        free: MIB,
        leased: MIB,
        hard_pinned: 2 * MIB,
        evictable: MIB,
        writing: 3 * MIB,
        ..MemoryUse::default()
    };
    assert_eq!(pool.state.memory_use(pool.now), parts);
}

#[test]
fn view_shows_copies_leases_and_pins() {
    let mut pool = Pool::new(8);
    let options = PutOptions { is_hard_pinned: true, ..PutOptions::default() };
    pool.put_with("pinned", MIB, false, &options).unwrap();
    let view =
        |pool: &Pool, key: &str| pool.state.view_object(pool.now, &pool.tenant, key.as_bytes());
    let pinned = view(&pool, "pinned").unwrap();
    assert!(pinned.is_hard_pinned && pinned.version.is_some());
    assert_eq!((pinned.length, pinned.copies.len(), pinned.unfinished_puts), (MIB, 1, 0));
    assert_eq!(pinned.copies[0].occupied, MIB);
    assert_eq!(pinned.lease_left, Duration::ZERO, "a view grants no lease");
    pool.locate("pinned", true, false).unwrap();
    assert!(view(&pool, "pinned").unwrap().lease_left > Duration::ZERO);
    pool.start(A, "written", MIB).unwrap();
    let written = view(&pool, "written").unwrap();
    assert_eq!((written.version, written.unfinished_puts), (None, 1));
    fails(view(&pool, "absent"), ErrorCode::OBJECT_NOT_FOUND);
}

#[test]
fn out_of_space_error_counts_leases_beside_pins() {
    let mut pool = Pool::new(8);
    let options = PutOptions { is_hard_pinned: true, ..PutOptions::default() };
    pool.put_with("pinned", 5 * MIB, false, &options).unwrap();
    for key in ["read", "idle"] {
        pool.put(key, MIB).unwrap();
    }
    pool.locate("read", true, false).unwrap();
    let error = fails(pool.put("large", 4 * MIB), ErrorCode::NO_AVAILABLE_HANDLE).to_string();
    let parts =
        "free=1048576 leased=1048576 hard_pinned=5242880 writing=0 fenced=0 evictable=1048576";
    assert!(error.contains(parts), "{error}");
}

#[test]
fn evicts_nothing_for_hole_split_by_held_object() {
    let mut pool = Pool::new(5);
    for key in ["a", "b", "held", "c", "d"] {
        pool.put(key, MIB).unwrap();
    }
    pool.locate("held", true, false).unwrap();
    fails(pool.put("large", 3 * MIB), ErrorCode::NO_AVAILABLE_HANDLE);
    assert_eq!(pool.state.totals().keys, 5);
    // Only objects that form one hole are evicted, even if an older object is spared.
    pool.locate("b", false, false).unwrap();
    pool.put("large", 2 * MIB).unwrap();
    let (names, _) = pool.list(Selector::All, None, 0);
    assert_eq!(names, ["a", "b", "held", "large"]);
}

#[test]
fn soft_pins_are_evicted_last_and_hard_pins_never() {
    let mut pool = Pool::new(4);
    let soft = PutOptions { soft_pin: SoftPin::Enable(None), ..PutOptions::default() };
    let hard = PutOptions { is_hard_pinned: true, ..PutOptions::default() };
    pool.put_with("hard", MIB, false, &hard).unwrap();
    pool.put_with("soft", MIB, false, &soft).unwrap();
    pool.put("plain", MIB).unwrap();
    pool.put("new", 2 * MIB).unwrap();
    assert!(pool.exists("soft") && !pool.exists("plain"), "the plain one is younger");
    assert_eq!(pool.state.totals().soft_pinned_keys, 1);
    pool.put("large", 3 * MIB).unwrap();
    assert!(!pool.exists("soft") && pool.exists("hard"));
    fails(pool.put("none", 4 * MIB), ErrorCode::NO_AVAILABLE_HANDLE);
    pool.remove("hard", false).unwrap();
    pool.put("all", 4 * MIB).unwrap();
}

#[test]
fn soft_pin_expires_unless_used() {
    let mut pool = Pool::new(4);
    let ttl = Some(Duration::from_secs(20));
    let soft = PutOptions { soft_pin: SoftPin::Enable(ttl), ..PutOptions::default() };
    pool.put_with("soft", MIB, false, &soft).unwrap();
    pool.wait(15);
    pool.locate("soft", false, false).unwrap();
    pool.wait(15);
    assert_eq!(pool.state.totals().soft_pinned_keys, 1);
    // An upsert without a soft pin setting preserves the pin.
    pool.upsert("soft", MIB).unwrap();
    assert_eq!(pool.state.totals().soft_pinned_keys, 1);
    pool.wait(20);
    assert_eq!(pool.state.totals().soft_pinned_keys, 0);
    let long = Some(Duration::from_secs(1 << 20));
    let long = PutOptions { soft_pin: SoftPin::Enable(long), ..PutOptions::default() };
    fails(pool.put_with("long", MIB, false, &long), ErrorCode::INVALID_PARAMS);
}

#[test]
fn group_is_evicted_whole_or_not_at_all() {
    let mut pool = Pool::new(4);
    pool.put("g/1", MIB).unwrap();
    pool.put("g/2", MIB).unwrap();
    pool.put("alone", MIB).unwrap();
    pool.locate("g/2", true, false).unwrap();
    pool.put("new", 2 * MIB).unwrap();
    assert!(pool.exists("g/1") && pool.exists("g/2") && !pool.exists("alone"));
    pool.wait(10);
    pool.locate("new", true, false).unwrap();
    pool.put("newer", MIB).unwrap();
    assert!(!pool.exists("g/1") && !pool.exists("g/2"));
    assert!(pool.exists("new"));
}

#[test]
fn watermark_evicts_in_background() {
    let watermark = Some(Watermark { high: 0.75, ratio: 0.25 });
    let mut pool = Pool::with(Rules { watermark, ..Rules::default() }, 8);
    for index in 0..8 {
        pool.put(&format!("k{index}"), MIB).unwrap();
    }
    pool.advance_all();
    assert_eq!(pool.state.totals().used, 4 * MIB);
    assert!(!pool.exists("k0") && pool.exists("k7"));
}

#[test]
fn refuses_invalid_puts() {
    let mut pool = Pool::new(1);
    fails(pool.put("k", 0), ErrorCode::INVALID_PARAMS);
    let none = PutOptions { replicas: 0, ..PutOptions::default() };
    fails(pool.put_with("k", 1, false, &none), ErrorCode::INVALID_PARAMS);
    fails(pool.start(ClientId::from_bits(9), "k", 1), ErrorCode::CLIENT_NOT_FOUND);
    fails(pool.put("k", u64::MAX), ErrorCode::NO_AVAILABLE_HANDLE);
    let many = PutOptions { replicas: u32::MAX, ..PutOptions::default() };
    assert_eq!(pool.put_with("k", 1, false, &many).unwrap().places.len(), 1);
}

#[test]
fn retried_put_start_is_idempotent() {
    let mut pool = Pool::new(4);
    let options = PutOptions::default();
    let mut start = |client, length, request| {
        let key = KeyRef::new(b"k").unwrap();
        let put = Put {
            key,
            length,
            group: b"",
            options: &options,
            is_replacing: false,
            if_version: None,
            request,
        };
        pool.state.puts().put_start(pool.now, client, &pool.tenant, put)
    };
    let first = start(A, MIB, 7).unwrap();
    assert_eq!(start(A, MIB, 7).unwrap(), first);
    for (client, length, request) in [(A, MIB, 8), (A, MIB, 0), (B, MIB, 7), (A, 2 * MIB, 7)] {
        fails(start(client, length, request), ErrorCode::OBJECT_ALREADY_EXISTS);
    }
    pool.end(A, "k", &first).unwrap();
    let key = KeyRef::new(b"k").unwrap();
    let put = Put {
        key,
        length: MIB,
        group: b"",
        options: &options,
        is_replacing: false,
        if_version: None,
        request: 7,
    };
    let again = pool.state.puts().put_start(pool.now, A, &pool.tenant, put);
    fails(again, ErrorCode::OBJECT_ALREADY_EXISTS);
}

#[test]
fn oversized_object_error_names_both_sizes() {
    let mut pool = Pool::new(4);
    pool.put("small", MIB).unwrap();
    let error = fails(pool.start(A, "k", 4 * MIB + 1), ErrorCode::NO_AVAILABLE_HANDLE).to_string();
    for part in ["larger than any segment", "bytes=4194305", "largest_segment=4194304", "key=\"k\""]
    {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(pool.probe("small"), ObjectState::Complete, "nothing is evicted without need");
    pool.start(A, "k", 4 * MIB).unwrap();
}

#[test]
fn memory_with_late_bytes_outlasts_stop_of_holder() {
    for restarts in [false, true] {
        let mut pool = Pool::new(4);
        let mut log = Log::begin(&mut pool);
        let started = pool.start(A, "k", 4 * MIB).unwrap();
        pool.wait(5);
        let put =
            PutRef { key: b"k", version: started.version, failed_replicas: &[], checksum: Some(7) };
        let late = [started.places[0].replica];
        pool.state.puts().put_end_late(pool.now, A, &pool.tenant, put, &late).unwrap();
        assert_eq!(pool.locate("k", false, false).unwrap().places.len(), 1, "it is readable");
        log.check(&mut pool);
        let begun = pool.now;
        if restarts {
            pool.state = log.restart(pool.now, &Rules::default());
            pool.state.register(pool.now, A, "host-a:1").unwrap();
            pool.state.register(pool.now, B, "host-b:1").unwrap();
            pool.state.resume(A, &spec(A, 1, 1, 4)).unwrap();
        }
        pool.remove("k", true).unwrap();
        while pool.start(A, "next", 4 * MIB).is_err() {
            pool.wait(1);
        }
        let rested = pool.now.since(begun);
        let needed = late_end() - Duration::from_secs(5);
        assert!(rested >= needed, "restarted: {restarts}, after {rested:?}");
    }
}

/// The holder may be stopped with the bytes in its system, until just before it would expire.
#[test]
fn memory_of_failed_write_outlasts_stop_of_holder() {
    for how in ["end", "revoke"] {
        let mut pool = Pool::new(4);
        let started = pool.start(A, "k", 4 * MIB).unwrap();
        let begun = pool.now;
        let failed = [started.places[0].replica];
        let version = started.version;
        let put = PutRef { key: b"k", version, failed_replicas: &failed, checksum: None };
        let tenant = pool.tenant.clone();
        match how {
            "end" => {
                let ended = pool.state.puts().put_end(pool.now, A, &tenant, put);
                fails(ended, ErrorCode::REPLICA_IS_GONE);
            }
            _ => pool.state.puts().put_revoke(pool.now, A, &tenant, put).unwrap(),
        }
        while pool.start(A, "next", 4 * MIB).is_err() {
            pool.wait(1);
        }
        assert_eq!(pool.now.since(begun), late_end(), "{how}");
    }
}

#[test]
fn renewed_put_is_displaced_by_nobody_and_ends() {
    let mut pool = Pool::new(8);
    let started = pool.start(A, "k", 4 * MIB).unwrap();
    for _ in 0..10 {
        pool.wait(15);
        pool.state.heartbeat(pool.now, A);
        pool.renew(A, &started).unwrap();
        fails(pool.start(B, "k", MIB), ErrorCode::OBJECT_ALREADY_EXISTS);
    }
    pool.end(A, "k", &started).unwrap();
    fails(pool.renew(A, &started), ErrorCode::OBJECT_NOT_FOUND);
}

#[test]
fn displaced_or_foreign_put_is_not_renewed() {
    let mut pool = Pool::new(8);
    let started = pool.start(A, "k", 4 * MIB).unwrap();
    fails(pool.renew(B, &started), ErrorCode::ILLEGAL_CLIENT);
    pool.now = pool.now + Rules::default().put_discard;
    pool.state.heartbeat(pool.now, A);
    pool.start(B, "k", MIB).unwrap();
    fails(pool.renew(A, &started), ErrorCode::OBJECT_NOT_FOUND);
}

#[test]
fn memory_of_renewed_put_is_not_reused_in_its_last_window() {
    for restarts in [false, true] {
        let mut pool = Pool::new(4);
        let mut log = Log::begin(&mut pool);
        let started = pool.start(A, "k", 4 * MIB).unwrap();
        log.check(&mut pool);
        pool.wait(15);
        pool.state.heartbeat(pool.now, A);
        pool.renew(A, &started).unwrap();
        let renewed = pool.now;
        if restarts {
            pool.state = log.restart(pool.now, &Rules::default());
            pool.state.register(pool.now, A, "host-a:1").unwrap();
            pool.state.register(pool.now, B, "host-b:1").unwrap();
            pool.state.resume(A, &spec(A, 1, 1, 4)).unwrap();
        }
        let failed_replicas = &[started.places[0].replica][..];
        let put = PutRef { failed_replicas, ..PutRef::of(started.version) };
        pool.state.puts().put_revoke(pool.now, A, &pool.tenant, put).unwrap();
        while pool.start(B, "next", 4 * MIB).is_err() {
            pool.wait(1);
        }
        let rested = pool.now.since(renewed);
        assert!(rested >= Rules::default().write_end(), "restarted: {restarts}, {rested:?}");
    }
}

#[test]
fn objects_and_unfinished_puts_are_bounded_by_number() {
    let rules =
        Rules { objects_per_tenant_max: 5, unfinished_puts_per_client_max: 2, ..Rules::default() };
    let mut pool = Pool::with(rules, 4);
    let started = ["a", "b"].map(|key| pool.start(A, key, 8).unwrap());
    let error = fails(pool.start(A, "c", 8), ErrorCode::NO_AVAILABLE_HANDLE);
    assert!(
        error.to_string().contains("limit=2 option=--max_unfinished_puts_per_client"),
        "{error}"
    );
    let other = pool.start(B, "c", 8).unwrap();
    pool.end(B, "c", &other).unwrap();
    pool.end(A, "a", &started[0]).unwrap();
    pool.revoke(A, "b", &started[1]).unwrap();
    for key in ["b", "d", "e"] {
        pool.put(key, 8).unwrap();
    }
    let error = fails(pool.put("f", 8), ErrorCode::TENANT_QUOTA_EXCEEDED);
    assert!(error.to_string().contains("limit=5 option=--max_objects_per_tenant"), "{error}");
    pool.upsert("e", 16).unwrap();
    pool.remove("e", true).unwrap();
    pool.put("f", 8).unwrap();
    assert_eq!(pool.state.totals().counters.puts_over_count, 2);
    let mut pool = recovery::restarted(&mut pool);
    fails(pool.put("g", 8), ErrorCode::TENANT_QUOTA_EXCEEDED);
}
