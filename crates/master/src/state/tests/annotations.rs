//! Expiry, tags, and puts and removals of one version only.

use mooncake_base::Version;

use super::*;
use crate::state::tags::Tags;
use crate::state::tests::recovery::restarted;

const SECOND: Duration = Duration::from_secs(1);

fn ttl(ttl: Duration) -> PutOptions {
    PutOptions { ttl: Some(ttl), ..PutOptions::default() }
}

fn view(pool: &Pool, key: &str) -> Result<ObjectView> {
    pool.state.view_object(pool.now, &pool.tenant, key.as_bytes())
}

fn expire(pool: &mut Pool, key: &str, ttl: Option<Duration>) -> Result<Version> {
    pool.state.puts().set_expiry(pool.now, &pool.tenant, key.as_bytes(), ttl)
}

/// Starts a put that replaces one version.
fn replace(pool: &mut Pool, key: &str, version: Version) -> Result<Started> {
    let put = Put {
        key: KeyRef::new(key.as_bytes()).unwrap(),
        length: MIB,
        group: b"",
        options: &PutOptions::default(),
        is_replacing: true,
        if_version: Some(version),
        request: 0,
    };
    pool.state.puts().put_start(pool.now, A, &pool.tenant, put)
}

#[test]
fn object_expires_although_it_is_leased_and_pinned() {
    let mut pool = Pool::new(16);
    let options = PutOptions { is_hard_pinned: true, ..ttl(SECOND) };
    pool.put_with("k", MIB, false, &options).unwrap();
    pool.put("stays", MIB).unwrap();
    assert_eq!(view(&pool, "k").unwrap().expires_in, Some(SECOND));
    pool.now = pool.now + Duration::from_millis(999);
    pool.locate("k", true, true).unwrap();
    let expiry = pool.now + Duration::from_millis(1);
    assert_eq!(pool.state.advance(pool.now), Some(expiry));
    pool.now = expiry;
    pool.advance_all();
    assert!(!pool.exists("k") && pool.exists("stays"));
    assert_eq!(pool.state.totals().counters.objects_expired, 1);
    assert_eq!(pool.state.totals().fenced, MIB, "the reader in flight is not disturbed");
}

#[test]
fn expired_object_is_absent_before_it_is_removed() {
    let mut pool = Pool::new(16);
    pool.put_with("k", MIB, false, &ttl(SECOND)).unwrap();
    pool.put_with("l", MIB, false, &ttl(SECOND)).unwrap();
    pool.now = pool.now + SECOND;
    fails(pool.locate("k", true, true), ErrorCode::OBJECT_NOT_FOUND);
    pool.put("l", MIB).unwrap();
    pool.advance_all();
    assert!(pool.exists("l"), "the new value has no time to live");
}

#[test]
fn expiry_begins_with_the_end_of_the_put() {
    let mut pool = Pool::new(16);
    let started = pool.start_with(A, "k", MIB, false, &ttl(SECOND)).unwrap();
    pool.now = pool.now + SECOND * 5;
    pool.end(A, "k", &started).unwrap();
    assert_eq!(view(&pool, "k").unwrap().expires_in, Some(SECOND));
}

#[test]
fn expiry_can_be_changed_and_taken_back() {
    let mut pool = Pool::new(16);
    let version = pool.put_with("k", MIB, false, &ttl(SECOND)).unwrap().version;
    assert_eq!(expire(&mut pool, "k", Some(SECOND * 60)).unwrap(), version);
    pool.wait(59);
    assert!(pool.exists("k"));
    expire(&mut pool, "k", None).unwrap();
    pool.wait(60);
    assert_eq!(view(&pool, "k").unwrap().expires_in, None);
    expire(&mut pool, "k", Some(SECOND)).unwrap();
    pool.wait(1);
    fails(expire(&mut pool, "k", None), ErrorCode::OBJECT_NOT_FOUND);
    fails(expire(&mut pool, "k", Some(Duration::ZERO)), ErrorCode::INVALID_PARAMS);
    pool.start(A, "k", MIB).unwrap();
    fails(expire(&mut pool, "k", Some(SECOND)), ErrorCode::REPLICA_IS_NOT_READY);
    fails(pool.put_with("z", MIB, false, &ttl(Duration::ZERO)), ErrorCode::INVALID_PARAMS);
}

