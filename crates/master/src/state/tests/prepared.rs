//! Puts in prepared memory start before the log has them.

use proptest::prelude::*;

use super::{
    recovery::{described, restarted},
    *,
};
use crate::state::{ids::BlockId, lease::Timestamp, ledger::replay::QuarantinedRange};

const PAGE: u64 = 4096;

/// Lets answers wait for the log, which has everything so far, or for nothing.
pub(super) fn answer(state: &mut State, waits: bool) {
    let position = state.log().log_position();
    state.puts().set_answerable(waits.then_some(position));
}

impl Pool {
    /// Lets answers wait for the log from here on, and tells the state that all so far is in it.
    fn answer_from_log(&mut self) {
        self.state.record_effects();
        answer(&mut self.state, true);
    }

    /// Puts an object, and returns whether its start need not wait.
    fn is_prepared(&mut self, key: &str, length: u64) -> bool {
        self.put(key, length).unwrap().is_prepared
    }

    fn resume_segment(&mut self) {
        self.state.resume(A, &spec(A, 1, 1, 1)).unwrap();
    }
}

#[test]
fn starts_in_memory_that_the_log_knows_of() {
    let mut pool = Pool::new(16);
    assert!(!pool.is_prepared("a", PAGE) && !pool.is_prepared("b", PAGE), "waits are short");
    pool.answer_from_log();
    assert!(!pool.is_prepared("c", PAGE), "the first of its size");
    assert!(!pool.is_prepared("d", PAGE), "the log does not have the preparation");
    pool.answer_from_log();
    assert!(pool.is_prepared("e", PAGE));
    assert!(!pool.is_prepared("f", 2 * PAGE), "another size");
    pool.answer_from_log();
    assert!(pool.is_prepared("g", PAGE) && pool.is_prepared("h", 2 * PAGE));
}

#[test]
fn enough_is_prepared_for_puts_side_by_side() {
    let mut pool = Pool::new(16);
    for round in 0..40 {
        pool.answer_from_log();
        pool.put(&format!("{round}"), PAGE).unwrap();
    }
    pool.answer_from_log();
    let prepared = (0..100).filter(|n| pool.is_prepared(&format!("n{n}"), PAGE)).count();
    assert_eq!(prepared, 32);
}

#[test]
fn prepared_memory_is_given_back_when_it_is_needed() {
    let mut pool = Pool::new(1);
    pool.answer_from_log();
    pool.put("small", PAGE).unwrap();
    assert!(pool.state.inventory.pool().has_prepared());
    pool.put("rest", MIB - PAGE).unwrap();
    assert!(!pool.state.inventory.pool().has_prepared());
    assert!(pool.exists("small") && pool.exists("rest"));
}

#[test]
fn nothing_is_prepared_any_more_once_waits_are_short() {
    let mut pool = Pool::new(1);
    pool.answer_from_log();
    pool.put("k", PAGE).unwrap();
    pool.state.puts().set_answerable(None);
    assert!(!pool.state.inventory.pool().has_prepared());
    let mut image = Image::default();
    let mut effects = Vec::new();
    pool.state.log_mut().take_effects(&mut effects);
    image.replay(&effects).unwrap();
    assert!(image.quarantined.is_empty(), "the log says so, too");
}

#[test]
fn segment_that_leaves_or_drains_has_no_prepared_memory() {
    for is_drained in [false, true] {
        let mut pool = Pool::new(1);
        pool.answer_from_log();
        pool.put("k", PAGE).unwrap();
        if is_drained {
            let segments = ["host-a:1".to_owned()];
            let new = NewJob { segments: &segments, targets: &[], concurrency: 1, may_evict: true };
            pool.state.tasks().create_job(pool.now, new).unwrap();
        } else {
            pool.state.unmount(pool.now, A, SegmentId::from_bits(1), Duration::ZERO).unwrap();
        }
        assert!(!pool.state.inventory.pool().has_prepared(), "{is_drained}");
    }
}

