//! A log that lost what was on disk is not believed.

use std::{fs, path::Path};

use super::*;
use crate::{LogSync, journal::Directory};

fn start(path: &Path) -> Service {
    let sync = LogSync::Interval(Duration::from_secs(60));
    let opened = Journal::open(Directory::lock(path).unwrap(), sync).unwrap();
    Service::from_log(Rules::default(), SystemClock::shared(), opened).0
}

/// Puts an object. Returns the mark that the client hears.
fn put(service: &Service, id: ClientId, key: &'static str) -> v1::LogMark {
    let (answer, started) = started(service, put_start(id, &[(key, 64)]));
    assert_eq!(failures(&ask(service, put_end(id, &started.versions))), 0);
    answer.log_mark.expect("the start of the log is on disk")
}

/// Registers with the mark that was heard, and announces the segment of `lend` again. Returns
/// whether the master still has it.
fn comes_back(service: &Service, log_mark: Option<v1::LogMark>) -> bool {
    let id = ClientId::from_bits(1);
    let name = "h:1".to_owned();
    let register = v1::RegisterRequest { caller: caller(id), name, log_mark, ..Default::default() };
    assert!(matches!(ask(service, Call::Register(register)), response::Call::Register(_)));
    let mount = v1::MountRequest {
        caller: caller(id),
        segments: vec![segment()],
        resume: true,
        ..Default::default()
    };
    let response::Call::Mount(mounted) = ask(service, Call::Mount(mount)) else { panic!("mount") };
    mounted.results[0].failure.is_none()
}

#[test]
fn recovered_objects_are_dropped_if_synced_frames_are_lost() {
    let folder = tempfile::tempdir().unwrap();
    let (path, copy) = (folder.path().join("log"), folder.path().join("copy"));
    let service = start(&path);
    let id = lend(&service);
    put(&service, id, "a");
    fs::create_dir(&copy).unwrap();
    for file in fs::read_dir(&path).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), copy.join(file.file_name())).unwrap();
    }
    put(&service, id, "b");
    service.shared.journal().unwrap().sync_now();
    let heard = put(&service, id, "c");
    drop(service);

    let service = start(&path);
    assert!(comes_back(&service, Some(heard)), "nothing is missing");
    service.shared.journal().unwrap().sync_now();
    let heard = put(&service, id, "d");
    assert!(comes_back(&service, Some(heard)), "the mark of this very master");
    drop(service);

    let service = start(&copy);
    let other = v1::LogMark { timeline: 7, ..heard };
    assert!(comes_back(&service, None) && comes_back(&service, Some(other)));
    assert_eq!(service.totals().keys, 1);
    assert!(!comes_back(&service, Some(heard)), "\"b\" was on disk and is not in the log");
    while service.advance().is_some() && service.totals().keys > 0 {}
    assert_eq!((service.totals().keys, service.totals().segments), (0, 0));
    assert_eq!(lend(&service), ClientId::from_bits(1), "the pool goes on");
}
