//! Work per lock of the state: no call goes through everything that there is.

use rustix::time::{ClockId, clock_gettime};

use super::*;
use crate::state::tests::tasks::on;

/// Steps that one call may take: those after which it ends, and those of its last item.
const STEPS_MAX: u64 = 3 * 4096;
/// Processor time that calls may take which took seconds when each went through everything.
const TIME_MAX: Duration = Duration::from_secs(1);

fn thread_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap()
}

/// Returns how many steps the call takes.
fn steps_of<R>(pool: &mut Pool, call: impl FnOnce(&mut Pool) -> R) -> (R, u64) {
    let before = pool.state.steps();
    let result = call(pool);
    (result, pool.state.steps() - before)
}

#[test]
fn large_group_is_examined_in_slices() {
    const MEMBERS: usize = 20_000;
    let mut pool = Pool::new(32);
    for index in 0..MEMBERS {
        pool.put(&format!("g/{index}"), 1024).unwrap();
    }
    let mut others = 0;
    while pool.state.totals().used + MIB <= 32 * MIB {
        pool.put(&format!("other{others}"), MIB).unwrap();
        others += 1;
    }
    let (mut progress, mut calls) = (PutProgress::default(), 0);
    let started = loop {
        calls += 1;
        match pool.step("new", 2 * MIB, &mut progress).unwrap() {
            PutStep::Started(started) => break started,
            PutStep::Pending(_) => assert!(calls < 1000),
        }
        // Nothing is evicted before the last member was found evictable.
        let evicted = pool.state.log().counters().evicted_keys;
        assert!(evicted == 0 || calls > MEMBERS / 4096, "after {calls} calls");
    };
    assert!(calls > MEMBERS / 4096, "the whole group was examined in {calls} calls");
    pool.end(A, "new", &started).unwrap();
}

#[test]
fn member_protected_during_the_examination_keeps_its_group() {
    const MEMBERS: usize = 10_000;
    let mut pool = Pool::new(16);
    for index in 0..MEMBERS {
        pool.put(&format!("g/{index}"), 1024).unwrap();
    }
    let mut progress = PutProgress::default();
    let pending = pool.step("new", 12 * MIB, &mut progress).unwrap();
    assert!(matches!(pending, PutStep::Pending(Pending::Yield)), "{pending:?}");
    assert_eq!(pool.state.log().counters().evicted_keys, 0, "it is being examined");
    // One of the first members, which was examined already.
    pool.locate("g/3", true, false).unwrap();
    let refused = loop {
        match pool.step("new", 12 * MIB, &mut progress) {
            Ok(PutStep::Pending(_)) => {}
            Ok(PutStep::Started(started)) => panic!("{started:?}"),
            Err(error) => break error,
        }
    };
    assert_eq!(refused.code(), ErrorCode::NO_AVAILABLE_HANDLE);
    assert!(pool.exists("g/3") && pool.exists("g/9999"));
    pool.wait(60);
    pool.put("new", 12 * MIB).unwrap();
    assert!(!pool.exists("g/3"));
}

#[test]
fn pins_of_a_large_group_end_one_by_one() {
    const MEMBERS: usize = 12_000;
    let mut pool = Pool::new(16);
    let hard = PutOptions { is_hard_pinned: true, ..PutOptions::default() };
    let soft = PutOptions {
        soft_pin: SoftPin::Enable(Some(Duration::from_secs(100))),
        ..PutOptions::default()
    };
    for index in 0..MEMBERS {
        let options = if index % 2 == 0 { &hard } else { &soft };
        pool.put_with(&format!("g/{index}"), 1024, false, options).unwrap();
    }
    let begun = thread_time();
    for index in (0..MEMBERS).step_by(2) {
        pool.remove(&format!("g/{index}"), true).unwrap();
    }
    pool.now = pool.now + Duration::from_secs(101);
    pool.state.heartbeat(pool.now, A);
    pool.advance_all();
    let spent = thread_time() - begun;
    assert_eq!(pool.state.totals().soft_pinned_keys, 0);
    assert!(spent < TIME_MAX, "{spent:?}");
}

#[test]
fn clients_leave_without_a_look_at_puts_of_others() {
    const PUTS: usize = 100_000;
    let mut pool = Pool::new(400);
    (0..PUTS).for_each(|index| drop(pool.start(A, &format!("a{index}"), 1024).unwrap()));
    let clients: Vec<ClientId> = (100..400).map(ClientId::from_bits).collect();
    for &client in &clients {
        let id = client.bits();
        pool.state.register(pool.now, client, &format!("host-{id}:1")).unwrap();
        let name = format!("host-{id}:1");
        let spec =
            SegmentSpec { name: name.clone(), endpoint: name.clone(), ..spec(client, id, 1, 1) };
        pool.state.mount(pool.now, client, spec).unwrap();
        pool.start_with(client, &format!("c{id}"), 1024, false, &on(&name)).unwrap();
    }
    let begun = thread_time();
    for &client in &clients {
        pool.state.unregister(pool.now, client);
    }
    let spent = thread_time() - begun;
    assert_eq!(pool.state.totals().writing, PUTS as u64 * 1024);
    assert!(spent < TIME_MAX, "{spent:?}");
}

#[test]
fn fetch_takes_a_bounded_number_of_steps() {
    const TASKS: usize = 200;
    let mut pool = Pool::new(64);
    pool.mount(B, 2, 64).unwrap();
    for index in 0..TASKS {
        pool.put_with(&format!("k{index}"), 64 << 10, false, &on("host-a:1")).unwrap();
    }
    // Each copy needs the memory of many objects.
    for index in 0..64 * MIB / 4096 {
        pool.put_with(&format!("s{index}"), 4096, false, &on("host-b:1")).unwrap();
    }
    for index in 0..TASKS {
        pool.copy(&format!("k{index}"), &["host-b:1"]).unwrap();
    }
    let (mut fetched, mut calls) = (0, 0);
    while pool.state.tasks().has_tasks(pool.now, A) && calls < 10 * TASKS {
        let (work, steps) = steps_of(&mut pool, |pool| pool.fetch(A));
        assert!(steps <= STEPS_MAX, "steps={steps}");
        calls += 1;
        for work in work {
            fetched += 1;
            pool.done(A, &work).unwrap();
        }
    }
    assert!(fetched > 0 && calls > 1, "fetched={fetched} calls={calls}");
}

#[test]
fn timers_of_drains_take_a_bounded_number_of_steps() {
    const JOBS: u128 = 32;
    let mut pool = Pool::new(64);
    for id in 2..2 + JOBS {
        let name = format!("drained{id}");
        let spec = SegmentSpec { name: name.clone(), endpoint: name, ..spec(B, id, 1, 1) };
        pool.state.mount(pool.now, B, spec).unwrap();
    }
    for index in 0..20_000 {
        pool.put_with(&format!("k{index}"), 1024, false, &on("host-a:1")).unwrap();
    }
    for id in 2..2 + JOBS {
        let names = [format!("drained{id}")];
        let new = NewJob { segments: &names, targets: &[], concurrency: 0, may_evict: false };
        pool.state.tasks().create_job(pool.now, new).unwrap();
    }
    for _ in 0..100 {
        pool.now = pool.now + Duration::from_millis(2);
        let (_, steps) = steps_of(&mut pool, |pool| pool.state.advance(pool.now));
        assert!(steps <= STEPS_MAX, "steps={steps}");
    }
}
