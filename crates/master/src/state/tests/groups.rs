//! Large groups: their eviction is done in slices, and readers see it done at once.

use super::*;

const MEMBERS: usize = 10_000;
/// Objects that one call may evict: one slice, and the first members of a group.
const EVICTED_MAX: u64 = 1024 + 64;

/// Fills a pool of 16 MiB: a group, and large objects that are used later than the group.
fn crowd(rules: Rules) -> Pool {
    let mut pool = Pool::with(rules, 16);
    if pool.state.quotas().is_ok() {
        pool.state.set_quota(&TenantId::default(), 16 * MIB).unwrap();
    }
    for index in 0..MEMBERS {
        pool.put(&format!("g/{index}"), 1024).unwrap();
    }
    let mut others = 0;
    while pool.state.totals().used + MIB <= 16 * MIB {
        pool.put(&format!("other{others}"), MIB).unwrap();
        others += 1;
    }
    pool
}

fn evicted(pool: &Pool) -> u64 {
    pool.state.log().counters().evicted_keys
}

/// Starts a put and checks that each of its calls evicts a bounded number of objects.
fn start_in_slices(pool: &mut Pool, key: &str, length: u64) -> Result<Started> {
    let mut progress = PutProgress::default();
    loop {
        let before = evicted(pool);
        let step = pool.step(key, length, &mut progress);
        let count = evicted(pool) - before;
        assert!(count <= EVICTED_MAX, "one call evicted {count} objects");
        match step? {
            PutStep::Started(started) => return Ok(started),
            PutStep::Pending(_) => {}
        }
    }
}

#[test]
fn put_evicts_a_large_group_in_slices() {
    for synced in [None, Some(u64::MAX)] {
        let mut pool = crowd(Rules::default());
        if let Some(position) = synced {
            pool.state.record_effects();
            pool.state.confirm_synced(position);
        }
        let started = start_in_slices(&mut pool, "new", 2 * MIB).unwrap();
        pool.end(A, "new", &started).unwrap();
        assert!((0..MEMBERS).all(|index| !pool.exists(&format!("g/{index}"))));
        pool.advance_all();
        assert_eq!(evicted(&pool), MEMBERS as u64, "and nothing else");
        assert_eq!(pool.state.totals().keys, 7, "the large objects");
    }
}

#[test]
fn group_is_gone_for_readers_from_the_first_slice_on() {
    let mut pool = crowd(Rules::default());
    let mut progress = PutProgress::default();
    while evicted(&pool) == 0 {
        let pending = pool.step("new", 2 * MIB, &mut progress).unwrap();
        assert!(matches!(pending, PutStep::Pending(_)), "{pending:?}");
    }
    pool.state.puts().cancel_put(progress);
    assert!(evicted(&pool) <= EVICTED_MAX, "one slice");
    let last = format!("g/{}", MEMBERS - 1);
    fails(pool.locate(&last, true, false), ErrorCode::OBJECT_NOT_FOUND);
    fails(pool.remove("g/77", false), ErrorCode::OBJECT_NOT_FOUND);
    let again = pool.put("g/100", 512).unwrap();
    pool.advance_all();
    assert_eq!(pool.locate("g/100", false, false).unwrap().version, again.version);
    assert_eq!(evicted(&pool), MEMBERS as u64, "the new member has a new group");
}

#[test]
fn quota_evicts_a_large_group_in_slices() {
    let mut pool = crowd(Rules { is_multi_tenant: true, ..Rules::default() });
    pool.state.set_quota(&TenantId::default(), pool.state.totals().used).unwrap();
    let started = start_in_slices(&mut pool, "new", 4 * MIB).unwrap();
    pool.end(A, "new", &started).unwrap();
    pool.advance_all();
    assert_eq!(evicted(&pool), MEMBERS as u64);
}

#[test]
fn eviction_ahead_of_need_takes_a_large_group_in_slices() {
    let watermark = Some(Watermark { high: 0.5, ratio: 0.1 });
    let mut pool = crowd(Rules { watermark, ..Rules::default() });
    loop {
        let before = evicted(&pool);
        let due = pool.state.advance(pool.now);
        assert!(evicted(&pool) - before <= EVICTED_MAX + 64);
        if due.is_none_or(|due| due > pool.now) {
            break;
        }
    }
    assert!(evicted(&pool) >= MEMBERS as u64);
}

#[test]
fn leased_member_keeps_a_large_group() {
    let mut pool = crowd(Rules::default());
    pool.locate("g/5000", true, false).unwrap();
    let started = start_in_slices(&mut pool, "new", MIB).unwrap();
    pool.end(A, "new", &started).unwrap();
    assert!(pool.exists("g/0") && pool.exists("g/5000"));
    // The member that kept the group leaves it.
    pool.remove("g/5000", true).unwrap();
    pool.wait(10);
    let started = start_in_slices(&mut pool, "newer", 7 * MIB).unwrap();
    pool.end(A, "newer", &started).unwrap();
    assert!(!pool.exists("g/0"));
}

#[test]
fn refused_put_counts_a_large_group_by_its_leased_member() {
    let mut pool = Pool::new(8);
    for index in 0..8192 {
        pool.put(&format!("g/{index}"), 1024).unwrap();
    }
    pool.locate("g/8000", true, false).unwrap();
    let error = fails(pool.put("new", MIB), ErrorCode::NO_AVAILABLE_HANDLE).to_string();
    assert!(error.contains(&format!("leased={}", 8 * MIB)), "{error}");
}
