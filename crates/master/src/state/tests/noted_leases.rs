//! A master that takes over knows which objects have a lease, as far as it was told.

use std::collections::{BTreeMap, BTreeSet};

use mooncake_base::Version;
use proptest::prelude::*;

use super::{
    recovery::{described, restarted_from},
    *,
};

/// A standby that has heard of all leases since a pool of four objects, `a` to `d`, was filled.
fn standby(pool: &mut Pool) -> Image {
    pool.state.record_effects();
    for key in ["a", "b", "c", "d"] {
        pool.put(key, MIB).unwrap();
        pool.state.probe(pool.now, &pool.tenant, key.as_bytes(), true);
    }
    let mut image = described(pool);
    tell(pool, &mut image);
    pool.wait(20);
    image
}

fn take_notes(pool: &mut Pool) -> LeaseNotes {
    let lease = pool.state.rules().lease_ttl;
    pool.state.log_mut().take_lease_notes(lease)
}

/// Tells a standby of the leases since it was told last.
fn tell(pool: &mut Pool, standby: &mut Image) {
    let notes = take_notes(pool);
    standby.receive_leases(pool.now, &notes);
}

/// The master dies, and the standby takes over.
fn take_over(pool: &Pool, standby: Image) -> Pool {
    let mut pool = restarted_from(pool, standby);
    pool.state.resume(A, &spec(A, 1, 1, 4)).unwrap();
    pool
}

fn lease(pool: &mut Pool, key: &str) {
    pool.state.probe(pool.now, &pool.tenant, key.as_bytes(), true);
}

#[test]
fn put_evicts_what_has_no_note_at_once() {
    let mut pool = Pool::new(4);
    let mut standby = standby(&mut pool);
    lease(&mut pool, "a");
    tell(&mut pool, &mut standby);
    let mut pool = take_over(&pool, standby);
    for key in ["e", "f", "g"] {
        pool.put(key, MIB).unwrap();
    }
    assert!(pool.exists("a") && ["b", "c", "d"].iter().all(|key| !pool.exists(key)));
    // Notes have a slack of about a second.
    pool.wait(9);
    fails(pool.remove("a", false), ErrorCode::OBJECT_HAS_LEASE);
    pool.wait(3);
    pool.remove("a", false).unwrap();
}

#[test]
fn object_with_a_note_is_evicted_last() {
    let rules = Rules { eviction: EvictionKind::Lru, ..Rules::default() };
    let mut pool = Pool::with(rules, 4);
    let mut standby = standby(&mut pool);
    lease(&mut pool, "a");
    tell(&mut pool, &mut standby);
    let mut pool = take_over(&pool, standby);
    pool.wait(12);
    for key in ["e", "f", "g"] {
        pool.put(key, MIB).unwrap();
    }
    assert!(pool.exists("a"));
    pool.put("h", MIB).unwrap();
    assert!(!pool.exists("a"));
}

#[test]
fn put_waits_for_leases_that_are_not_known() {
    let mut pool = Pool::new(4);
    pool.state.record_effects();
    pool.put("a", 4 * MIB).unwrap();
    let mut never_told = described(&pool);
    let mut told_just_now = never_told.clone();
    tell(&mut pool, &mut told_just_now);
    let mut lost_some = told_just_now.clone();
    pool.wait(20);
    lost_some.receive_leases(pool.now, &LeaseNotes::any());
    let mut told_again = told_just_now.clone();
    told_again.forget_leases();
    never_told.receive_leases(pool.now, &take_notes(&mut pool));
    for standby in [never_told, lost_some, told_again] {
        let mut pool = take_over(&pool, standby);
        let error = fails(pool.put("b", 4 * MIB), ErrorCode::NO_AVAILABLE_HANDLE).to_string();
        assert!(!error.contains("retry_after_ms"), "too long to wait: {error}");
        pool.wait(8);
        let error = fails(pool.put("b", 4 * MIB), ErrorCode::NO_AVAILABLE_HANDLE).to_string();
        assert!(error.contains("retry_after_ms=2000"), "{error}");
        assert!(!error.contains("moving_objects"), "{error}");
        pool.wait(2);
        pool.put("b", 4 * MIB).unwrap();
        // Leases that this master grants itself are not awaited.
        lease(&mut pool, "b");
        pool.wait(8);
        let error = fails(pool.put("c", 4 * MIB), ErrorCode::NO_AVAILABLE_HANDLE).to_string();
        assert!(!error.contains("retry_after_ms"), "{error}");
    }
    let mut pool = take_over(&pool, told_just_now);
    pool.put("b", 4 * MIB).unwrap();
}

