//! Leases, fences, removals, listings.

use super::*;
use crate::state::calls::query::listing::PAGE_BYTES_MAX;

#[test]
fn lease_prevents_removal_until_it_ends() {
    let mut pool = Pool::new(4);
    pool.put("k", MIB).unwrap();
    pool.locate("k", true, false).unwrap();
    pool.wait(9);
    fails(pool.remove("k", false), ErrorCode::OBJECT_HAS_LEASE);
    let probed = pool.state.probe(pool.now, &pool.tenant, b"k", true);
    assert_eq!(probed, Probed { state: ObjectState::Complete, length: MIB });
    pool.wait(9);
    fails(pool.remove("k", false), ErrorCode::OBJECT_HAS_LEASE);
    pool.wait(1);
    pool.remove("k", false).unwrap();
    fails(pool.remove("k", false), ErrorCode::OBJECT_NOT_FOUND);
    pool.put("k", MIB).unwrap();
    pool.locate("k", true, false).unwrap();
    pool.remove("k", true).unwrap();
}

#[test]
fn unfinished_put_cannot_be_removed() {
    let mut pool = Pool::new(4);
    pool.start(A, "k", MIB).unwrap();
    fails(pool.remove("k", true), ErrorCode::REPLICA_IS_NOT_READY);
}

#[test]
fn removal_during_upsert_removes_readable_object() {
    let mut pool = Pool::new(4);
    pool.put("k", MIB).unwrap();
    let upsert = pool.start_with(A, "k", MIB, true, &PutOptions::default()).unwrap();
    pool.remove("k", false).unwrap();
    assert_eq!(pool.probe("k"), ObjectState::Writing);
    pool.end(A, "k", &upsert).unwrap();
    assert!(pool.exists("k"));
}

#[test]
fn fenced_memory_is_not_reused_and_put_says_when_to_retry() {
    let mut pool = Pool::new(1);
    let started = pool.put("k", MIB).unwrap();
    let located = pool.locate("k", false, true).unwrap();
    let replica = located.places[0].replica;
    assert!(pool.state.verify(&pool.tenant, b"k", started.version, replica));
    pool.remove("k", true).unwrap();
    assert!(!pool.state.verify(&pool.tenant, b"k", started.version, replica));
    let error = fails(pool.put("new", MIB), ErrorCode::NO_AVAILABLE_HANDLE);
    assert!(error.to_string().contains("fenced=1048576 retry_after_ms=253"), "{error}");
    pool.now = pool.now + Duration::from_millis(253);
    pool.advance_all();
    fails(pool.put("new", MIB), ErrorCode::NO_AVAILABLE_HANDLE);
    pool.now = pool.now + Duration::from_millis(1);
    pool.put("new", MIB).unwrap();
}

#[test]
fn released_fence_frees_memory_before_and_after_removal() {
    let mut pool = Pool::new(1);
    // The object still exists.
    pool.put("k", MIB).unwrap();
    let ticket = pool.locate("k", false, true).unwrap().ticket.expect("the only reader");
    pool.state.release_fence(ticket);
    pool.remove("k", true).unwrap();
    pool.put("k", MIB).unwrap();
    // The object was removed meanwhile.
    let ticket = pool.locate("k", false, true).unwrap().ticket.expect("the only reader");
    pool.remove("k", true).unwrap();
    fails(pool.put("new", MIB), ErrorCode::NO_AVAILABLE_HANDLE);
    for wrong in [
        FenceTicket { version: mooncake_base::Version(ticket.version.0 + 1), ..ticket },
        FenceTicket { fence: ticket.fence + 1, ..ticket },
        FenceTicket { fence: 0, ..ticket },
    ] {
        pool.state.release_fence(wrong);
        fails(pool.put("new", MIB), ErrorCode::NO_AVAILABLE_HANDLE);
    }
    pool.state.release_fence(ticket);
    pool.put("new", MIB).unwrap();
    pool.state.release_fence(ticket);
    assert!(pool.exists("new"));
}

#[test]
fn shared_fence_ends_only_by_time() {
    let mut pool = Pool::new(1);
    pool.put("k", MIB).unwrap();
    let first = pool.locate("k", false, true).unwrap().ticket.expect("the only reader");
    assert_eq!(pool.locate("k", false, true).unwrap().ticket, None, "the first still reads");
    pool.state.release_fence(first);
    pool.remove("k", true).unwrap();
    pool.state.release_fence(first);
    fails(pool.put("new", MIB), ErrorCode::NO_AVAILABLE_HANDLE);
    pool.wait(1);
    pool.put("new", MIB).unwrap();
    // The grant of the first reader does not cover a later reader.
    let later = pool.locate("new", false, true).unwrap().ticket.expect("the only reader");
    pool.state.release_fence(FenceTicket { fence: first.fence, ..later });
    pool.remove("new", true).unwrap();
    fails(pool.put("k", MIB), ErrorCode::NO_AVAILABLE_HANDLE);
}

