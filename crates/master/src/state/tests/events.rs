//! Object events: in order, complete, and only while recording is on.

use super::*;

/// Takes and formats the events: `+key` stored, `-key` removed, `0` cleared; `@group` appended.
fn take_events(pool: &mut Pool) -> Vec<String> {
    let word = |news: ObjectEvent| {
        let key = String::from_utf8_lossy(news.key()).into_owned();
        let group = match news.group() {
            [] => String::new(),
            group => format!("@{}", String::from_utf8_lossy(group)),
        };
        match news {
            ObjectEvent::Stored { .. } => format!("+{key}{group}"),
            ObjectEvent::Removed { .. } => format!("-{key}{group}"),
            ObjectEvent::Cleared { .. } => "0".to_owned(),
        }
    };
    pool.state.log_mut().take_events().into_iter().map(word).collect()
}

fn listened(mib: u64) -> Pool {
    let mut pool = Pool::new(mib);
    pool.state.log_mut().enable_events();
    pool
}

#[test]
fn keeps_no_events_without_subscribers() {
    let mut pool = Pool::new(4);
    pool.put("k", MIB).unwrap();
    assert!(!pool.state.log().has_events());
}

#[test]
fn emits_stored_and_removed_events() {
    let mut pool = listened(4);
    let started = pool.start(A, "k", MIB).unwrap();
    assert_eq!(take_events(&mut pool), Vec::<String>::new());
    pool.end(A, "k", &started).unwrap();
    pool.put("g/1", MIB).unwrap();
    assert_eq!(take_events(&mut pool), ["+k", "+g/1@g"]);
    pool.remove("g/1", false).unwrap();
    pool.remove("k", false).unwrap();
    assert_eq!(take_events(&mut pool), ["-g/1@g", "-k"]);
    assert!(!pool.state.log().has_events());
}

#[test]
fn upsert_emits_removed_then_stored() {
    let mut pool = listened(4);
    pool.put("k", MIB).unwrap();
    let upsert = pool.start_with(A, "k", MIB, true, &PutOptions::default()).unwrap();
    assert_eq!(take_events(&mut pool), ["+k"]);
    pool.end(A, "k", &upsert).unwrap();
    assert_eq!(take_events(&mut pool), ["-k", "+k"]);
}

#[test]
fn eviction_event_precedes_new_object() {
    let mut pool = listened(2);
    for key in ["a", "b", "c"] {
        pool.put(key, MIB).unwrap();
    }
    assert_eq!(take_events(&mut pool), ["+a", "+b", "-a", "+c"]);
}

#[test]
fn emits_removed_for_objects_of_expired_client() {
    let mut pool = listened(4);
    pool.put("k", MIB).unwrap();
    pool.state.unregister(pool.now, A);
    pool.advance_all();
    assert_eq!(take_events(&mut pool), ["+k", "-k"]);
}

#[test]
fn cleared_event_follows_its_removals() {
    let mut pool = listened(4);
    let remove_all = |pool: &mut Pool, is_forced| {
        let mut removal = Removal::new(pool.tenant.clone(), Selector::All, is_forced);
        while !pool.state.remove_matching(pool.now, &mut removal) {}
    };
    remove_all(&mut pool, true);
    assert_eq!(take_events(&mut pool), Vec::<String>::new(), "there was nothing to clear");
    pool.put("a", MIB).unwrap();
    pool.put("b", MIB).unwrap();
    pool.locate("b", true, false).unwrap();
    remove_all(&mut pool, false);
    assert_eq!(take_events(&mut pool), ["+a", "+b", "-a"], "a leased object stayed");
    remove_all(&mut pool, true);
    assert_eq!(take_events(&mut pool), ["-b", "0"]);
}