#[test]
fn value_that_replaces_a_leased_one_has_a_note() {
    let mut pool = Pool::new(8);
    let mut standby = standby(&mut pool);
    lease(&mut pool, "a");
    let version = pool.upsert("a", MIB).unwrap().version;
    pool.upsert("b", MIB).unwrap();
    let notes = take_notes(&mut pool);
    assert_eq!((notes.leases.len(), notes.leases.last()), (2, Some(&(version.0, 10_000))));
    // The order of notes and changes does not matter.
    standby.receive_leases(pool.now, &notes);
    let known = standby.known_leases;
    let standby = Image { known_leases: known, ..described(&pool) };
    let mut pool = restarted_from(&pool, standby);
    pool.state.resume(A, &spec(A, 1, 1, 8)).unwrap();
    fails(pool.remove("a", false), ErrorCode::OBJECT_HAS_LEASE);
    pool.remove("b", false).unwrap();
}

#[test]
fn object_is_noted_once_a_second_while_it_is_read() {
    let mut pool = Pool::new(4);
    pool.put("k", MIB).unwrap();
    take_notes(&mut pool);
    let mut notes = 0;
    for _ in 0..10_000 {
        pool.now = pool.now + Duration::from_millis(1);
        lease(&mut pool, "k");
        notes += take_notes(&mut pool).leases.len();
    }
    assert!((9..=11).contains(&notes), "{notes}");
    pool.state.log_mut().stop_lease_notes();
    pool.wait(20);
    lease(&mut pool, "k");
    assert_eq!(take_notes(&mut pool), LeaseNotes::any());
}

#[test]
fn standby_that_attaches_is_told_of_earlier_leases() {
    let mut pool = Pool::with(Rules::default(), 8);
    pool.state.record_effects();
    for index in 0..8192 {
        pool.put(&index.to_string(), 1024).unwrap();
    }
    for key in ["5000", "8000"] {
        lease(&mut pool, key);
    }
    let mut standby = described(&pool);
    tell(&mut pool, &mut standby);
    let mut sweep = LeaseSweep::default();
    assert_eq!(sweep_leases(&pool.state, &mut sweep, pool.now), None);
    sweep.restart();
    let first = sweep_leases(&pool.state, &mut sweep, pool.now).unwrap();
    assert!(first.is_empty());
    pool.now = pool.now + Duration::from_secs(4);
    // These slots have been seen: the lease has a note of its own.
    lease(&mut pool, "1");
    let rest = sweep_leases(&pool.state, &mut sweep, pool.now).unwrap();
    assert_eq!(sweep_leases(&pool.state, &mut sweep, pool.now), None);
    assert!(rest.is_whole && rest.leases.iter().all(|&(_, left_ms)| left_ms == 6000), "{rest:?}");
    standby.receive_leases(pool.now, &rest);
    tell(&mut pool, &mut standby);
    let mut pool = restarted_from(&pool, standby);
    pool.state.resume(A, &spec(A, 1, 1, 8)).unwrap();
    let keys = ["0", "1", "5000", "8000", "8191"];
    let leased = keys.map(|key| pool.remove(key, false).is_err());
    assert_eq!(leased, [false, true, true, true, false]);
    pool.wait(8);
    assert_eq!(["1", "5000"].map(|key| pool.remove(key, false).is_err()), [true, false]);
}