#[test]
fn snapshots_have_the_prepared_memory() {
    let mut pool = Pool::new(1);
    pool.answer_from_log();
    pool.put("k", PAGE).unwrap();
    let prepared = pool.state.inventory.pool().prepared().count();
    assert_eq!((prepared, described(&pool).quarantined.len()), (2, 2));
    let mut new = restarted(&mut pool);
    new.resume_segment();
    assert_eq!(new.state.inventory.pool().quarantined().count(), 2);
    new.wait(late_end().as_secs() + 1);
    assert_eq!(new.state.inventory.pool().quarantined().count(), 0);
}

#[test]
fn of_each_byte_the_longest_rest_counts() {
    let second = Duration::from_secs(1);
    let rests = |ranges: [(u64, u64, u32); 2]| {
        let mut pool = Pool::new(1);
        let mut image = described(&pool);
        let number = *image.segments.keys().next().unwrap();
        for (offset, length, seconds) in ranges {
            let range = QuarantinedRange { length, time: second * seconds };
            image.quarantined.insert((number, offset), range);
        }
        let rules = pool.state.rules().clone();
        pool.state = State::restore(rules, 9, pool.now, image, Duration::ZERO).0;
        let state = &pool.state.inventory;
        let rest = |(until, slot, block): (Timestamp, SegmentSlot, BlockId)| {
            let allocator = &state.segment(slot).allocator;
            let seconds = until.left(pool.now).as_secs_f64().round() as u32;
            (allocator.offset(block), allocator.size(block), seconds)
        };
        let mut rests: Vec<_> = state.pool().quarantined().map(rest).collect();
        rests.sort_unstable();
        rests
    };
    assert_eq!(rests([(PAGE, PAGE, 5), (0, 2 * PAGE, 40)]), [(0, 2 * PAGE, 40)]);
    let apart = [(0, PAGE, 5), (PAGE, PAGE, 40)];
    assert_eq!(rests([(0, 2 * PAGE, 5), (PAGE, PAGE, 40)]), apart);
}

#[test]
fn versions_of_unlogged_starts_are_not_used_again() {
    let mut pool = Pool::new(1);
    pool.answer_from_log();
    pool.put("k", PAGE).unwrap();
    let mut image = described(&pool);
    let mut versions = Vec::new();
    for _ in 0..3 {
        let rules = pool.state.rules().clone();
        let (state, _) = State::restore(rules, 9, pool.now, image.clone(), Duration::ZERO);
        let mut new = Pool { state, now: pool.now, tenant: pool.tenant.clone() };
        new.state.register(new.now, A, "host-a:1").unwrap();
        new.resume_segment();
        new.wait(2);
        // All that the log gets is that the put is prepared.
        answer(&mut new.state, true);
        let unlogged = new.start(A, "first", PAGE).unwrap();
        new.revoke(A, "first", &unlogged).unwrap();
        let mut effects = Vec::new();
        new.state.log_mut().take_effects(&mut effects);
        image.replay(&effects).unwrap();
        answer(&mut new.state, true);
        let started = new.start(A, "second", PAGE).unwrap();
        assert!(started.is_prepared);
        versions.push(started.version);
    }
    versions.dedup();
    assert_eq!(versions.len(), 3);
}

#[derive(Debug, Clone)]
enum Call {
    Start {
        length: u64,
    },
    End {
        nth: prop::sample::Index,
        fails: bool,
    },
    Remove {
        nth: prop::sample::Index,
    },
    /// The log reaches everything but the last changes.
    Reach {
        all_but: usize,
    },
    Wait {
        seconds: u64,
    },
}

fn call() -> impl Strategy<Value = Call> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        6 => prop_oneof![Just(PAGE), Just(2 * PAGE), Just(100)]
            .prop_map(|length| Call::Start { length }),
        3 => (index(), any::<bool>()).prop_map(|(nth, fails)| Call::End { nth, fails }),
        2 => index().prop_map(|nth| Call::Remove { nth }),
        3 => (0..4_usize).prop_map(|all_but| Call::Reach { all_but }),
        1 => (1..20_u64).prop_map(|seconds| Call::Wait { seconds }),
    ]
}

/// A put that may still be written: its key, its start, and until when.
type OpenPut = (String, Started, Moment);

/// A master, and the parts of its log by the positions where they end.
struct Run {
    pool: Pool,
    parts: Vec<(u64, Vec<u8>)>,
    /// Number of parts that a later master has.
    reached: usize,
    open: Vec<OpenPut>,
    ended: Vec<String>,
}

