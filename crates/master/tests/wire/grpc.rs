//! gRPC with tonic's client.

use bytes::Bytes;
use mooncake_proto::v1::{self, master_client::MasterClient};
use tonic::Code;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::support::{Running, eventually};

async fn channel(running: &Running) -> tonic::transport::Channel {
    let uri = format!("http://{}", running.addresses().rpc);
    tonic::transport::Endpoint::from_shared(uri).unwrap().connect().await.unwrap()
}

#[test]
fn grpc_answers_same_calls() {
    let running = Running::whole();
    let mut native = running.native();
    native.join("127.0.0.1:1", 1 << 20);
    native.put("a", 7);
    running.block_on(async {
        let mut client = MasterClient::new(channel(&running).await);
        let status = client.status(v1::StatusRequest { caller: None }).await.unwrap().into_inner();
        assert_eq!((status.keys, status.clients), (1, 1));
        let keys = vec![Bytes::from_static(b"a"), Bytes::from_static(b"b")];
        let probe =
            v1::ProbeRequest { caller: native.caller(), keys, lease: false, ..Default::default() };
        let found = client.probe(probe).await.unwrap().into_inner();
        assert_eq!(found.lengths, [7, 0]);
        assert_eq!(found.states().nth(1), Some(v1::ObjectState::Absent));
    });
}

#[test]
fn failure_status_keeps_upstream_code_name() {
    let running = Running::whole();
    running.block_on(async {
        let mut client = MasterClient::new(channel(&running).await);
        let failure = client.heartbeat(v1::HeartbeatRequest::default()).await.unwrap_err();
        assert_eq!(failure.code(), Code::InvalidArgument);
        assert!(failure.message().contains("INVALID_PARAMS"), "{failure}");
    });
}

#[test]
fn grpc_health_reports_serving() {
    let running = Running::whole();
    running.block_on(async {
        let mut client = HealthClient::new(channel(&running).await);
        for service in ["", "mooncake.v1.Master"] {
            let request = HealthCheckRequest { service: service.to_owned() };
            let answer = client.check(request).await.unwrap().into_inner();
            assert_eq!(answer.status, 1, "{service:?}");
        }
    });
}

#[test]
fn closed_grpc_connection_makes_client_suspect() {
    let running = Running::whole();
    let mut owner = running.native();
    owner.join("127.0.0.1:1", 1 << 20);
    owner.put("a", 7);
    // The owner calls over gRPC, too. From then on that connection is its last one.
    let client = running.block_on(async {
        let mut client = MasterClient::new(channel(&running).await);
        let register = v1::RegisterRequest {
            caller: owner.caller(),
            name: "127.0.0.1:1".to_owned(),
            process: 0,
            version: String::new(),
            wants_offload: false,
            log_mark: None,
        };
        client.register(register).await.unwrap();
        client
    });
    let mut reader = running.native();
    drop(owner);
    assert!(reader.locate("a").is_some());
    running.block_on(async { drop(client) });
    eventually("the object is not named any more", || reader.locate("a").is_none());
}