#[test]
fn expiry_and_tags_survive_a_restart() {
    let mut pool = Pool::new(16);
    pool.state.record_effects();
    let tags = Tags::new([("model", "m"), ("dtype", "f16")]).unwrap();
    let options = PutOptions { tags: tags.clone(), ..ttl(SECOND * 60) };
    pool.put_with("k", MIB, false, &options).unwrap();
    let unfinished = pool.start_with(A, "u", MIB, false, &options).unwrap();
    pool.now = pool.now + SECOND * 20;
    let mut pool = restarted(&mut pool);
    pool.state.resume(A, &spec(A, 1, 1, 16)).unwrap();
    let found = view(&pool, "k").unwrap();
    assert_eq!((found.expires_in, &found.tags), (Some(SECOND * 40), &tags));
    pool.end(A, "u", &unfinished).unwrap();
    let found = view(&pool, "u").unwrap();
    assert_eq!((found.expires_in, found.tags), (Some(SECOND * 60), tags));
    pool.wait(40);
    assert!(!pool.exists("k") && pool.exists("u"));
}

#[test]
fn put_replaces_only_the_version_it_names() {
    let mut pool = Pool::new(16);
    fails(replace(&mut pool, "k", Version(1)), ErrorCode::OBJECT_ALREADY_EXISTS);
    let first = pool.put("k", MIB).unwrap().version;
    // Two writers read the same version; the one that ends later must not overwrite the other.
    let winner = replace(&mut pool, "k", first).unwrap();
    let loser = replace(&mut pool, "k", first).unwrap();
    pool.end(A, "k", &winner).unwrap();
    fails(pool.end(A, "k", &loser), ErrorCode::OBJECT_ALREADY_EXISTS);
    assert_eq!(pool.locate("k", false, false).unwrap().version, winner.version);
    let error = fails(replace(&mut pool, "k", first), ErrorCode::OBJECT_ALREADY_EXISTS);
    let text = error.to_string();
    assert!(text.contains(&format!("version={}", winner.version)), "{text}");
    pool.wait(11);
    assert_eq!(pool.state.totals().used, MIB, "the loser's memory is free");
}

#[test]
fn condition_of_a_put_survives_a_restart() {
    let mut pool = Pool::new(16);
    pool.state.record_effects();
    let first = pool.put("k", MIB).unwrap().version;
    let late = replace(&mut pool, "k", first).unwrap();
    let second = pool.upsert("k", MIB).unwrap().version;
    let mut pool = restarted(&mut pool);
    pool.state.resume(A, &spec(A, 1, 1, 16)).unwrap();
    fails(pool.end(A, "k", &late), ErrorCode::OBJECT_ALREADY_EXISTS);
    assert_eq!(pool.locate("k", false, false).unwrap().version, second);
}

#[test]
fn removes_only_the_version_it_names() {
    let mut pool = Pool::new(16);
    let first = pool.put("k", MIB).unwrap().version;
    let second = pool.upsert("k", MIB).unwrap().version;
    let mut remove = |version| {
        let (now, tenant) = (pool.now, pool.tenant.clone());
        let terms = RemovalTerms { if_version: Some(version), ..RemovalTerms::default() };
        pool.state.remove_under(now, &tenant, b"k", &terms)
    };
    fails(remove(first), ErrorCode::OBJECT_ALREADY_EXISTS);
    remove(second).unwrap();
    fails(remove(second), ErrorCode::OBJECT_NOT_FOUND);
}

#[test]
fn tags_are_few_short_and_unique() {
    assert_eq!(Tags::new([("b", "2"), ("a", "1")]).unwrap().iter().next(), Some(("a", "1")));
    assert!(Tags::new([]).unwrap().is_empty());
    let long = "x".repeat(1024);
    for tags in [vec![("", "x")], vec![("a", "1"), ("a", "2")], vec![("a", &long[..])]] {
        fails(Tags::new(tags), ErrorCode::INVALID_PARAMS);
    }
    let names: Vec<String> = (0..33).map(|number| number.to_string()).collect();
    fails(Tags::new(names.iter().map(|name| (&**name, ""))), ErrorCode::INVALID_PARAMS);
}
