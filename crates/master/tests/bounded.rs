//! Work per lock of the state in large pools. The long tier, in an optimized build, measures the
//! processor time of the calling thread, which does not depend on the load of the machine.

#![allow(clippy::unwrap_used, reason = "helpers of tests, which may panic")]

use std::{sync::LazyLock, time::Duration};

use mooncake_base::{
    ClientId, ErrorCode, Incarnation, KeyRef, Moment, SegmentId, TenantId, requirement,
};
use mooncake_master::state::{
    LocateOptions, Put, PutOptions, PutProgress, PutRef, PutStep, Rules, SegmentSpec, State,
};
use rustix::time::{ClockId, clock_gettime};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const NOW: Moment = Moment::from_boot(Duration::from_secs(1000));
const CLIENT: ClientId = ClientId::from_bits(1);
/// No lock of the state may be held for longer.
const HOLD_MAX: Duration = Duration::from_millis(5);
/// Steps that one call may take.
const STEPS_MAX: u64 = 3 * 4096;

/// Whether times are measured: an unoptimized build is several times slower.
fn is_timed() -> bool {
    requirement::is_long_run() && !cfg!(debug_assertions)
}

/// Processor time of this thread since `begun`.
fn spent_since(begun: Duration) -> Duration {
    thread_time() - begun
}

fn thread_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap()
}

fn spec(id: u128, base: u64, length: u64, name: &str) -> SegmentSpec {
    SegmentSpec {
        id: SegmentId::from_bits(id),
        incarnation: Incarnation(1),
        name: name.to_owned(),
        endpoint: name.to_owned(),
        base,
        length,
        protocol: "tcp".to_owned(),
    }
}

fn step(
    state: &mut State,
    key: &str,
    length: u64,
    progress: &mut PutProgress,
) -> mooncake_base::Result<PutStep> {
    let put = put(key, length, b"");
    state.puts().put_step(NOW, CLIENT, &TenantId::default(), &put, progress)
}

fn put<'a>(key: &'a str, length: u64, group: &'a [u8]) -> Put<'a> {
    static OPTIONS: LazyLock<PutOptions> = LazyLock::new(PutOptions::default);
    let key = KeyRef::new(key.as_bytes()).unwrap();
    Put { key, length, group, options: &OPTIONS, is_replacing: false, if_version: None, request: 0 }
}

/// Returns a pool filled with this number of objects of 64 KiB.
fn full_pool(objects: u64, group: &[u8]) -> State {
    let mut state = State::new(Rules::default(), 1);
    let tenant = TenantId::default();
    state.register(NOW, CLIENT, "host-a:1").unwrap();
    state.mount(NOW, CLIENT, spec(1, 1 << 45, objects * 64 * KIB, "host-a:1")).unwrap();
    for index in 0..objects {
        let key = format!("k{index}");
        let started =
            state.puts().put_start(NOW, CLIENT, &tenant, put(&key, 64 * KIB, group)).unwrap();
        let version = started.version;
        let put = PutRef { key: b"", version, failed_replicas: &[], checksum: None };
        state.puts().put_end(NOW, CLIENT, &tenant, put).unwrap();
    }
    state
}

