//! Numbered calls that are repeated, and puts that meet an unfinished put of the same client.

use std::{
    pin::pin,
    sync::mpsc,
    task::{Context, Poll, Waker},
};

use super::*;

const KEY: &[u8] = b"k";

fn ask_numbered(service: &Service, number: u64, answered_below: u64, call: Call) -> response::Call {
    let request =
        v1::Request { call: Some(call), call_number: number, answered_below, ..Default::default() };
    service.dispatch(request, &Origin::in_process()).call.expect("every call has an answer")
}

fn start(service: &Service, id: ClientId, request_id: u64) -> v1::StartedColumns {
    let call = put_start(id, &[(KEY, 100)]);
    started(service, v1::PutStartRequest { request_id, ..call }).1
}

/// Returns the failure of a start that was refused.
fn refusal(mut started: v1::StartedColumns) -> v1::Failure {
    started.failures.remove(0).failure.unwrap()
}

fn end(id: ClientId, version: u64, keys: &[&'static [u8]]) -> Call {
    let keys = (!keys.is_empty()).then(|| v1::KeyColumn::pack(keys));
    let columns = Some(v1::PutRefColumns { versions: vec![version], keys, ..Default::default() });
    Call::PutEnd(v1::PutEndRequest { caller: caller(id), columns })
}

fn put(service: &Service, id: ClientId) -> u64 {
    let version = start(service, id, 0).versions[0];
    assert_eq!(failures(&ask(service, end(id, version, &[]))), 0);
    version
}

fn remove(id: ClientId) -> Call {
    let keys = vec![Bytes::from_static(KEY)];
    Call::Remove(v1::RemoveRequest { caller: caller(id), keys, force: true, ..Default::default() })
}

fn code(answer: &response::Call) -> Option<ErrorCode> {
    match answer {
        response::Call::Failure(failure) => ErrorCode::from_number(failure.code),
        _ => None,
    }
}

#[test]
fn repeated_call_gets_first_response() {
    let (service, id) = lent();
    put(&service, id);
    let first = ask_numbered(&service, 1, 1, remove(id));
    assert_eq!(failures(&first), 0);
    put(&service, id);
    assert_eq!(ask_numbered(&service, 1, 1, remove(id)), first);
    assert_eq!(service.totals().keys, 1, "the repetition does not remove the later object");
    let selector = Some(v1::KeySelector { by: Some(v1::key_selector::By::All(true)) });
    let all = v1::RemoveMatchingRequest {
        caller: caller(id),
        selector,
        force: true,
        ..Default::default()
    };
    let sweep = || ask_numbered(&service, 2, 1, Call::RemoveMatching(all.clone()));
    let expected = response::Call::RemoveMatching(v1::RemoveMatchingResponse {
        removed: 1,
        ..Default::default()
    });
    assert_eq!([sweep(), sweep()], [expected.clone(), expected]);
    assert_eq!(failures(&ask(&service, remove(id))), 1, "a call without number is executed");
}

#[test]
fn late_duplicate_of_given_up_call_is_refused() {
    let (service, id) = lent();
    put(&service, id);
    assert_eq!(failures(&ask_numbered(&service, 7, 7, end(id, 1, &[]))), 1);
    let late = ask_numbered(&service, 6, 1, remove(id));
    assert_eq!(code(&late), Some(ErrorCode::INVALID_PARAMS), "{late:?}");
    assert_eq!(service.totals().keys, 1);
}

#[test]
fn call_that_failed_as_a_whole_is_executed_again() {
    let (service, id) = lent();
    put(&service, id);
    let invalid = v1::RemoveMatchingRequest { caller: caller(id), ..Default::default() };
    let failed = ask_numbered(&service, 1, 1, Call::RemoveMatching(invalid));
    assert_eq!(code(&failed), Some(ErrorCode::INVALID_PARAMS), "{failed:?}");
    assert_eq!(failures(&ask_numbered(&service, 1, 1, remove(id))), 0);
}

#[test]
fn answers_are_forgotten_with_their_client() {
    let (service, id) = lent();
    put(&service, id);
    let first = ask_numbered(&service, 1, 1, remove(id));
    assert_eq!(failures(&first), 0);
    ask(&service, Call::Unregister(v1::UnregisterRequest { caller: caller(id) }));
    assert_eq!(failures(&ask_numbered(&service, 1, 1, remove(id))), 1, "executed again");
}

#[test]
fn repetition_waits_for_first_execution() {
    let (service, id) = lent();
    let request = v1::Request { call: Some(remove(id)), call_number: 1, ..Default::default() };
    let (to_call, ready) = mpsc::sync_channel::<v1::Response>(1);
    let (begun, has_begun) = mpsc::sync_channel(1);
    std::thread::scope(|scope| {
        let (calls, first) = (&service.repeated_calls, request.clone());
        let first = scope.spawn(move || {
            calls.execute_once(first, |_| {
                begun.send(()).unwrap();
                let response = ready.recv_timeout(Duration::from_secs(10)).unwrap();
                Executed { response, position: 3 }
            })
        });
        has_begun.recv_timeout(Duration::from_secs(10)).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let response = v1::Response {
            call: Some(response::Call::Remove(Default::default())),
            ..v1::Response::default()
        };
        runtime.block_on(async {
            let mut waiting = pin!(service.repeated_calls.wait_for_first(&request));
            let mut context = Context::from_waker(Waker::noop());
            assert!(matches!(waiting.as_mut().poll(&mut context), Poll::Pending));
            let busy = service.dispatch(request.clone(), &Origin::in_process());
            assert_eq!(code(&busy.call.unwrap()), Some(ErrorCode::RPC_FAIL));
            to_call.send(response.clone()).unwrap();
            waiting.await.unwrap();
        });
        let executed = Executed { response, position: 3 };
        assert_eq!(first.join().unwrap(), executed);
        let again = service.repeated_calls.execute_once(request, |_| unreachable!());
        assert_eq!(again, executed, "with the log position to wait for");
    });
}

#[test]
fn own_unfinished_put_is_named() {
    let (service, id) = lent();
    let started = start(&service, id, 9);
    assert_eq!(start(&service, id, 9), started, "a repetition");
    let version = started.versions[0];
    let expected = Some(v1::UnfinishedPut { version, request_id: 9, item: 0 });
    let refused = refusal(start(&service, id, 10));
    assert_eq!(refused.code, ErrorCode::OBJECT_ALREADY_EXISTS.number());
    assert_eq!(refused.unfinished_put, expected);

    let other = ClientId::from_bits(2);
    let register =
        v1::RegisterRequest { caller: caller(other), name: "i:1".to_owned(), ..Default::default() };
    ask(&service, Call::Register(register));
    let refused = refusal(start(&service, other, 1));
    assert_eq!(refused.code, ErrorCode::OBJECT_ALREADY_EXISTS.number());
    assert_eq!(refused.unfinished_put, None, "it belongs to another client");
    assert_eq!(failures(&ask(&service, end(id, version, &[]))), 0);
    assert_eq!(refusal(start(&service, id, 11)).unfinished_put, None, "it is readable");
}

#[test]
fn numbers_that_do_not_fit_into_item_ids_are_refused() {
    let (service, id) = lent();
    let start = |request_id| {
        let call = put_start(id, &[(KEY, 1)]);
        ask(&service, Call::PutStart(v1::PutStartRequest { request_id, ..call }))
    };
    assert_eq!(code(&start(1 << 47)), Some(ErrorCode::INVALID_PARAMS));
    assert_eq!(code(&start(u64::MAX)), Some(ErrorCode::INVALID_PARAMS));
    assert_eq!(code(&start((1 << 47) - 1)), None);
    let tasks = Call::CreateTasks(v1::CreateTasksRequest { caller: caller(id), tasks: Vec::new() });
    let jobs = Call::CreateDrainJobs(v1::CreateDrainJobsRequest {
        caller: caller(id),
        ..Default::default()
    });
    for call in [tasks, jobs] {
        let refused = ask_numbered(&service, 1 << 47, 1, call.clone());
        assert_eq!(code(&refused), Some(ErrorCode::INVALID_PARAMS));
        assert_eq!(code(&ask_numbered(&service, (1 << 47) - 1, 1, call)), None);
    }
}

#[test]
fn end_with_key_succeeds_again() {
    let (service, id) = lent();
    let version = put(&service, id);
    assert_eq!(failures(&ask(&service, end(id, version, &[KEY]))), 0);
    assert_eq!(failures(&ask(&service, end(id, version, &[]))), 1);
    assert_eq!(failures(&ask(&service, end(id, version, &[b"other"]))), 1);
}

#[test]
fn repeated_creation_returns_same_tasks() {
    let (service, id) = lent();
    put(&service, id);
    let task = v1::NewTask {
        kind: v1::TaskKind::Copy.into(),
        key: Bytes::from_static(KEY),
        targets: vec!["h:1".to_owned()],
        ..Default::default()
    };
    let call = Call::CreateTasks(v1::CreateTasksRequest {
        caller: caller(id),
        tasks: vec![task.clone(), task],
    });
    let create = |number| match ask_numbered(&service, number, 1, call.clone()) {
        response::Call::CreateTasks(r) => r.results.into_iter().map(|r| r.task).collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    let first = create(1);
    assert_ne!(first[0], first[1], "two items");
    service.repeated_calls.forget(&[id]);
    assert_eq!(create(1), first, "also without the stored response");
    assert_ne!(create(2)[0], first[0]);
}
