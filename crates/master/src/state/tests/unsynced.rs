//! Freed memory waits until the record of its release is on disk.

use std::collections::{BTreeMap, HashMap};

use proptest::prelude::*;

use super::*;

const SEGMENT: SegmentId = SegmentId::from_bits(1);

impl Pool {
    /// A pool whose log is on disk so far.
    fn logged(mib: u64) -> Self {
        let mut pool = Self::new(mib);
        pool.state.record_effects();
        pool.sync();
        pool
    }

    fn sync(&mut self) -> u64 {
        let position = self.state.log().log_position();
        self.state.confirm_synced(position);
        position
    }

    /// Asserts that a put waits for the log, and starts then.
    #[track_caller]
    fn waits(&mut self, length: u64) {
        let mut progress = PutProgress::default();
        let step = self.step("waits", length, &mut progress).unwrap();
        let PutStep::Pending(Pending::Sync(position)) = step else { panic!("{step:?}") };
        assert!(position <= self.state.log().log_position());
        assert!(self.state.totals().awaiting_sync >= length);
        self.state.confirm_synced(position - 1);
        let step = self.step("waits", length, &mut progress).unwrap();
        assert!(matches!(step, PutStep::Pending(Pending::Sync(at)) if at == position), "{step:?}");
        self.state.confirm_synced(position);
        let step = self.step("waits", length, &mut progress).unwrap();
        let PutStep::Started(started) = step else { panic!("{step:?}") };
        self.end(A, "waits", &started).unwrap();
    }
}

#[test]
fn evicted_memory_waits_for_the_log() {
    let mut pool = Pool::logged(4);
    for key in ["a", "b", "c", "d"] {
        pool.put(key, MIB).unwrap();
    }
    pool.waits(MIB);
    assert!(!pool.exists("a") && pool.exists("b"), "only the oldest object was evicted");
}

#[test]
fn removed_replaced_and_revoked_memory_waits_for_the_log() {
    let mut pool = Pool::logged(4);
    pool.put("a", 4 * MIB).unwrap();
    pool.sync();
    pool.remove("a", true).unwrap();
    pool.waits(4 * MIB);
    let mut pool = Pool::logged(4);
    pool.put("a", 2 * MIB).unwrap();
    pool.upsert("a", 2 * MIB).unwrap();
    pool.waits(2 * MIB);
    let mut pool = Pool::logged(4);
    let started = pool.start(A, "a", 4 * MIB).unwrap();
    pool.revoke(A, "a", &started).unwrap();
    pool.waits(4 * MIB);
}

#[test]
fn put_waits_for_removed_memory_instead_of_evicting() {
    let mut pool = Pool::logged(4);
    for key in ["a", "b", "c", "d"] {
        pool.put(key, MIB).unwrap();
    }
    pool.sync();
    pool.remove("d", true).unwrap();
    assert!(pool.state.take_sync_request(), "an eighth of the pool waits");
    pool.waits(MIB);
    assert!(["a", "b", "c"].into_iter().all(|key| pool.exists(key)), "nothing was evicted");
    // Removed memory that cannot be enough is not waited for.
    pool.remove("waits", true).unwrap();
    let mut progress = PutProgress::default();
    let step = pool.step("large", 2 * MIB, &mut progress).unwrap();
    assert!(matches!(step, PutStep::Pending(Pending::Sync(_))), "{step:?}");
    assert!(!pool.exists("a"));
}

#[test]
fn memory_waits_for_the_log_after_its_fence() {
    let mut pool = Pool::logged(4);
    pool.put("a", 4 * MIB).unwrap();
    pool.locate("a", false, true).unwrap();
    pool.remove("a", true).unwrap();
    pool.wait(3);
    pool.waits(4 * MIB);
    let mut pool = Pool::logged(4);
    pool.put("a", 4 * MIB).unwrap();
    pool.locate("a", false, true).unwrap();
    pool.remove("a", true).unwrap();
    pool.sync();
    pool.wait(3);
    pool.put("b", 4 * MIB).unwrap();
}

#[test]
fn memory_waits_only_for_the_record_of_its_own_release() {
    let mut pool = Pool::logged(4);
    for key in ["a", "b"] {
        pool.put(key, 2 * MIB).unwrap();
    }
    pool.sync();
    pool.locate("a", false, true).unwrap();
    pool.remove("a", true).unwrap();
    let released_first = pool.state.log().log_position();
    pool.remove("b", true).unwrap();
    // The fence ends after the other object was removed.
    pool.wait(3);
    pool.state.confirm_synced(released_first);
    pool.put("c", 2 * MIB).unwrap();
    pool.remove("c", true).unwrap();
    pool.waits(4 * MIB);
}

