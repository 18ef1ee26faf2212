//! Limits: excess is refused early, with its error code, over both protocols, while small calls are
//! served.

use std::{net::TcpStream, time::Duration};

use bytes::Bytes;
use mooncake_master::{MasterConfig, service::BATCH_ITEMS_MAX};
use mooncake_proto::{
    native_frame::FRAME_BYTES_MAX,
    v1::{self, master_client::MasterClient, request, response},
};
use tokio::task::JoinSet;
use tonic::Code;

use crate::support::{NativeClient, Running, get};

/// The maximum wait for the replies to many concurrent calls on a slow machine.
const WAIT_MAX: Duration = Duration::from_secs(120);

fn probe(keys: usize) -> v1::ProbeRequest {
    v1::ProbeRequest {
        caller: None,
        keys: vec![Bytes::from_static(b"key"); keys],
        lease: false,
        ..Default::default()
    }
}

fn channel(running: &Running) -> MasterClient<tonic::transport::Channel> {
    let uri = format!("http://{}", running.addresses().rpc);
    let endpoint = tonic::transport::Endpoint::from_shared(uri).unwrap();
    MasterClient::new(running.block_on(endpoint.connect()).unwrap())
}

/// Puts this number of objects with a few calls.
fn fill(client: &mut NativeClient<TcpStream>, count: usize) {
    let items: Vec<_> = (0..count).map(|at| (format!("key-{at}"), 1)).collect();
    client.put_all(&items);
}

#[test]
fn refuses_grpc_calls_beyond_in_flight_limit() {
    let running = Running::whole();
    let client = channel(&running);
    let mut health = running.native();
    let calls = (0..512).map(|_| {
        let mut client = client.clone();
        async move { client.probe(probe(4096)).await.map(|answer| answer.into_inner()) }
    });
    let calls: Vec<_> = calls.collect();
    let answers = running.block_on(async {
        let mut running: JoinSet<_> = calls.into_iter().collect();
        // Another connection is served meanwhile.
        let other = tokio::task::spawn_blocking(move || health.probe(&["k"]).states.len());
        let mut answers = Vec::new();
        while let Some(call) = tokio::time::timeout(WAIT_MAX, running.join_next()).await.unwrap() {
            answers.push(call.unwrap());
        }
        assert_eq!(tokio::time::timeout(WAIT_MAX, other).await.unwrap().unwrap(), 1);
        answers
    });
    let (done, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(Result::is_ok);
    assert!(!done.is_empty() && !refused.is_empty(), "{} done", done.len());
    assert!(done.into_iter().all(|answer| answer.unwrap().states.len() == 4096));
    for refusal in refused {
        assert_eq!(refusal.unwrap_err().code(), Code::ResourceExhausted);
    }
    let mut client = client;
    let again = running.block_on(client.probe(probe(1))).unwrap();
    assert_eq!(again.into_inner().states.len(), 1, "the connection stays open");
    assert_eq!(get(running.addresses().rpc, "/health").status, 200);
}

#[test]
fn refuses_excess_large_calls_and_serves_small_ones() {
    let running = Running::new(MasterConfig::embedded());
    let mut owner = running.native();
    owner.join("127.0.0.1:1", 64 << 20);
    fill(&mut owner, 16_384);
    let regex = "no-such-key-[0-9]{3}".to_owned();
    let selector = v1::KeySelector { by: Some(v1::key_selector::By::Regex(regex)) };
    let sweep = v1::RemoveMatchingRequest {
        caller: None,
        selector: Some(selector),
        force: false,
        ..Default::default()
    };
    let mut callers: Vec<_> = (0..400).map(|_| running.native()).collect();
    for caller in &mut callers {
        caller.stream.set_read_timeout(Some(WAIT_MAX)).unwrap();
        caller.send(&[request::Call::RemoveMatching(sweep.clone())]);
    }
    assert_eq!(owner.probe(&["key-1"]).states.len(), 1, "a small call waits for none of them");
    assert_eq!(get(running.addresses().rpc, "/health").status, 200);
    let (mut done, mut refused) = (0, 0);
    for caller in &mut callers {
        match caller.receive() {
            response::Call::RemoveMatching(answer) => {
                assert_eq!(answer.removed, 0);
                done += 1;
            }
            response::Call::Failure(failure) => {
                assert_eq!(failure.code, -900, "{failure:?}");
                refused += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(done > 0 && refused > 0, "{done} done, {refused} refused");
    callers[0].probe(&["key-1"]);
}

#[test]
fn refuses_oversized_batch_over_grpc() {
    let running = Running::whole();
    let mut client = channel(&running);
    let answer = running.block_on(client.probe(probe(BATCH_ITEMS_MAX))).unwrap();
    assert_eq!(answer.into_inner().states.len(), BATCH_ITEMS_MAX);
    let refusal = running.block_on(client.probe(probe(BATCH_ITEMS_MAX + 1))).unwrap_err();
    assert_eq!(refusal.code(), Code::InvalidArgument);
    assert!(refusal.message().contains("the batch has too many items"), "{refusal}");
}

#[test]
fn refuses_oversized_message_over_both_protocols() {
    let running = Running::whole();
    let mut client = channel(&running);
    let keys = vec![Bytes::from(vec![b'k'; FRAME_BYTES_MAX + 1])];
    let large = v1::ProbeRequest { caller: None, keys, lease: false, ..Default::default() };
    let refusal = running.block_on(client.probe(large)).unwrap_err();
    assert_eq!(refusal.code(), Code::OutOfRange, "{refusal}");
    assert!(running.block_on(client.probe(probe(1))).is_ok(), "the connection stays open");
    let mut native = running.native();
    let announced = u32::try_from(FRAME_BYTES_MAX + 1).unwrap().to_le_bytes();
    std::io::Write::write_all(&mut native.stream, &announced).unwrap();
    // The start of the next frame is unknown, so the connection is closed.
    assert!(std::iter::from_fn(|| native.try_receive()).count() <= 1);
    assert_eq!(running.native().probe(&["k"]).states.len(), 1);
}

#[test]
fn refuses_many_empty_items_before_decoding() {
    const EMPTY: usize = 4 * BATCH_ITEMS_MAX + 1;
    let running = Running::whole();
    let keys = vec![Bytes::new(); EMPTY];
    let full = v1::ProbeRequest { caller: None, keys, lease: false, ..Default::default() };
    let mut client = channel(&running);
    let refusal = running.block_on(client.probe(full.clone())).unwrap_err();
    assert_eq!(refusal.code(), Code::InvalidArgument, "{refusal}");
    assert!(refusal.message().contains("more items than a call may"), "{refusal}");
    assert!(running.block_on(client.probe(probe(1))).is_ok(), "the connection stays open");
    let mut native = running.native();
    let response::Call::Failure(failure) = native.call(request::Call::Probe(full)) else {
        panic!("the message was taken")
    };
    assert!(failure.message.contains("more items than a call may"), "{failure:?}");
    assert_eq!(native.probe(&["k"]).states.len(), 1, "the connection stays open");
}