#[test]
fn eviction_skips_fenced_objects() {
    let mut pool = Pool::new(2);
    pool.put("read", MIB).unwrap();
    pool.put("other", MIB).unwrap();
    pool.locate("other", false, false).unwrap();
    pool.locate("read", false, true).unwrap();
    pool.locate("other", false, false).unwrap();
    pool.put("new", MIB).unwrap();
    assert!(pool.exists("read") && !pool.exists("other"));
}

#[test]
fn batch_fence_covers_whole_batch() {
    let mut pool = Pool::new(1024);
    for key in ["a", "b"] {
        pool.put(key, 256 * MIB).unwrap();
    }
    let grant = LocateOptions { has_lease: false, has_fence: true };
    let located = pool.state.locate(pool.now, &pool.tenant, &["a", "missing", "b"], grant);
    assert_eq!(located.fence, Duration::from_millis(2250));
    assert!(located.objects[0].is_ok() && located.objects[1].is_err());
}

#[test]
fn bulk_removal_skips_leased_and_unfinished() {
    let mut pool = Pool::new(16);
    for key in ["a1", "a2", "b1"] {
        pool.put(key, MIB).unwrap();
    }
    pool.start(A, "a3", MIB).unwrap();
    pool.locate("a1", true, false).unwrap();
    let remove = |pool: &mut Pool, selector: Selector, is_forced: bool| {
        let mut removal = Removal::new(pool.tenant.clone(), selector, is_forced);
        while !pool.state.remove_matching(pool.now, &mut removal) {}
        removal.removed()
    };
    assert_eq!(remove(&mut pool, Selector::regex("^a").unwrap(), false), 1);
    assert_eq!(remove(&mut pool, Selector::Prefix(Box::from(*b"a")), true), 1);
    assert_eq!(remove(&mut pool, Selector::All, false), 1);
    assert_eq!(pool.probe("a3"), ObjectState::Writing);
    fails(Selector::regex("("), ErrorCode::INVALID_PARAMS);
    Selector::regex(r"^\w+/\p{Greek}[^\s]*$").unwrap();
    for (pattern, why) in [("a(?=b)", "look-around"), (r"(a)\1", "backreferences")] {
        let error = fails(Selector::regex(pattern), ErrorCode::INVALID_PARAMS).to_string();
        assert!(error.contains(why) && error.contains("not supported"), "{error}");
    }
    fails(Selector::regex("(a{1000}){1000}"), ErrorCode::INVALID_PARAMS);
    fails(Selector::regex(&"a".repeat(20_000)), ErrorCode::INVALID_PARAMS);
}

#[test]
fn page_of_long_keys_is_bounded_by_bytes() {
    let mut pool = Pool::new(64);
    // Short keys between long ones: none may be left out where a page ends.
    let key = |index: usize| format!("{index:03}{}", "x".repeat(index % 3 * 30_000));
    // In an order in which large keys come before small ones, too.
    for index in (0..400).map(|index| index * 171 % 400) {
        pool.put(&key(index), 1).unwrap();
    }
    for selector in [Selector::All, Selector::regex("^[0-9]").unwrap()] {
        let (mut seen, mut pages) = (Vec::<String>::new(), 0);
        loop {
            let after = seen.last().map(String::as_str);
            let (names, is_last) = pool.list(selector.clone(), after, 0);
            assert!(names.iter().map(String::len).sum::<usize>() <= PAGE_BYTES_MAX);
            seen.extend(names);
            pages += 1;
            if is_last {
                break;
            }
        }
        assert!(pages > 1, "the page was not cut");
        assert!(seen.iter().cloned().eq((0..400).map(key)), "a key was left out");
    }
}

#[test]
fn listing_is_paged_in_byte_order() {
    let mut pool = Pool::new(64);
    for index in (0..20).rev() {
        pool.put(&format!("k{index:02}"), MIB).unwrap();
    }
    let mut seen = Vec::new();
    loop {
        let (names, is_last) = pool.list(Selector::All, seen.last().map(String::as_str), 7);
        assert!(names.len() <= 7);
        seen.extend(names);
        if is_last {
            break;
        }
    }
    let all: Vec<String> = (0..20).map(|index| format!("k{index:02}")).collect();
    assert_eq!(seen, all);
    let (names, is_last) = pool.list(Selector::regex("1$").unwrap(), None, 1);
    assert_eq!((names, is_last), (vec!["k01".to_owned()], false));
    assert_eq!(pool.list(Selector::Prefix(Box::from(*b"x")), None, 1), (vec![], true));
    let mut other = Listing::new(TenantId::new("other"), Selector::All, None, 0);
    assert!(pool.state.list_objects(&mut other) && other.into_page().objects.is_empty());
}

/// Uses the key once per millisecond for that long.
fn poll(pool: &mut Pool, key: &str, time: Duration) {
    for _ in 0..time.as_millis() {
        pool.now = pool.now + Duration::from_millis(1);
        pool.state.probe(pool.now, &pool.tenant, key.as_bytes(), true);
    }
}

