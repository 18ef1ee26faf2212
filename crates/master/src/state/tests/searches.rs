//! Large puts into a full pool of small objects: work per lock of the state is bounded, and the put
//! succeeds where it can.

use super::*;

/// Steps that one call may take: one search along the eviction order and one slice of a scan.
const STEPS_MAX: u64 = 3 * 4096;

/// 1,200 objects of 1 KiB: longer than most stretches between leased ones.
const LARGE: u64 = 1200 << 10;

/// Fills a pool with objects of this size; one in `leased` is leased.
fn crowd(mib: u64, length: u64, leased: u64) -> (Pool, u64) {
    let mut pool = Pool::new(mib);
    let objects = mib * MIB / length;
    for index in 0..objects {
        pool.put(&format!("k{index}"), length).unwrap();
    }
    // Not at equal distances.
    let mut at = leased / 2;
    while at < objects {
        pool.locate(&format!("k{at}"), true, false).unwrap();
        at += leased / 2 + (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % leased;
    }
    (pool, objects)
}

/// Starts a put in slices. Returns the result, the number of calls and of steps.
fn start_in_slices(pool: &mut Pool, key: &str, length: u64) -> (Result<Started>, u64, u64) {
    let mut progress = PutProgress::default();
    let (mut calls, before) = (0, pool.state.steps());
    loop {
        calls += 1;
        let steps = pool.state.steps();
        let step = pool.step(key, length, &mut progress);
        let taken = pool.state.steps() - steps;
        assert!(taken <= STEPS_MAX, "one call took {taken} steps");
        let result = match step {
            Ok(PutStep::Started(started)) => Ok(started),
            Ok(PutStep::Pending(_)) => continue,
            Err(error) => Err(error),
        };
        return (result, calls, pool.state.steps() - before);
    }
}

#[test]
fn large_put_between_leased_objects_succeeds_in_slices() {
    let (mut pool, objects) = crowd(64, 1024, 1000);
    let (started, calls, steps) = start_in_slices(&mut pool, "large", LARGE);
    pool.end(A, "large", &started.unwrap()).unwrap();
    assert!(pool.exists("large"));
    assert!(steps <= 24 * objects, "calls={calls} steps={steps}");
    let evicted = pool.state.totals().counters.evicted_keys;
    assert!((1200..=2 * 1200).contains(&evicted), "only the window was evicted: {evicted}");
}

#[test]
fn impossible_put_fails_after_one_look_at_everything() {
    let (mut pool, objects) = crowd(64, 1024, 1000);
    let (started, calls, steps) = start_in_slices(&mut pool, "large", 32 * MIB);
    let error = fails(started, ErrorCode::NO_AVAILABLE_HANDLE);
    assert!(error.to_string().contains("eviction would not free enough in one run"), "{error}");
    assert!(steps <= 3 * objects + 4096, "objects={objects} calls={calls} steps={steps}");
    assert_eq!(pool.state.totals().counters.evicted_keys, 0, "and nothing was evicted");
    assert!(pool.state.searches.is_empty());
}

#[test]
fn concurrent_searches_all_end() {
    let (mut pool, _) = crowd(64, 1024, 1000);
    let mut puts: Vec<_> = (0..20).map(|_| (PutProgress::default(), None)).collect();
    let mut rounds = 0;
    while puts.iter().any(|(_, outcome)| outcome.is_none()) {
        rounds += 1;
        assert!(rounds < 2000, "a search goes on for ever");
        for (index, (progress, outcome)) in puts.iter_mut().enumerate() {
            if outcome.is_none() {
                *outcome = match pool.step(&format!("large{index}"), LARGE, progress) {
                    Ok(PutStep::Pending(_)) => None,
                    other => Some(other.is_ok()),
                };
            }
        }
    }
    let done = puts.iter().filter(|(_, outcome)| *outcome == Some(true)).count();
    assert!(done >= 8, "done={done}");
    assert!(pool.state.searches.is_empty());
    for client in [A, B] {
        pool.state.unregister(pool.now, client);
    }
}

#[test]
fn small_puts_go_on_while_a_search_is_under_way() {
    let (mut pool, _) = crowd(64, 1024, 1000);
    let mut progress = PutProgress::default();
    for index in 0..10_000 {
        match pool.step("large", LARGE, &mut progress).unwrap() {
            PutStep::Started(started) => {
                pool.end(A, "large", &started).unwrap();
                assert!(index > 2, "the search took several slices");
                return;
            }
            PutStep::Pending(_) => {
                pool.put(&format!("small{index}"), 1024).unwrap();
            }
        }
    }
    panic!("the large put starves");
}

#[test]
fn segment_that_leaves_ends_the_search_in_it() {
    let (mut pool, _) = crowd(16, 1024, 1000);
    let mut progress = PutProgress::default();
    while !pool.state.searches.blocks().next().is_some_and(|_| true) {
        let pending = pool.step("large", MIB, &mut progress).unwrap();
        assert!(matches!(pending, PutStep::Pending(_)), "{pending:?}");
    }
    pool.state.unmount(pool.now, A, SegmentId::from_bits(1), Duration::ZERO).unwrap();
    pool.mount(B, 2, 4).unwrap();
    assert!(matches!(pool.step("large", MIB, &mut progress), Ok(PutStep::Started(_))));
}

#[test]
fn refusals_count_and_share_one_look_at_the_pool() {
    let (mut pool, objects) = crowd(16, 1024, 2);
    for index in 0..objects {
        let _ = pool.locate(&format!("k{index}"), true, false);
    }
    let refuse = |pool: &mut Pool| {
        let before = pool.state.steps();
        fails(pool.put("large", MIB), ErrorCode::NO_AVAILABLE_HANDLE);
        pool.state.steps() - before
    };
    while refuse(&mut pool) > 8 {}
    pool.now = pool.now + Duration::from_millis(200);
    assert!(refuse(&mut pool) >= 4096, "the look counts as work under the lock");
    let steps: u64 = (0..1000).map(|_| refuse(&mut pool)).sum();
    assert!(steps <= 1000 * 8, "{steps} steps for 1000 refusals");
    pool.upsert("k1", MIB).unwrap_err();
    assert!(refuse(&mut pool) <= 8, "a put that replaces uses the same look");
}

#[test]
fn pinned_pool_is_looked_through_once_for_all_refusals() {
    let mut pool = Pool::new(1);
    for id in 2..=1000 {
        pool.mount(A, id, 1).unwrap();
    }
    let options = PutOptions { is_hard_pinned: true, ..PutOptions::default() };
    for index in 0..1000 {
        pool.put_with(&format!("k{index}"), MIB, false, &options).unwrap();
    }
    let refuse = |pool: &mut Pool| {
        fails(pool.put("l", MIB), ErrorCode::NO_AVAILABLE_HANDLE);
    };
    refuse(&mut pool);
    let before = pool.state.steps();
    (0..100).for_each(|_| refuse(&mut pool));
    let steps = pool.state.steps() - before;
    assert!(steps <= 100 * 8, "{steps} steps for 100 refusals");
    // What may be evicted from then on is found.
    pool.remove("k500", true).unwrap();
    pool.put("m", MIB).unwrap();
    pool.put("n", MIB).unwrap();
}

#[test]
fn full_pool_is_not_tried_segment_by_segment() {
    let mut pool = Pool::new(1);
    for id in 2..1000 {
        pool.mount(A, id, 1).unwrap();
    }
    for index in 0..1000 {
        pool.put(&format!("k{index}"), MIB).unwrap();
    }
    pool.put("first", MIB).unwrap();
    let before = pool.state.steps();
    for index in 0..100 {
        pool.put(&format!("l{index}"), MIB).unwrap();
    }
    let steps = pool.state.steps() - before;
    assert!(steps <= 100 * 16, "{steps} steps for 100 puts");
    // Freed memory and new segments are found.
    pool.remove("l99", true).unwrap();
    let evicted = pool.state.totals().counters.evicted_keys;
    pool.put("m0", MIB).unwrap();
    pool.mount(A, 2000, 1).unwrap();
    pool.put("m1", MIB).unwrap();
    assert_eq!(pool.state.totals().counters.evicted_keys, evicted);
}