#[test]
fn remounted_memory_waits_for_the_log() {
    let mut pool = Pool::logged(4);
    pool.put("a", MIB).unwrap();
    pool.wait(40);
    pool.sync();
    pool.state.unmount(pool.now, A, SEGMENT, Duration::ZERO).unwrap();
    pool.mount(A, 1, 4).unwrap();
    let mut progress = PutProgress::default();
    let step = pool.step("b", MIB, &mut progress).unwrap();
    assert!(matches!(step, PutStep::Pending(Pending::Sync(_))), "{step:?}");
    pool.sync();
    assert!(matches!(pool.step("b", MIB, &mut progress).unwrap(), PutStep::Started(_)));
    // Other memory has no past.
    pool.state.unmount(pool.now, A, SEGMENT, Duration::ZERO).unwrap();
    pool.state.mount(pool.now, A, spec(A, 1, 2, 4)).unwrap();
    pool.put("c", MIB).unwrap();
}

#[test]
fn nothing_waits_without_a_log() {
    let mut pool = Pool::logged(4);
    pool.put("a", 4 * MIB).unwrap();
    // The log is broken, or never synced.
    pool.state.confirm_synced(u64::MAX);
    pool.put("b", 4 * MIB).unwrap();
    assert_eq!(pool.state.totals().awaiting_sync, 0);
    let mut pool = Pool::new(4);
    pool.state.record_effects();
    pool.put("a", 4 * MIB).unwrap();
    pool.put("b", 4 * MIB).unwrap();
}

#[test]
fn one_sync_serves_many_puts() {
    let mut pool = Pool::logged(64);
    let mut syncs = 0;
    for index in 0..40 * 64 * 16 {
        let mut progress = PutProgress::default();
        let key = format!("k{index}");
        loop {
            match pool.step(&key, MIB / 16, &mut progress).unwrap() {
                PutStep::Started(started) => break pool.end(A, &key, &started).unwrap(),
                PutStep::Pending(_) => {
                    pool.sync();
                    syncs += 1;
                }
            }
        }
    }
    assert!((1..=40 * 64 * 16 / 32).contains(&syncs), "syncs={syncs}");
    // At most an eighth of a small pool is evicted ahead, and as much is free.
    let totals = pool.state.totals();
    assert!(totals.keys >= 64 * 16 * 3 / 4, "{totals:?}");
}

#[test]
fn object_that_a_put_replaces_is_not_evicted_ahead() {
    let mut pool = Pool::logged(64);
    let keys: Vec<_> = (0..64 * 16).map(|index| format!("k{index}")).collect();
    for key in &keys {
        pool.put(key, MIB / 16).unwrap();
    }
    // Each put replaces the object that is evicted next.
    for key in &keys {
        let is_present = pool.exists(key);
        let mut progress = PutProgress::default();
        let put = Put {
            key: KeyRef::new(key.as_bytes()).unwrap(),
            length: MIB / 16,
            group: b"",
            options: &PutOptions::default(),
            is_replacing: true,
            if_version: None,
            request: 0,
        };
        let started = loop {
            let step = pool.state.puts().put_step(pool.now, A, &pool.tenant, &put, &mut progress);
            match step.unwrap() {
                PutStep::Started(started) => break started,
                PutStep::Pending(_) => {
                    pool.sync();
                }
            }
        };
        assert_eq!(pool.exists(key), is_present, "{key}");
        pool.end(A, key, &started).unwrap();
    }
}

#[test]
fn cancelled_put_gives_its_memory_back() {
    let mut pool = Pool::logged(4);
    pool.put("a", 4 * MIB).unwrap();
    let mut progress = PutProgress::default();
    assert!(matches!(pool.step("b", MIB, &mut progress).unwrap(), PutStep::Pending(_)));
    pool.state.puts().cancel_put(progress);
    pool.sync();
    pool.put("c", 4 * MIB).unwrap();
    // A put that nobody continues does not keep it for ever.
    pool.put("e", 4 * MIB).unwrap_err();
    let mut progress = PutProgress::default();
    assert!(matches!(pool.step("d", 4 * MIB, &mut progress).unwrap(), PutStep::Pending(_)));
    pool.sync();
    pool.wait(120);
    pool.put("f", 4 * MIB).unwrap();
}

/// What older states of the log say about the memory: read from the effects alone.
#[derive(Default)]
struct Disk {
    /// Log position behind the effects read so far.
    position: u64,
    /// Ranges of each put and object by version.
    held: HashMap<u64, Vec<(SegmentNumber, u64, u64)>>,
    /// Ends of the releases of ranges, by segment number and start: end, and log position.
    freed: Vec<((SegmentNumber, u64, u64), u64)>,
}

impl Disk {
    /// Reads new effects. Memory that a put is given must not be held by another object in any
    /// state of the log from `synced` on.
    fn read(&mut self, bytes: &[u8], synced: u64) {
        let mut length = Vec::new();
        let decoded = Effect::decode_all(bytes, |effect| {
            length.clear();
            effect.encode(&mut length);
            self.position += length.len() as u64;
            match effect {
                Effect::Started { version, value, .. } => {
                    let copies = value.copies.iter();
                    let ranges: Vec<_> = copies
                        .map(|copy| (copy.segment, copy.offset, copy.offset + value.length))
                        .collect();
                    self.freed.retain(|&(_, position)| position > synced);
                    for range in &ranges {
                        let clash = self.freed.iter().find(|(freed, _)| {
                            freed.0 == range.0 && freed.1 < range.2 && range.1 < freed.2
                        });
                        assert_eq!(clash, None, "{range:?} synced={synced}");
                    }
                    self.held.insert(version, ranges);
                }
                Effect::Published { version, failed, .. } => {
                    assert!(failed.is_empty(), "{version}")
                }
                Effect::WriteDropped { version } => self.free(version),
                Effect::Dropped { object } => self.free(object.version),
                _ => {}
            }
        });
        decoded.unwrap();
    }