#[test]
fn large_put_among_many_small_objects_takes_short_slices() {
    let objects: u64 = if requirement::is_long_run() { 16 << 20 } else { 1 << 18 };
    let mut state = full_pool(objects, b"");
    let tenant = TenantId::default();
    let lease = LocateOptions { has_lease: true, has_fence: false };
    let mut at = 0;
    while at < objects {
        state.locate(NOW, &tenant, &[format!("k{at}")], lease);
        at += 500 + (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % 1000;
    }
    // Longer than the distance of leased objects in most places, and than any distance.
    for (length, can_succeed) in [(75 * MIB, true), (256 * MIB, false)] {
        let mut progress = PutProgress::default();
        let (mut longest, mut all, begun) = (Duration::ZERO, 0, thread_time());
        let result = loop {
            let (call, before) = (thread_time(), state.steps());
            let step = step(&mut state, "large", length, &mut progress);
            longest = longest.max(spent_since(call));
            let steps = state.steps() - before;
            assert!(steps <= STEPS_MAX, "steps={steps}");
            all += steps;
            match step {
                Ok(PutStep::Pending(_)) => {}
                Ok(PutStep::Started(started)) => break Ok(started),
                Err(error) => break Err(error),
            }
        };
        match result {
            Ok(started) => {
                assert!(can_succeed);
                let version = started.version;
                let put = PutRef { key: b"", version, failed_replicas: &[], checksum: None };
                state.puts().put_revoke(NOW, CLIENT, &tenant, put).unwrap();
            }
            Err(error) => {
                assert!(!can_succeed, "{error}");
                assert_eq!(error.code(), ErrorCode::NO_AVAILABLE_HANDLE);
                assert!(all <= 3 * objects, "it looked at everything once: {all} of {objects}");
            }
        }
        let all_time = spent_since(begun);
        println!("length={length} longest={longest:?} all={all_time:?} steps={all}");
        assert!(!is_timed() || longest < HOLD_MAX, "{length} {longest:?} of {all_time:?}");
    }
}

#[test]
fn large_group_costs_little_per_call() {
    let objects = 16 << 10;
    for is_leased in [true, false] {
        let mut state = full_pool(objects, b"group");
        if is_leased {
            let lease = LocateOptions { has_lease: true, has_fence: false };
            state.locate(NOW, &TenantId::default(), &[b"k9000"], lease);
        }
        let (mut progress, mut longest) = (PutProgress::default(), Duration::ZERO);
        let result = loop {
            let call = thread_time();
            let step = step(&mut state, "new", MIB, &mut progress);
            longest = longest.max(spent_since(call));
            match step {
                Ok(PutStep::Pending(_)) => {}
                Ok(PutStep::Started(_)) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        println!("is_leased={is_leased} longest={longest:?}");
        assert_eq!(result.is_err(), is_leased, "{result:?}");
        assert!(!is_timed() || longest < HOLD_MAX, "{longest:?}");
        // Work in proportion to the square of the group took seconds.
        assert!(longest < Duration::from_secs(1), "{longest:?}");
    }
}

#[test]
fn segments_of_many_clients_cost_little_each() {
    let clients: u64 = if requirement::is_long_run() { 10_000 } else { 1_000 };
    let mut state = State::new(Rules::default(), 1);
    let begun = thread_time();
    for number in 0..clients {
        let client = ClientId::from_bits(u128::from(100 + number));
        let name = format!("host-{number}:1");
        state.register(NOW, client, &name).unwrap();
        for segment in 1..=4 {
            let id = u128::from(8 * number + segment);
            state.mount(NOW, client, spec(id, segment << 40, MIB, &name)).unwrap();
        }
        state.suspect(NOW, client);
        state.heartbeat(NOW, client);
    }
    let announced = spent_since(begun);
    assert_eq!(state.totals().segments, 4 * clients);
    let begun = thread_time();
    let mut longest = Duration::ZERO;
    for second in 1..30 {
        let now = NOW + Duration::from_secs(second);
        loop {
            let call = thread_time();
            let due = state.advance(now);
            longest = longest.max(spent_since(call));
            if due.is_none_or(|due| due > now) {
                break;
            }
        }
    }
    let expired = spent_since(begun);
    assert_eq!((state.totals().segments, state.totals().clients), (0, 0));
    let limit = Duration::from_secs(1);
    let is_short = announced < limit && expired < limit && longest < HOLD_MAX;
    assert!(!is_timed() || is_short, "{announced:?} {expired:?} {longest:?}");
    // Quadratic work took minutes.
    assert!(announced + expired < Duration::from_secs(60), "{announced:?} {expired:?}");
}