#[derive(Debug, Clone)]
enum Step {
    Put {
        key: u8,
    },
    Lease {
        key: u8,
    },
    Remove {
        key: u8,
    },
    /// The leader tells its standby, and looks for earlier leases if it is to; then time passes.
    Tell {
        has_slice: bool,
        milliseconds: u64,
    },
    /// The standby loses its connection, and attaches again.
    Attach,
}

fn step() -> impl Strategy<Value = Step> {
    let key = || 0_u8..6;
    prop_oneof![
        2 => key().prop_map(|key| Step::Put { key }),
        6 => key().prop_map(|key| Step::Lease { key }),
        1 => key().prop_map(|key| Step::Remove { key }),
        8 => (any::<bool>(), 0_u64..2000)
            .prop_map(|(has_slice, milliseconds)| Step::Tell { has_slice, milliseconds }),
        1 => Just(Step::Attach),
    ]
}

/// The end of the lease of each object, by key and version.
fn lease_ends(pool: &Pool) -> BTreeMap<(u8, Version), Moment> {
    let view = |key: u8| {
        let name = [b'a' + key];
        let view = pool.state.view_object(pool.now, &pool.tenant, &name).ok()?;
        Some(((key, view.version?), pool.now + view.lease_left))
    };
    (0..6).filter_map(view).collect()
}

proptest! {
    /// Whatever the leader had granted when it told last holds, and little else.
    #[test]
    fn heir_keeps_the_leases_that_it_was_told_of(steps in prop::collection::vec(step(), 1..60)) {
        let rules = Rules { lease_ttl: Duration::from_secs(3), ..Rules::default() };
        let slack = Duration::from_millis(1100);
        let mut pool = Pool::with(rules, 64);
        pool.state.record_effects();
        let (mut standby, mut sweep) = (Image::default(), LeaseSweep::default());
        let mut replaced = BTreeSet::new();
        let (mut told, mut is_attached, mut is_whole) = (BTreeMap::new(), false, false);
        for step in steps {
            match step {
                Step::Put { key } => {
                    let name = char::from(b'a' + key).to_string();
                    if pool.exists(&name) {
                        // A lease that passes to another value counts as a whole one.
                        replaced.insert(key);
                    }
                    pool.upsert(&name, 1024).unwrap();
                }
                Step::Lease { key } => lease(&mut pool, &char::from(b'a' + key).to_string()),
                Step::Remove { key } => {
                    let _ = pool.remove(&char::from(b'a' + key).to_string(), true);
                }
                Step::Attach => {
                    standby.forget_leases();
                    (is_attached, is_whole) = (false, false);
                }
                Step::Tell { has_slice, milliseconds } => {
                    let mut notes = take_notes(&mut pool);
                    if !std::mem::replace(&mut is_attached, true) || notes.is_any {
                        notes = LeaseNotes::any();
                        sweep.restart();
                    }
                    standby.receive_leases(pool.now, &notes);
                    if has_slice
                        && let Some(notes) = sweep_leases(&pool.state, &mut sweep, pool.now)
                    {
                        standby.receive_leases(pool.now, &notes);
                        is_whole = true;
                    }
                    told = lease_ends(&pool);
                    pool.now = pool.now + Duration::from_millis(milliseconds);
                }
            }
        }
        let present = lease_ends(&pool);
        let heir = Image { known_leases: standby.known_leases, ..described(&pool) };
        let mut heir = restarted_from(&pool, heir);
        heir.state.resume(A, &spec(A, 1, 1, 64)).unwrap();
        let kept = lease_ends(&heir);
        for (object, end) in told {
            if let Some(&kept) = kept.get(&object) {
                prop_assert!(end <= pool.now || kept >= end, "{object:?}: {kept:?} {end:?}");
            }
        }
        for (object, end) in present {
            if is_whole && !replaced.contains(&object.0) {
                prop_assert!(kept[&object] <= pool.now.max(end + slack), "{object:?}");
            }
        }
    }
}