impl Run {
    fn new() -> Self {
        let mut pool = Pool::new(1);
        pool.state.record_effects();
        let head = {
            let mut bytes = Vec::new();
            pool.state.begin_snapshot(pool.now, &mut bytes);
            bytes
        };
        let start = pool.state.log().log_position();
        pool.state.confirm_synced(start);
        pool.state.puts().set_answerable(Some(start));
        Self { pool, parts: vec![(start, head)], reached: 1, open: Vec::new(), ended: Vec::new() }
    }

    fn run(&mut self, number: usize, call: Call) {
        let pool = &mut self.pool;
        match call {
            Call::Start { length } => {
                let key = format!("k{number}");
                if let Ok(started) = pool.start(A, &key, length) {
                    self.open.push((key, started, pool.now + late_end()));
                }
            }
            Call::End { nth, fails } if !self.open.is_empty() => {
                let at = nth.index(self.open.len());
                let (key, started, _) = &self.open[at];
                if fails {
                    // Its bytes may arrive late.
                    let failed = [started.places[0].replica];
                    let (key, version) = (key.as_bytes(), started.version);
                    let put = PutRef { key, version, failed_replicas: &failed, checksum: None };
                    let _ = pool.state.puts().put_revoke(pool.now, A, &pool.tenant, put);
                } else {
                    let (key, started, _) = self.open.remove(at);
                    if pool.end(A, &key, &started).is_ok() {
                        self.ended.push(key);
                    }
                }
            }
            Call::Remove { nth } if !self.ended.is_empty() => {
                let key = self.ended.swap_remove(nth.index(self.ended.len()));
                let _ = pool.remove(&key, true);
            }
            Call::Reach { all_but } => {
                self.reached = self.reached.max(self.parts.len().saturating_sub(all_but));
                let position = self.parts[self.reached - 1].0;
                pool.state.confirm_synced(position);
                pool.state.confirm_durable(position);
                pool.state.puts().set_answerable(Some(position));
            }
            Call::Wait { seconds } => pool.wait(seconds),
            Call::End { .. } | Call::Remove { .. } => {}
        }
        let mut effects = Vec::new();
        self.pool.state.log_mut().take_effects(&mut effects);
        self.parts.push((self.pool.state.log().log_position(), effects));
    }

    /// Returns the master that goes on with what the log has reached, and the starts that were answered:
    /// those that the log has, and those in prepared memory.
    fn crash(self) -> (Pool, Vec<OpenPut>) {
        let mut image = Image::default();
        for (_, effects) in &self.parts[..self.reached] {
            image.replay(effects).unwrap();
        }
        let is_answered = |started: &Started| {
            started.is_prepared || image.writes.contains_key(&started.version.0)
        };
        let now = self.pool.now;
        let open = self.open.into_iter();
        let answered = open.filter(|(_, put, until)| is_answered(put) && !until.has_passed(now));
        let answered: Vec<_> = answered.collect();
        let rules = self.pool.state.rules().clone();
        let (state, _) = State::restore(rules, 9, now, image, Duration::ZERO);
        let mut new = Pool { state, now, tenant: self.pool.tenant.clone() };
        new.state.register(now, A, "host-a:1").unwrap();
        new.state.register(now, B, "host-b:1").unwrap();
        new.resume_segment();
        (new, answered)
    }
}

proptest! {
    #[test]
    fn memory_of_answered_starts_is_given_to_nobody_after_a_restart(
        calls in prop::collection::vec(call(), 1..80),
    ) {
        let mut run = Run::new();
        for (number, call) in calls.into_iter().enumerate() {
            run.run(number, call);
        }
        let (mut new, open) = run.crash();
        for second in 0..=late_end().as_secs() {
            for number in 0.. {
                let Ok(started) = new.start(B, &format!("new {second} {number}"), PAGE) else { break };
                let place = started.places[0];
                for (key, earlier, until) in &open {
                    let held = earlier.places[0];
                    let is_apart = place.offset >= held.offset + held.length
                        || held.offset >= place.offset + place.length;
                    prop_assert!(
                        is_apart || until.has_passed(new.now),
                        "{key} may still be written after {second} s"
                    );
                }
            }
            new.wait(1);
        }
    }
}
