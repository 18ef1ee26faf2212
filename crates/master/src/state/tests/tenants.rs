//! Tenants: their keys, and their quotas.

use super::*;

fn pool() -> Pool {
    let rules = Rules { is_multi_tenant: true, ..Rules::default() };
    let mut pool = Pool::with(rules, 8);
    pool.state.set_quota(&TenantId::default(), 4 * MIB).unwrap();
    pool
}

fn charged(pool: &Pool) -> u64 {
    pool.state.quota(&pool.tenant).unwrap().charged
}

#[test]
fn tenants_have_separate_keys_and_quotas() {
    let mut pool = pool();
    let other = TenantId::new("other");
    pool.state.set_quota(&other, MIB).unwrap();
    pool.put("k", MIB).unwrap();
    pool.tenant = other;
    assert!(!pool.exists("k"));
    pool.put("k", 1000).unwrap();
    assert_eq!(charged(&pool), 1000);
    pool.tenant = TenantId::default();
    assert_eq!(charged(&pool), MIB);
    assert_eq!(pool.locate("k", false, false).unwrap().length, MIB);
}

#[test]
fn tenant_without_quota_cannot_read_or_write() {
    let mut pool = pool();
    pool.tenant = TenantId::new("stranger");
    fails(pool.put("k", 1), ErrorCode::TENANT_NOT_REGISTERED);
    fails(pool.locate("k", true, true), ErrorCode::OBJECT_NOT_FOUND);
    fails(pool.state.quota(&pool.tenant), ErrorCode::OBJECT_NOT_FOUND);
}

#[test]
fn over_quota_evicts_own_oldest_first() {
    let mut pool = pool();
    let other = TenantId::new("other");
    pool.state.set_quota(&other, 4 * MIB).unwrap();
    pool.tenant = other.clone();
    pool.put("theirs", MIB).unwrap();
    pool.tenant = TenantId::default();
    for key in ["a", "b", "c", "d"] {
        pool.put(key, MIB).unwrap();
    }
    pool.locate("a", false, false).unwrap();
    pool.put("e", MIB).unwrap();
    let left = ["a", "b", "c", "d", "e"].map(|key| pool.exists(key));
    assert_eq!(left, [true, false, true, true, true], "the longest unused one went");
    let quota = pool.state.quota(&pool.tenant).unwrap();
    assert_eq!((quota.charged, quota.evicted_bytes, quota.refused), (4 * MIB, MIB, 0));
    pool.tenant = other;
    assert!(pool.exists("theirs"));
}

#[test]
fn held_objects_keep_counting_against_quota() {
    let mut pool = pool();
    pool.put_with("pin", MIB, false, &PutOptions { is_hard_pinned: true, ..Default::default() })
        .unwrap();
    pool.put("leased", 3 * MIB).unwrap();
    pool.locate("leased", true, false).unwrap();
    let error = fails(pool.put("k", MIB), ErrorCode::TENANT_QUOTA_EXCEEDED);
    assert!(error.to_string().contains("quota"), "{error}");
    assert_eq!(pool.state.quota(&pool.tenant).unwrap().refused, 1);
    pool.remove("pin", false).unwrap();
    pool.put("k", MIB).unwrap();
    pool.wait(11);
    pool.put("l", 3 * MIB).unwrap();
    assert!(!pool.exists("leased"));
}

#[test]
fn unfinished_put_is_charged_and_refunded() {
    let mut pool = pool();
    let started = pool.start(A, "k", 4 * MIB).unwrap();
    assert_eq!(charged(&pool), 4 * MIB);
    fails(pool.put("l", 1), ErrorCode::TENANT_QUOTA_EXCEEDED);
    pool.revoke(A, "k", &started).unwrap();
    assert_eq!(charged(&pool), 0);
    pool.start(A, "k", 4 * MIB).unwrap();
    pool.wait(601);
    assert_eq!(charged(&pool), 0, "a put that never ended, too");
}

#[test]
fn upsert_is_charged_for_added_bytes_only() {
    let mut pool = pool();
    pool.put("k", 3 * MIB).unwrap();
    pool.locate("k", true, false).unwrap();
    pool.upsert("k", 4 * MIB).unwrap();
    assert_eq!(charged(&pool), 4 * MIB);
    fails(pool.upsert("k", 5 * MIB), ErrorCode::TENANT_QUOTA_EXCEEDED);
    assert_eq!(pool.locate("k", false, false).unwrap().length, 4 * MIB, "the old one stays");
}

#[test]
fn each_replica_is_charged() {
    let mut pool = pool();
    pool.mount(B, 2, 8).unwrap();
    let both = PutOptions { replicas: 2, ..PutOptions::default() };
    pool.put_with("k", 2 * MIB, false, &both).unwrap();
    assert_eq!(charged(&pool), 4 * MIB);
    pool.state.unmount(pool.now, B, SegmentId::from_bits(2), Duration::ZERO).unwrap();
    pool.advance_all();
    assert_eq!(charged(&pool), 2 * MIB, "a lost copy is not paid for");
}

#[test]
fn quotas_scale_down_in_small_pool() {
    let mut pool = Pool::with(Rules { is_multi_tenant: true, ..Rules::default() }, 8);
    let (one, two) = (TenantId::new("one"), TenantId::new("two"));
    pool.state.set_quota(&one, 24 * MIB).unwrap();
    pool.state.set_quota(&two, 8 * MIB).unwrap();
    let effective = |pool: &Pool| {
        let quotas = pool.state.quotas().unwrap();
        quotas.iter().map(|quota| quota.effective / MIB).collect::<Vec<_>>()
    };
    assert_eq!(effective(&pool), [6, 2]);
    pool.state.unmount(pool.now, A, SegmentId::from_bits(1), Duration::ZERO).unwrap();
    assert_eq!(effective(&pool), [0, 0], "there is no memory");
    pool.mount(A, 1, 32).unwrap();
    assert_eq!(effective(&pool), [24, 8]);
}

#[test]
fn quota_is_removed_only_from_empty_tenant() {
    let mut pool = pool();
    pool.put("k", MIB).unwrap();
    fails(pool.state.remove_quota(&pool.tenant), ErrorCode::TENANT_NOT_EMPTY);
    pool.remove("k", true).unwrap();
    pool.state.remove_quota(&pool.tenant).unwrap();
    fails(pool.state.remove_quota(&pool.tenant), ErrorCode::OBJECT_NOT_FOUND);
    fails(pool.put("k", 1), ErrorCode::TENANT_NOT_REGISTERED);
    for (name, bytes) in [("t", 0), ("t", 1 << 63), ("_t", 1), ("a\nb", 1)] {
        let set = pool.state.set_quota(&TenantId::new(name), bytes);
        fails(set, ErrorCode::INVALID_PARAMS);
    }
    let mut single = Pool::new(1);
    fails(single.state.quotas(), ErrorCode::UNAVAILABLE_IN_CURRENT_MODE);
    fails(single.state.set_quota(&TenantId::new("t"), 1), ErrorCode::UNAVAILABLE_IN_CURRENT_MODE);
}