#[test]
fn hot_object_outlives_cold_ones() {
    for eviction in [EvictionKind::Lru, EvictionKind::Adaptive, EvictionKind::S3Fifo] {
        let rules = Rules { eviction, lease_ttl: Duration::from_secs(1), ..Rules::default() };
        let mut pool = Pool::with(rules, 4);
        pool.put("polled", MIB).unwrap();
        for round in 0..20 {
            // Leases end just after the last of these uses.
            poll(&mut pool, "polled", Duration::from_millis(300));
            pool.wait(2);
            pool.put(&round.to_string(), MIB).unwrap();
            assert!(pool.exists("polled"), "{eviction:?} {round}");
        }
        assert_eq!(pool.state.totals().counters.evicted_keys, 17, "{eviction:?}");
    }
}

#[test]
fn every_use_extends_lease_fully() {
    let rules = Rules { lease_ttl: Duration::from_secs(1), ..Rules::default() };
    let mut pool = Pool::with(rules, 4);
    pool.put("k", MIB).unwrap();
    for uses in 1..100 {
        poll(&mut pool, "k", Duration::from_millis(uses));
        let used = pool.now;
        pool.now = used + Duration::from_millis(999);
        fails(pool.remove("k", false), ErrorCode::OBJECT_HAS_LEASE);
        pool.now = used;
    }
    pool.now = pool.now + Duration::from_secs(1);
    pool.remove("k", false).unwrap();
}

#[test]
fn object_used_while_leased_is_not_next_victim() {
    let lease_ttl = Duration::from_secs(1);
    let rules = Rules { eviction: EvictionKind::Lru, lease_ttl, ..Rules::default() };
    let mut pool = Pool::with(rules, 2);
    pool.put("k", MIB).unwrap();
    pool.put("other", MIB).unwrap();
    poll(&mut pool, "other", Duration::from_millis(1));
    poll(&mut pool, "k", Duration::from_millis(1));
    // Both are found leased and wait. Then one of them is used just after its last lease.
    fails(pool.put("new", MIB), ErrorCode::NO_AVAILABLE_HANDLE);
    poll(&mut pool, "other", Duration::from_millis(1));
    pool.wait(2);
    pool.put("new", MIB).unwrap();
    assert!(pool.exists("other") && !pool.exists("k"));
}

#[test]
fn batch_probe_equals_single_probes() {
    let mut pool = Pool::new(4);
    pool.put("there", MIB).unwrap();
    pool.start(A, "begun", MIB).unwrap();
    let keys = ["there", "begun", "absent", "there"];
    let alone = keys.map(|key| pool.state.probe(pool.now, &pool.tenant, key.as_bytes(), false));
    let together = pool.state.probe_all(pool.now, &pool.tenant, &keys, true);
    assert_eq!(together, alone);
    fails(pool.remove("there", false), ErrorCode::OBJECT_HAS_LEASE);
    let unknown = TenantId::new("unknown");
    let absent = Probed { state: ObjectState::Absent, length: 0 };
    assert_eq!(pool.state.probe_all(pool.now, &unknown, &keys, true), [absent; 4]);
}

#[test]
fn slice_of_pattern_matches_nothing_under_the_lock() {
    let mut pool = Pool::new(16);
    for key in ["a1", "a2", "b1"] {
        pool.put(key, 1000).unwrap();
    }
    pool.wait(20);
    let pattern = || Selector::regex("^a").unwrap();
    let mut listing = Listing::new(pool.tenant.clone(), pattern(), None, 0);
    assert!(!pool.state.list_objects(&mut listing), "the keys are not matched yet");
    let mut removal = Removal::new(pool.tenant.clone(), pattern(), false);
    assert!(!pool.state.remove_matching(pool.now, &mut removal));
    assert_eq!(removal.candidates.found.len(), 3, "one of them does not match");
    removal.match_keys();
    assert_eq!((removal.candidates.found.len(), removal.removed()), (2, 0));
    listing.match_keys();
    // Meanwhile one key is removed, and its slot has another object.
    pool.remove("a1", false).unwrap();
    pool.put("b2", 1000).unwrap();
    assert!(pool.state.list_objects(&mut listing));
    let names: Vec<_> = listing.into_page().objects.into_iter().map(|object| object.key).collect();
    assert_eq!(names, [mooncake_base::ObjectKey::new(*b"a2").unwrap()]);
    assert!(pool.state.remove_matching(pool.now, &mut removal));
    assert_eq!(removal.removed(), 1);
    assert_eq!(pool.list(Selector::All, None, 0).0, ["b1", "b2"]);
}

#[test]
fn slice_of_long_keys_ends_early() {
    let mut pool = Pool::new(16);
    let long = "k".repeat(60_000);
    for index in 0..20 {
        pool.put(&format!("{long}{index}"), 1000).unwrap();
    }
    pool.wait(20);
    let mut listing = Listing::new(pool.tenant.clone(), Selector::regex("7$").unwrap(), None, 0);
    let mut slices = 1;
    while !pool.state.list_objects(&mut listing) {
        slices += 1;
    }
    assert_eq!(listing.into_page().objects.len(), 2);
    assert!(slices >= 4, "{slices} slices for 1.2 MB of keys");
}
