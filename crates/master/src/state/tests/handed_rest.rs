//! A master that hands over brings into the log which memory must rest. The next one uses all other memory
//! at once.

use proptest::prelude::*;

use super::{
    recovery::{described, restarted_from},
    *,
};

const PAGE: u64 = 4096;

/// Hands a pool over. Returns the next master's, with the memory of its owner, and whether the log had all
/// that must rest.
fn hand_over(pool: &mut Pool) -> (Pool, bool) {
    // A snapshot leaves out what rests for a short time.
    let mut image = described(pool);
    let mut effects = Vec::new();
    pool.state.log_mut().take_effects(&mut effects);
    effects.clear();
    let is_logged = log_rest(&mut pool.state, pool.now);
    pool.state.log_mut().take_effects(&mut effects);
    image.replay(&effects).unwrap();
    if is_logged {
        image.set_rest_logged();
    }
    let mut new = restarted_from(pool, image);
    new.state.resume(A, &spec(A, 1, 1, 1)).unwrap();
    (new, is_logged)
}

/// A pool in which fences of about a second are granted.
fn pool() -> Pool {
    let mut pool = Pool::new(1);
    pool.state.record_effects();
    pool.put("first", PAGE).unwrap();
    pool.locate("first", true, true).unwrap();
    pool
}

#[test]
fn memory_is_used_at_once_after_a_hand_over() {
    let mut pool = pool();
    let (mut heir, is_logged) = hand_over(&mut pool);
    assert!(is_logged);
    heir.put("k", PAGE).unwrap();
    let mut killed = restarted_from(&pool, described(&pool));
    killed.state.resume(A, &spec(A, 1, 1, 1)).unwrap();
    fails(killed.put("k", PAGE), ErrorCode::NO_AVAILABLE_HANDLE);
}

#[test]
fn rest_that_is_not_known_by_block_is_not_logged() {
    let mut pool = pool();
    let mut killed = restarted_from(&pool, described(&pool));
    killed.state.resume(A, &spec(A, 1, 1, 1)).unwrap();
    let (_, is_logged) = hand_over(&mut killed);
    assert!(!is_logged, "all memory rests since it took over");
    killed.wait(2);
    assert!(hand_over(&mut killed).1);
    assert!(hand_over(&mut hand_over(&mut pool).0).1, "again at once");
}

#[test]
fn later_changes_void_what_the_leader_said() {
    let mut pool = pool();
    let mut image = described(&pool);
    image.set_rest_logged();
    pool.put("later", PAGE).unwrap();
    let mut effects = Vec::new();
    pool.state.log_mut().take_effects(&mut effects);
    image.replay(&effects).unwrap();
    let mut new = restarted_from(&pool, image);
    new.state.resume(A, &spec(A, 1, 1, 1)).unwrap();
    fails(new.put("k", PAGE), ErrorCode::NO_AVAILABLE_HANDLE);
}

#[derive(Debug, Clone)]
enum Call {
    Put {
        key: usize,
        pages: u64,
    },
    Read {
        key: usize,
    },
    Remove {
        key: usize,
    },
    /// A put that fails; its bytes may arrive late.
    Fail {
        pages: u64,
    },
    Wait {
        milliseconds: u64,
    },
    HandOver,
}

fn call() -> impl Strategy<Value = Call> {
    let key = || 0..6_usize;
    prop_oneof![
        4 => (key(), 1..60_u64).prop_map(|(key, pages)| Call::Put { key, pages }),
        4 => key().prop_map(|key| Call::Read { key }),
        2 => key().prop_map(|key| Call::Remove { key }),
        1 => (1..20_u64).prop_map(|pages| Call::Fail { pages }),
        2 => (1..700_u64).prop_map(|milliseconds| Call::Wait { milliseconds }),
        1 => Just(Call::HandOver),
    ]
}

/// Memory that is accessed until some time.
#[derive(Debug)]
struct Access {
    offset: u64,
    length: u64,
    until: Moment,
}

impl Access {
    fn of(place: &Place, until: Moment) -> Self {
        Self { offset: place.offset, length: place.length, until }
    }

    fn meets(&self, place: &Place, now: Moment) -> bool {
        let is_apart =
            place.offset >= self.offset + self.length || self.offset >= place.offset + place.length;
        !is_apart && !self.until.has_passed(now)
    }
}

/// Masters one after the other, and who accesses their memory.
struct Run {
    pool: Pool,
    accesses: Vec<Access>,
}

impl Run {
    fn step(&mut self, number: usize, call: &Call) -> Result<(), TestCaseError> {
        let pool = &mut self.pool;
        let name = |key: &usize| format!("k{key}");
        match call {
            Call::Put { key, pages } => {
                if let Ok(started) = pool.upsert(&name(key), pages * PAGE) {
                    self.check(&started)?;
                }
            }
            Call::Read { key } => {
                if let Ok(located) = pool.locate(&name(key), true, true) {
                    let until = pool.now + pool.state.rules().fence(located.length);
                    self.accesses.extend(located.places.iter().map(|it| Access::of(it, until)));
                }
            }
            Call::Remove { key } => drop(pool.remove(&name(key), true)),
            Call::Fail { pages } => {
                let key = format!("failed-{number}");
                let Ok(started) = pool.start(A, &key, pages * PAGE) else { return Ok(()) };
                self.check(&started)?;
                let until = self.pool.now + late_end();
                self.accesses.extend(started.places.iter().map(|it| Access::of(it, until)));
                let failed: Vec<_> = started.places.iter().map(|it| it.replica).collect();
                let (key, version) = (key.as_bytes(), started.version);
                let put = PutRef { key, version, failed_replicas: &failed, checksum: None };
                let pool = &mut self.pool;
                let _ = pool.state.puts().put_revoke(pool.now, A, &pool.tenant, put);
            }
            Call::Wait { milliseconds } => {
                pool.now = pool.now + Duration::from_millis(*milliseconds);
                pool.state.heartbeat(pool.now, A);
                pool.advance_all();
            }
            Call::HandOver => {
                self.pool = hand_over(pool).0;
            }
        }
        let position = self.pool.state.log().log_position();
        self.pool.state.confirm_synced(position);
        self.pool.state.confirm_durable(position);
        Ok(())
    }

    /// Checks that nobody accesses the memory that a put was given.
    fn check(&self, started: &Started) -> Result<(), TestCaseError> {
        for place in &started.places {
            for access in &self.accesses {
                prop_assert!(!access.meets(place, self.pool.now), "{access:?} meets {place:?}");
            }
        }
        Ok(())
    }
}

proptest! {
    #[test]
    fn memory_that_is_accessed_is_given_to_nobody_after_a_hand_over(
        calls in prop::collection::vec(call(), 1..120),
    ) {
        let mut run = Run { pool: pool(), accesses: Vec::new() };
        for (number, call) in calls.iter().enumerate() {
            run.step(number, call)?;
        }
    }
}
