//! A log that cannot be written: the master ends, or makes it void before it answers.

use std::sync::Arc;

use super::*;
use crate::{
    LogSync, OnLogFailure,
    journal::{Directory, hanging_disk::HangingDisk},
};

const INTERVAL: LogSync = LogSync::Interval(Duration::from_secs(60));

fn try_start(disk: &Arc<HangingDisk>, sync: LogSync, on_failure: OnLogFailure) -> Result<Service> {
    let mut opened = Journal::open(Directory::on(disk.clone()), sync)?;
    opened.journal = opened.journal.with_failure_policy(on_failure);
    Ok(Service::from_log(Rules::default(), SystemClock::shared(), opened).0)
}

fn start(disk: &Arc<HangingDisk>, sync: LogSync, on_failure: OnLogFailure) -> Service {
    try_start(disk, sync, on_failure).unwrap()
}

/// Puts an object. Returns whether that was acknowledged.
fn put(service: &Service, id: ClientId, key: &str) -> bool {
    let response::Call::PutStart(answer) =
        ask(service, Call::PutStart(put_start(id, &[(key, 64)])))
    else {
        return false;
    };
    let versions = answer.columns.expect("columns").versions;
    versions != [0] && matches!(ask(service, put_end(id, &versions)), response::Call::PutEnd(_))
}

/// Lets the client of `lend` come back. Returns whether the master still has its memory.
fn comes_back(service: &Service) -> bool {
    let id = ClientId::from_bits(1);
    let name = "h:1".to_owned();
    let register = v1::RegisterRequest { caller: caller(id), name, ..Default::default() };
    ask(service, Call::Register(register));
    let segments = vec![segment()];
    let mount =
        v1::MountRequest { caller: caller(id), segments, resume: true, ..Default::default() };
    let response::Call::Mount(mounted) = ask(service, Call::Mount(mount)) else { panic!("mount") };
    mounted.results[0].failure.is_none()
}

#[test]
fn master_that_stops_keeps_all_that_it_acknowledged() {
    for sync in [LogSync::Always, INTERVAL, LogSync::Never] {
        let disk = Arc::new(HangingDisk::default());
        let service = start(&disk, sync, OnLogFailure::Stop);
        let id = lend(&service);
        assert!(put(&service, id, "a"));
        disk.fill(true);
        let refused = ask(&service, Call::PutStart(put_start(id, &[("b", 64)])));
        let response::Call::Failure(failure) = refused else { panic!("{refused:?}") };
        assert_eq!(failure.code, ErrorCode::RPC_FAIL.number(), "clients repeat it");
        assert!(failure.message.contains("--on_log_failure"), "{}", failure.message);
        // Reads are refused, too, and also when the disk has space again.
        disk.fill(false);
        let probe = v1::ProbeRequest { keys: vec![Bytes::from_static(b"a")], ..Default::default() };
        assert!(matches!(ask(&service, Call::Probe(probe)), response::Call::Failure(_)));
        assert!(!put(&service, id, "b"));
        drop(service);
        let service = start(&disk, sync, OnLogFailure::Stop);
        assert!(comes_back(&service), "sync={sync:?}");
        assert!(is_readable(&service, "a"));
        assert!(!is_readable(&service, "b"));
    }
}

#[test]
fn stopped_log_survives_loss_of_power_with_sync_always() {
    let disk = Arc::new(HangingDisk::default());
    let service = start(&disk, LogSync::Always, OnLogFailure::Stop);
    let id = lend(&service);
    assert!(put(&service, id, "a"));
    disk.fill(true);
    assert!(!put(&service, id, "b"));
    drop(service);
    disk.fill(false);
    disk.lose_power();
    let service = start(&disk, LogSync::Always, OnLogFailure::Stop);
    assert!(comes_back(&service));
    assert!(is_readable(&service, "a"));
}

#[test]
fn master_that_continues_leaves_no_log_that_is_out_of_date() {
    for sync in [LogSync::Always, INTERVAL, LogSync::Never] {
        for loses_power in [false, true] {
            let disk = Arc::new(HangingDisk::default());
            let service = start(&disk, sync, OnLogFailure::Continue);
            let id = lend(&service);
            assert!(put(&service, id, "a"));
            disk.fill(true);
            assert!(put(&service, id, "b"), "it goes on from memory");
            assert!(!service.journal_status().unwrap().is_healthy);
            assert_eq!(service.journal_status().unwrap().failures, 1);
            drop(service);
            disk.fill(false);
            if loses_power {
                disk.lose_power();
            }
            let service = start(&disk, sync, OnLogFailure::Continue);
            assert!(!comes_back(&service), "sync={sync:?} loses_power={loses_power}");
            assert!(!is_readable(&service, "a"), "it may have been overwritten since");
        }
    }
}

/// The files of the log cannot be removed, but the marker can be emptied.
#[test]
fn marked_log_is_void_although_its_files_are_left() {
    for loses_power in [false, true] {
        let disk = Arc::new(HangingDisk::default());
        let service = start(&disk, INTERVAL, OnLogFailure::Continue);
        let id = lend(&service);
        assert!(put(&service, id, "a"));
        disk.fill(true);
        disk.keep_files(true);
        assert!(put(&service, id, "b"));
        drop(service);
        if loses_power {
            disk.lose_power();
        }
        let error = try_start(&disk, INTERVAL, OnLogFailure::Continue).unwrap_err();
        assert_eq!(error.code(), ErrorCode::PERSISTENT_FAIL, "the files must go first");
        disk.fill(false);
        disk.keep_files(false);
        let service = start(&disk, INTERVAL, OnLogFailure::Continue);
        assert!(!comes_back(&service), "loses_power={loses_power}");
        assert!(!is_readable(&service, "a"));
    }
}

#[test]
fn log_that_can_be_neither_marked_nor_removed_ends_the_master() {
    let disk = Arc::new(HangingDisk::default());
    let service = start(&disk, INTERVAL, OnLogFailure::Continue);
    let id = lend(&service);
    assert!(put(&service, id, "a"));
    disk.set_read_only(true);
    assert!(!put(&service, id, "b"), "it could not be told from what was acknowledged before");
    disk.set_read_only(false);
    drop(service);
    let service = start(&disk, INTERVAL, OnLogFailure::Continue);
    assert!(comes_back(&service));
    assert!(is_readable(&service, "a"));
}