    fn free(&mut self, version: u64) {
        let position = self.position;
        let ranges = self.held.remove(&version).into_iter().flatten();
        self.freed.extend(ranges.map(|range| (range, position)));
    }
}

#[derive(Debug, Clone)]
enum Step {
    Put { key: u8, length: u64, is_replacing: bool },
    GoOn { nth: prop::sample::Index },
    Cancel { nth: prop::sample::Index },
    Remove { key: u8 },
    Read { key: u8 },
    Wait,
    Sync { share: u64 },
    Break,
}

fn step() -> impl Strategy<Value = Step> {
    let key = || 0_u8..24;
    prop_oneof![
        12 => (key(), 1_u64..300_000, any::<bool>())
            .prop_map(|(key, length, is_replacing)| Step::Put { key, length, is_replacing }),
        6 => any::<prop::sample::Index>().prop_map(|nth| Step::GoOn { nth }),
        1 => any::<prop::sample::Index>().prop_map(|nth| Step::Cancel { nth }),
        3 => key().prop_map(|key| Step::Remove { key }),
        2 => key().prop_map(|key| Step::Read { key }),
        1 => Just(Step::Wait),
        4 => (0_u64..5).prop_map(|share| Step::Sync { share }),
        1 => Just(Step::Break),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_state_on_disk_has_an_object_in_reused_memory(
        steps in prop::collection::vec(step(), 1..150),
    ) {
        let mut pool = Pool::logged(1);
        pool.mount(B, 2, 1).unwrap();
        let (mut disk, mut synced) = (Disk::default(), 0);
        let mut pending: BTreeMap<usize, (u8, u64, bool, PutProgress)> = BTreeMap::new();
        let mut bytes = Vec::new();
        pool.state.log_mut().take_effects(&mut bytes);
        disk.read(&bytes, synced);
        for (index, step) in steps.into_iter().enumerate() {
            let chosen = |nth: prop::sample::Index| {
                (!pending.is_empty()).then(|| *pending.keys().nth(nth.index(pending.len())).unwrap())
            };
            let put = match step {
                Step::Put { key, length, is_replacing } => {
                    Some((key, length, is_replacing, PutProgress::default()))
                }
                Step::GoOn { nth } => chosen(nth).and_then(|at| pending.remove(&at)),
                Step::Cancel { nth } => {
                    let put = chosen(nth).and_then(|at| pending.remove(&at));
                    put.into_iter().for_each(|put| pool.state.puts().cancel_put(put.3));
                    None
                }
                Step::Remove { key } => {
                    let _ = pool.remove(&format!("k{key}"), true);
                    None
                }
                Step::Read { key } => {
                    let _ = pool.locate(&format!("k{key}"), false, true);
                    None
                }
                Step::Wait => {
                    pool.wait(1);
                    None
                }
                Step::Sync { share } => {
                    synced += (pool.state.log().log_position() - synced) * share / 4;
                    pool.state.confirm_synced(synced);
                    None
                }
                // The log breaks and begins anew: all that was recorded is behind it.
                Step::Break => {
                    pool.state.confirm_synced(u64::MAX);
                    synced = pool.state.log().log_position();
                    pool.state.confirm_synced(synced);
                    None
                }
            };
            if let Some((key, length, is_replacing, mut progress)) = put {
                let name = format!("k{key}");
                let put = Put {
                    key: KeyRef::new(name.as_bytes()).unwrap(),
                    length,
                    group: b"",
                    options: &PutOptions::default(),
                    is_replacing,
                    if_version: None,
                    request: 0,
                };
                match pool.state.puts().put_step(pool.now, A, &pool.tenant, &put, &mut progress) {
                    Ok(PutStep::Started(started)) => {
                        let _ = match index % 7 {
                            0 => pool.revoke(A, &name, &started),
                            _ => pool.end(A, &name, &started),
                        };
                    }
                    Ok(PutStep::Pending(_)) => {
                        pending.insert(index, (key, length, is_replacing, progress));
                    }
                    Err(_) => {}
                }
            }
            bytes.clear();
            pool.state.log_mut().take_effects(&mut bytes);
            disk.read(&bytes, synced);
        }
        // At the end nothing is lost.
        pending.into_values().for_each(|put| pool.state.puts().cancel_put(put.3));
        pool.state.unregister(pool.now, A);
        pool.state.unregister(pool.now, B);
        pool.state.confirm_synced(u64::MAX);
        pool.wait(1);
        prop_assert_eq!(pool.state.totals().used, 0);
        prop_assert_eq!(pool.state.inventory.pool().unsynced.bytes, 0);
        prop_assert!(pool.state.searches.is_empty());
    }
}
