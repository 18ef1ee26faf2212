//! Work per lock of the state in large pools. The long tier, in an optimized build, measures times.

#![allow(clippy::unwrap_used, reason = "helpers of tests, which may panic")]

use std::time::{Duration, Instant};

use mooncake_base::{
    ClientId, ErrorCode, Incarnation, KeyRef, Moment, SegmentId, TenantId, requirement,
};
use mooncake_master::state::{
    LocateOptions, Put, PutOptions, PutProgress, PutRef, PutStep, Rules, SegmentSpec, State,
};

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

fn step(state: &mut State, key: &str, length: u64, progress: &mut PutProgress) -> PutStep {
    try_step(state, key, length, progress).unwrap()
}

fn try_step(
    state: &mut State,
    key: &str,
    length: u64,
    progress: &mut PutProgress,
) -> mooncake_base::Result<PutStep> {
    let put = Put {
        key: KeyRef::new(key.as_bytes()).unwrap(),
        length,
        group: b"",
        options: &PutOptions::default(),
        is_replacing: false,
        request: 0,
    };
    state.put_step(NOW, CLIENT, &TenantId::default(), &put, progress)
}

#[test]
fn large_put_among_many_small_objects_takes_short_slices() {
    let objects: u64 = if requirement::is_long_run() { 16 << 20 } else { 1 << 18 };
    let mut state = State::new(Rules::default(), 1);
    let tenant = TenantId::default();
    state.register(NOW, CLIENT, "host-a:1").unwrap();
    state.mount(NOW, CLIENT, spec(1, 1 << 45, objects * 64 * KIB, "host-a:1")).unwrap();
    for index in 0..objects {
        let key = format!("k{index}");
        let progress = &mut PutProgress::default();
        let PutStep::Started(started) = step(&mut state, &key, 64 * KIB, progress) else {
            panic!("the pool has room")
        };
        let version = started.version;
        let put = PutRef { key: b"", version, failed_replicas: &[], checksum: None };
        state.put_end(NOW, CLIENT, &tenant, put).unwrap();
    }
    let lease = LocateOptions { has_lease: true, has_fence: false };
    let mut at = 0;
    while at < objects {
        state.locate(NOW, &tenant, &[format!("k{at}")], lease);
        at += 500 + (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % 1000;
    }
    // Longer than the distance of leased objects in most places, and than any distance.
    for (length, can_succeed) in [(75 * MIB, true), (256 * MIB, false)] {
        let mut progress = PutProgress::default();
        let (mut longest, mut all, begun) = (Duration::ZERO, 0, Instant::now());
        let result = loop {
            let (call, before) = (Instant::now(), state.search_steps());
            let step = try_step(&mut state, "large", length, &mut progress);
            longest = longest.max(call.elapsed());
            let steps = state.search_steps() - before;
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
                state.put_revoke(NOW, CLIENT, &tenant, put).unwrap();
            }
            Err(error) => {
                assert!(!can_succeed, "{error}");
                assert_eq!(error.code(), ErrorCode::NO_AVAILABLE_HANDLE);
                assert!(all <= 3 * objects, "it looked at everything once: {all} of {objects}");
            }
        }
        let all_time = begun.elapsed();
        assert!(!is_timed() || longest < HOLD_MAX, "{length} {longest:?} of {all_time:?}");
    }
}

#[test]
fn segments_of_many_clients_cost_little_each() {
    let clients: u64 = if requirement::is_long_run() { 10_000 } else { 1_000 };
    let mut state = State::new(Rules::default(), 1);
    let begun = Instant::now();
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
    let announced = begun.elapsed();
    assert_eq!(state.totals().segments, 4 * clients);
    let begun = Instant::now();
    let mut longest = Duration::ZERO;
    for second in 1..30 {
        let now = NOW + Duration::from_secs(second);
        loop {
            let call = Instant::now();
            let due = state.advance(now);
            longest = longest.max(call.elapsed());
            if due.is_none_or(|due| due > now) {
                break;
            }
        }
    }
    let expired = begun.elapsed();
    assert_eq!((state.totals().segments, state.totals().clients), (0, 0));
    let limit = Duration::from_secs(1);
    let is_short = announced < limit && expired < limit && longest < HOLD_MAX;
    assert!(!is_timed() || is_short, "{announced:?} {expired:?} {longest:?}");
    // Quadratic work took minutes.
    assert!(announced + expired < Duration::from_secs(60), "{announced:?} {expired:?}");
}
