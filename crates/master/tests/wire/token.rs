//! A master with a token: what callers with the token, with another and without one get.

use std::{
    io::{Read, Write},
    net::TcpStream,
    os::{linux::net::SocketAddrExt, unix::net::UnixStream},
};

use bytes::BytesMut;
use mooncake_base::{ErrorCode, Token};
use mooncake_master::MasterConfig;
use mooncake_proto::{
    native_frame::{self, GREETING_BYTES_MAX, ServerGreeting},
    native_token::{ClientProof, Exchange},
    v1::{self, master_client::MasterClient, request, response},
};
use tonic::{Code, Request};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest,
};

use crate::support::{DEADLINE, NativeClient, Running, connect, get, receive, whole_config};

const SECRET: &str = "open sesame";

fn token(secret: &str) -> Token {
    Token::new(secret).unwrap()
}

fn guarded() -> Running {
    Running::new(MasterConfig { rpc_token: Some(token(SECRET)), ..whole_config() })
}

/// Connects without a token.
fn stranger(running: &Running) -> NativeClient<TcpStream> {
    NativeClient::over(connect(running.addresses().rpc)).unwrap()
}

/// Proves a token and returns the master's second greeting, with the exchange and the proof.
fn prove<S: Read + Write>(
    client: &mut NativeClient<S>,
    token: &Token,
) -> (ServerGreeting, Exchange, ClientProof) {
    let (exchange, proof) = Exchange::answer(token, &client.greeting).unwrap();
    (send_proof(client, &proof), exchange, proof)
}

fn send_proof<S: Read + Write>(
    client: &mut NativeClient<S>,
    proof: &ClientProof,
) -> ServerGreeting {
    let mut wire = BytesMut::new();
    native_frame::encode(proof, &mut wire).unwrap();
    client.stream.write_all(&wire).unwrap();
    receive(&mut client.stream, &mut BytesMut::new()).unwrap()
}

fn assert_refused(answer: &ServerGreeting) {
    let refusal = answer.refusal.as_ref().unwrap();
    assert_eq!(refusal.code, ErrorCode::ILLEGAL_CLIENT.number());
    assert!(refusal.message.contains("MOONCAKE_MASTER_TOKEN"), "{refusal:?}");
    assert!(answer.master.is_empty() && answer.unix_socket.is_empty(), "{answer:?}");
}

fn assert_closed(stream: &mut impl Read) {
    assert!(matches!(stream.read(&mut [0; 64]), Ok(0) | Err(_)));
}

#[test]
fn client_with_token_is_served_over_tcp_and_unix_socket() {
    let running = guarded();
    let mut tcp = stranger(&running);
    let (greeting, exchange, _) = prove(&mut tcp, &token(SECRET));
    exchange.check(&token(SECRET), &greeting).unwrap();
    assert_eq!(greeting.master, running.master().service().identity());
    assert_eq!(tcp.status().keys, 0);

    let name = std::os::unix::net::SocketAddr::from_abstract_name(&greeting.unix_socket).unwrap();
    let open = || {
        let stream = UnixStream::connect_addr(&name).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        NativeClient::over(stream).unwrap()
    };
    let mut unix = open();
    let (second, exchange, _) = prove(&mut unix, &token(SECRET));
    exchange.check(&token(SECRET), &second).unwrap();
    assert_eq!(second.master, greeting.master);
    assert_eq!(unix.status().keys, 0);
    assert_refused(&prove(&mut open(), &token("open sesamE")).0);
}

#[test]
fn stranger_learns_nothing_and_is_refused() {
    let running = guarded();
    let mut client = stranger(&running);
    assert!(client.greeting.master.is_empty() && client.greeting.unix_socket.is_empty());
    // The first call stands where the proof is expected, as from a client that knows no tokens.
    let status = request::Call::Status(v1::StatusRequest { caller: client.caller() });
    let response::Call::Failure(failure) = client.call(status) else { panic!("served") };
    assert_eq!(failure.code, ErrorCode::ILLEGAL_CLIENT.number());
    assert!(failure.message.contains("MOONCAKE_MASTER_TOKEN"), "{failure:?}");
    assert_closed(&mut client.stream);

    let mut client = stranger(&running);
    let large = u32::try_from(GREETING_BYTES_MAX).unwrap() + 1;
    client.stream.write_all(&large.to_le_bytes()).unwrap();
    assert!(matches!(client.receive(), response::Call::Failure(_)), "before the bytes arrive");
    assert_closed(&mut client.stream);
}

#[test]
fn wrong_and_replayed_proofs_are_refused() {
    let running = guarded();
    let mut wrong = stranger(&running);
    assert_refused(&prove(&mut wrong, &token("open sesamE")).0);
    assert_closed(&mut wrong.stream);

    let (_, _, proof) = prove(&mut stranger(&running), &token(SECRET));
    let mut second = stranger(&running);
    assert_refused(&send_proof(&mut second, &proof));
    assert_closed(&mut second.stream);

    // The other end's own bytes, sent back.
    let mut mirror = stranger(&running);
    let nonce = mirror.greeting.challenge.clone();
    assert_refused(&send_proof(&mut mirror, &ClientProof { proof: nonce.clone(), nonce }));

    let metrics = get(running.admin(), "/metrics");
    let metrics = metrics.text();
    assert!(metrics.contains("\nmooncake_master_refused_tokens_total 3\n"), "{metrics}");
}

#[test]
fn grpc_calls_need_the_token_and_health_does_not() {
    let running = guarded();
    running.block_on(async {
        let uri = format!("http://{}", running.addresses().rpc);
        let channel =
            tonic::transport::Endpoint::from_shared(uri).unwrap().connect().await.unwrap();
        let mut client = MasterClient::new(channel.clone());
        let with = |shown: &str| {
            let mut call = Request::new(v1::StatusRequest { caller: None });
            call.metadata_mut().insert("authorization", shown.parse().unwrap());
            call
        };
        client.status(with("Bearer open sesame")).await.unwrap();
        for shown in ["Bearer open sesamE", "Bearer ", "open sesame", "Basic open sesame"] {
            let refused = client.status(with(shown)).await.unwrap_err();
            assert_eq!(refused.code(), Code::PermissionDenied, "{shown}");
            assert!(refused.message().contains("MOONCAKE_MASTER_TOKEN"), "{refused}");
        }
        let refused = client.status(v1::StatusRequest { caller: None }).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied);
        assert!(refused.message().contains("MOONCAKE_MASTER_TOKEN"), "{refused}");

        let request = ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::ListServices(String::new())),
        };
        let asked = tokio_stream::once(request);
        let mut reflection = ServerReflectionClient::new(channel.clone());
        let refused = reflection.server_reflection_info(asked).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied);

        let mut health = HealthClient::new(channel);
        let request = HealthCheckRequest { service: String::new() };
        assert_eq!(health.check(request).await.unwrap().into_inner().status, 1);
    });
}

#[test]
fn http_health_needs_no_token() {
    let running = guarded();
    let answer = get(running.addresses().rpc, "/health");
    assert_eq!(answer.status, 200);
    assert!(!answer.text().contains("sesame"));
}
