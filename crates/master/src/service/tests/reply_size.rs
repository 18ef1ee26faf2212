//! The reply to the largest batch fits a frame, whatever its items fail with.

use mooncake_proto::native_frame::FRAME_BYTES_MAX;

use super::*;

/// Keys that are printed in the longest way, in the largest batch that a frame can carry.
fn hostile_keys(length: usize) -> Vec<Bytes> {
    let count = BATCH_ITEMS_MAX.min(FRAME_BYTES_MAX / (length + 16));
    let key = |number: u32| {
        let mut key = vec![0xff; length - 4];
        key.extend(number.to_be_bytes());
        Bytes::from(key)
    };
    (0..count as u32).map(key).collect()
}

/// Returns the answer, which fits a frame.
fn fitting(service: &Service, call: Call) -> response::Call {
    let answer = ask(service, call);
    let response = v1::Response { call: Some(answer.clone()), ..v1::Response::default() };
    assert!(response.encoded_len() <= FRAME_BYTES_MAX, "{} bytes", response.encoded_len());
    answer
}

fn puts(id: ClientId, request_id: u64, keys: &[Bytes], length: u64) -> Call {
    let columns = Some(v1::PutColumns::pack(keys.iter().map(|key| (key, length))));
    Call::PutStart(v1::PutStartRequest {
        caller: caller(id),
        request_id,
        columns,
        ..Default::default()
    })
}

#[test]
fn reply_to_refused_puts_fits_a_frame_and_names_each_code() {
    for length in [100, 2000] {
        let (service, id) = lent();
        let keys = hostile_keys(length);
        // The first fits, and its version must not be lost.
        let mut columns = v1::PutColumns::pack(keys.iter().map(|key| (key, 2 << 20)));
        columns.lengths = vec![2 << 20; keys.len()];
        columns.lengths[0] = 64;
        let caller = caller(id);
        let request = v1::PutStartRequest {
            caller,
            request_id: 1,
            columns: Some(columns),
            ..Default::default()
        };
        let response::Call::PutStart(reply) = fitting(&service, Call::PutStart(request)) else {
            panic!("refused as a whole")
        };
        let columns = reply.columns.unwrap();
        assert_ne!(columns.versions[0], 0);
        assert_eq!(columns.failures.len(), keys.len() - 1);
        let no_memory = ErrorCode::NO_AVAILABLE_HANDLE;
        let is_told =
            |item: &v1::ItemFailure| item.failure.as_ref().unwrap().code == no_memory.number();
        assert!(columns.failures.iter().all(is_told));
        // Each names the unfinished put in its way.
        let mine: Vec<_> = keys.iter().map(|_| keys[0].clone()).collect();
        let response::Call::PutStart(reply) = fitting(&service, puts(id, 2, &mine, 64)) else {
            panic!("refused as a whole")
        };
        let is_named =
            |item: &v1::ItemFailure| item.failure.as_ref().unwrap().unfinished_put.is_some();
        assert!(reply.columns.unwrap().failures.iter().all(is_named));
    }
}

#[test]
fn reply_to_largest_batch_of_each_kind_fits_a_frame() {
    for length in [1000] {
        let (service, id) = lent();
        let (keys, caller) = (hostile_keys(length), caller(id));
        let columns = Some(v1::KeyColumn::pack(&keys));
        let versions: Vec<u64> = (1..).take(keys.len().min(100_000)).collect();
        let refs = Some(v1::PutRefColumns { versions, ..Default::default() });
        let task = |key: &Bytes| v1::NewTask {
            kind: v1::TaskKind::Move.into(),
            key: key.clone(),
            source: "h:1".to_owned(),
            targets: vec!["h:2".to_owned()],
        };
        let short: Vec<Bytes> = keys.iter().map(|key| key.slice(..10)).collect();
        let calls = [
            Call::Locate(v1::LocateRequest { keys: columns, ..Default::default() }),
            Call::PutEnd(v1::PutEndRequest { caller: caller.clone(), columns: refs.clone() }),
            Call::PutRevoke(v1::PutRevokeRequest { caller: caller.clone(), columns: refs }),
            Call::Describe(v1::DescribeRequest { keys: keys.clone(), ..Default::default() }),
            Call::SetExpiry(v1::SetExpiryRequest { keys: keys.clone(), ..Default::default() }),
            Call::Remove(v1::RemoveRequest { keys: keys.clone(), ..Default::default() }),
            Call::CreateTasks(v1::CreateTasksRequest {
                caller: caller.clone(),
                tasks: keys.iter().map(task).collect(),
            }),
            Call::QueryTasks(v1::QueryTasksRequest { tasks: short.clone(), ..Default::default() }),
            Call::QueryDrainJobs(v1::QueryDrainJobsRequest {
                jobs: short.clone(),
                ..Default::default()
            }),
            Call::Unmount(v1::UnmountRequest { caller, segments: short, ..Default::default() }),
        ];
        for call in calls {
            let answer = fitting(&service, call);
            assert!(!matches!(answer, response::Call::Failure(_)), "{answer:?}");
        }
    }
}
