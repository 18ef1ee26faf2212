//! A panic inside the state ends the service; the log stays whole.

use std::sync::Arc;

use super::*;
use crate::{
    LogSync,
    journal::{Directory, hanging_disk::HangingDisk},
};

fn start(disk: &Arc<HangingDisk>) -> Service {
    let sync = LogSync::Interval(Duration::from_secs(60));
    let opened = Journal::open(Directory::on(disk.clone()), sync).unwrap();
    Service::from_log(Rules::default(), SystemClock::shared(), opened).0
}

fn probe(service: &Service) -> response::Call {
    let keys = vec![Bytes::from_static(b"a")];
    ask(service, Call::Probe(v1::ProbeRequest { keys, ..Default::default() }))
}

/// Drops the segment of the client half, with the lock held.
fn panic_half_way(service: &Service, id: ClientId) {
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let mut state = service.shared.lock();
        assert!(state.unregister(service.now(), id));
        assert!(state.log().has_effects(), "the log would have it");
        panic!("a fault, for the test");
    }));
    panicked.expect_err("it panics");
}

#[test]
fn panic_inside_state_leaves_the_log_whole_and_refuses_calls() {
    let disk = Arc::new(HangingDisk::default());
    let service = start(&disk);
    let id = lend(&service);
    let (_, columns) = started(&service, put_start(id, &[("a", 1)]));
    assert_eq!(failures(&ask(&service, put_end(id, &columns.versions))), 0);
    panic_half_way(&service, id);
    let response::Call::Failure(failure) = probe(&service) else { panic!("it is refused") };
    assert_eq!(failure.code, ErrorCode::RPC_FAIL.number(), "clients repeat it");
    assert!(failure.message.contains("clients keep running"), "{}", failure.message);
    assert_eq!(service.advance(), None, "timers rest");
    service.close_session(&service.open_session(false), ConnectionEnd::ByPeer);
    assert!(service.shared.lock_for_journal().is_err(), "no snapshot is taken of it");
    service.shared.journal().unwrap().sync_now();
    drop(service);

    let service = start(&disk);
    let name = "h:1".to_owned();
    let register = v1::RegisterRequest { caller: caller(id), name, ..Default::default() };
    ask(&service, Call::Register(register));
    let (caller, segments) = (caller(id), vec![segment()]);
    let mount = v1::MountRequest { caller, segments, resume: true, ..Default::default() };
    let response::Call::Mount(mounted) = ask(&service, Call::Mount(mount)) else { panic!("mount") };
    assert!(mounted.results[0].failure.is_none(), "{mounted:?}");
    assert!(is_readable(&service, "a"));
}

#[test]
fn call_that_panics_while_others_wait_is_told_so() {
    let (service, id) = lent();
    let fault = durability::with_log_position(|| -> Result<()> {
        panic_half_way(&service, id);
        panic!("and again, without the lock")
    });
    assert_eq!(fault.0.unwrap_err().code(), ErrorCode::INTERNAL_ERROR, "it must not be repeated");
    let response = durability::refusal(&durability::panicked());
    assert_eq!(service.finished(response.clone(), Ok(())), response);
}

#[test]
fn panic_without_the_lock_ends_one_call() {
    let (service, _) = lent();
    let fault = durability::with_log_position(|| -> Result<()> { panic!("a fault, for the test") });
    assert!(fault.0.is_err());
    assert!(matches!(probe(&service), response::Call::Probe(_)), "the state is whole");
}
