//! An owner of a disk waits in a thread of its own for objects to write.

use std::thread;

use mooncake_proto::calls::Method;

use super::*;
use crate::state::OffloadRules;

const DISK: &[u8] = &[3; 16];

/// Returns a service with one client that has mounted a segment and a disk.
fn with_disk() -> (Service, ClientId) {
    let offload = Some(OffloadRules { queue_max: 10, ..OffloadRules::default() });
    let service = Service::new(Rules { offload, ..Rules::default() }, SystemClock::shared());
    let id = lend(&service);
    let disk = v1::Segment {
        id: Bytes::from_static(DISK),
        base: 0,
        kind: v1::SegmentKind::Disk.into(),
        ..segment()
    };
    let mount = v1::MountDiskRequest {
        caller: caller(id),
        disk: Some(disk),
        ..v1::MountDiskRequest::default()
    };
    let answer = ask(&service, Call::MountDisk(mount));
    assert!(matches!(answer, response::Call::MountDisk(_)), "{answer:?}");
    (service, id)
}

/// Fetches objects, and does something once that waits. Returns the answer.
fn fetch_while(service: &Service, id: ClientId, act: impl FnOnce()) -> response::Call {
    let fetch = v1::FetchOffloadsRequest {
        caller: caller(id),
        disk: Bytes::from_static(DISK),
        limit: 10,
        bytes: 1 << 20,
        wait_ms: 60_000,
        promotion_bytes: 1 << 20,
    };
    let request = v1::Request { call: Some(Call::FetchOffloads(fetch)), ..Default::default() };
    thread::scope(|scope| {
        let waits = || service.dispatch(request, &Origin::in_process());
        let waiting = scope.spawn(waits);
        while service.op_metrics().count(Method::FetchOffloads).calls() == 0 {
            thread::yield_now();
        }
        act();
        waiting.join().unwrap().call.expect("every call has an answer")
    })
}

#[test]
fn wait_ends_with_the_first_object() {
    let (service, id) = with_disk();
    let answer = fetch_while(&service, id, || {
        let (_, columns) = started(&service, put_start(id, &[("k", 10)]));
        assert_eq!(failures(&ask(&service, put_end(id, &columns.versions))), 0);
    });
    let response::Call::FetchOffloads(answer) = answer else { panic!("{answer:?}") };
    assert_eq!(answer.records.unwrap().versions.len(), 1);
}

#[test]
fn wait_ends_when_the_disk_leaves() {
    let (service, id) = with_disk();
    let answer = fetch_while(&service, id, || {
        let unmount = v1::UnmountDiskRequest {
            caller: caller(id),
            disk: Bytes::from_static(DISK),
            forget: false,
        };
        ask(&service, Call::UnmountDisk(unmount));
    });
    let response::Call::Failure(failure) = answer else { panic!("{answer:?}") };
    assert_eq!(failure.code, ErrorCode::ILLEGAL_CLIENT.number());
}
