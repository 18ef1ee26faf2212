//! Connections over real sockets: of strangers, idle ones, and those of clients that hang up.

use std::{net::SocketAddr, sync::Arc};

use mooncake_base::Token;
use mooncake_election::View;
use mooncake_proto::{
    native_frame::{self, FRAME_BYTES_MAX, ServerGreeting},
    native_token::Exchange,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use super::*;
use crate::{
    LogSync,
    journal::{Directory, Journal, Maintenance, hanging_disk::HangingDisk},
    server::Server,
    service::{connection::ServerContext, listen::serve_tcp},
};

const DEADLINE: Duration = Duration::from_secs(30);
/// The connections of each kind that the servers of these tests take.
const PLACES: usize = 8;

fn token() -> Token {
    Token::new("open sesame").unwrap()
}

/// Serves a port. Returns its address.
async fn serve(context: &ServerContext) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    context.spawn(serve_tcp(listener, Server::for_tests(context)));
    address
}

async fn connect(address: SocketAddr) -> TcpStream {
    timeout(DEADLINE, TcpStream::connect(address)).await.unwrap().unwrap()
}

async fn receive<M: Message + Default>(stream: &mut TcpStream) -> M {
    let mut input = BytesMut::new();
    loop {
        if let Some(message) = native_frame::decode(&mut input, FRAME_BYTES_MAX).unwrap() {
            return message;
        }
        let read = timeout(DEADLINE, stream.read_buf(&mut input)).await.unwrap().unwrap();
        assert!(read > 0, "the connection ended");
    }
}

async fn send(stream: &mut TcpStream, message: &impl Message) {
    let mut output = BytesMut::new();
    native_frame::encode(message, &mut output).unwrap();
    stream.write_all(&output).await.unwrap();
}

/// Connects, and sends a greeting.
async fn greeted(address: SocketAddr) -> (TcpStream, ServerGreeting) {
    let mut stream = connect(address).await;
    stream.write_all(&native_frame::client_greeting()).await.unwrap();
    let greeting = receive(&mut stream).await;
    (stream, greeting)
}

/// Connects as a client that knows the token.
async fn client(address: SocketAddr) -> TcpStream {
    let (mut stream, greeting) = greeted(address).await;
    let (_, proof) = Exchange::answer(&token(), &greeting).unwrap();
    send(&mut stream, &proof).await;
    let second: ServerGreeting = receive(&mut stream).await;
    assert_eq!(second.refusal, None);
    stream
}

/// Returns whether a call over the connection is answered.
async fn is_served(stream: &mut TcpStream) -> bool {
    let call = Some(Call::Status(v1::StatusRequest { caller: None }));
    send(stream, &v1::Request { call, ..Default::default() }).await;
    let answer: v1::Response = receive(stream).await;
    matches!(answer.call, Some(response::Call::Status(_)))
}

/// Waits until the master closes the connection.
async fn wait_for_end(stream: &mut TcpStream) {
    let mut input = BytesMut::new();
    let ended = async { while let Ok(1..) = stream.read_buf(&mut input).await {} };
    timeout(DEADLINE, ended).await.expect("it ends");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_take_no_place_from_clients() {
    let context =
        ServerContext { token: Some(token()), ..ServerContext::for_tests(Arc::new(service()), 0) };
    let address = serve(&context).await;
    let mut first = client(address).await;
    // Silent ones, some of speakers of HTTP/2, and some that have the challenge.
    let mut strangers = Vec::new();
    for nth in 0..3 * PLACES {
        let mut stream = connect(address).await;
        match nth % 3 {
            0 => {}
            1 => stream.write_all(HTTP2).await.unwrap(),
            _ => {
                stream.write_all(&native_frame::client_greeting()).await.unwrap();
                receive::<ServerGreeting>(&mut stream).await;
            }
        }
        strangers.push(stream);
        // Accepted before the next one connects.
        greeted(address).await;
    }
    for stream in &mut strangers[..2 * PLACES] {
        wait_for_end(stream).await;
    }
    let mut second = client(address).await;
    assert!(is_served(&mut first).await && is_served(&mut second).await);
    context.kill.cancel();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn excess_client_is_refused_until_another_leaves() {
    let context = ServerContext::for_tests(Arc::new(service()), 0);
    let address = serve(&context).await;
    let mut clients = Vec::new();
    for _ in 0..PLACES {
        let (mut stream, _) = greeted(address).await;
        assert!(is_served(&mut stream).await);
        clients.push(stream);
    }
    let (mut excess, _) = greeted(address).await;
    wait_for_end(&mut excess).await;
    drop(clients.pop());
    let freed = async {
        while context.permits.available() == 0 {
            tokio::task::yield_now().await;
        }
    };
    timeout(DEADLINE, freed).await.expect("its place is free");
    assert!(is_served(&mut greeted(address).await.0).await);
    context.kill.cancel();
}

/// The begin of an HTTP/2 connection: the preface, and empty settings.
const HTTP2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_http2_connection_ends() {
    let idle = Some(Duration::from_millis(100));
    let context = ServerContext { idle, ..ServerContext::for_tests(Arc::new(service()), 0) };
    let mut stream = connect(serve(&context).await).await;
    stream.write_all(HTTP2).await.unwrap();
    wait_for_end(&mut stream).await;
    context.kill.cancel();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_hangs_up_gives_its_place_back_while_the_log_hangs() {
    let disk = Arc::new(HangingDisk::default());
    let opened = Journal::open(Directory::on(disk.clone()), LogSync::Always).unwrap();
    let (service, _) = Service::from_log(Rules::default(), SystemClock::shared(), opened);
    let service = Arc::new(service);
    let maintenance = Maintenance::start(&service).unwrap();
    let context = ServerContext::for_tests(service, 0);
    let address = serve(&context).await;
    let (mut stream, _) = greeted(address).await;
    assert!(is_served(&mut stream).await);
    assert_eq!(context.permits.available(), PLACES - 1);
    disk.hang(true);
    let register = v1::RegisterRequest {
        caller: caller(ClientId::from_bits(5)),
        name: "h:5".to_owned(),
        ..Default::default()
    };
    let call = Some(Call::Register(register));
    send(&mut stream, &v1::Request { call, ..Default::default() }).await;
    let waits = async {
        while !disk.is_hanging() {
            tokio::task::yield_now().await;
        }
    };
    timeout(DEADLINE, waits).await.expect("the call waits for the log");
    drop(stream);
    let freed = async {
        while context.permits.available() < PLACES {
            tokio::task::yield_now().await;
        }
    };
    let freed = timeout(DEADLINE, freed).await;
    disk.hang(false);
    drop(maintenance);
    freed.expect("its place is free while the disk hangs");
    context.kill.cancel();
}

/// Returns the context of a master whose lease is over, and that does not know it yet.
fn former_leader() -> ServerContext {
    let service = service();
    let (validity, unconfirmed) = (Arc::default(), Arc::default());
    service.shared().set_leadership(Leadership { view: View(1), validity, unconfirmed });
    ServerContext::for_tests(Arc::new(service), 0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn former_leader_has_no_health_of_a_leader() {
    let context = former_leader();
    let mut stream = connect(serve(&context).await).await;
    stream.write_all(b"GET /health HTTP/1.1\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    timeout(DEADLINE, stream.read_to_end(&mut answer)).await.unwrap().unwrap();
    let answer = String::from_utf8(answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    assert!(!answer.contains("leader") && !answer.contains("service_ready"), "{answer}");
    context.kill.cancel();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn former_leader_does_not_serve_over_grpc() {
    let context = former_leader();
    let uri = format!("http://{}", serve(&context).await);
    let endpoint = tonic::transport::Endpoint::from_shared(uri).unwrap();
    let channel = timeout(DEADLINE, endpoint.connect()).await.unwrap().unwrap();
    let mut client = HealthClient::new(channel);
    for service in ["", "mooncake.v1.Master"] {
        let request = || HealthCheckRequest { service: service.to_owned() };
        let checked = timeout(DEADLINE, client.check(request())).await.unwrap().unwrap();
        assert_eq!(checked.into_inner().status(), ServingStatus::NotServing, "{service}");
        let watched = timeout(DEADLINE, client.watch(request())).await.unwrap().unwrap();
        let first = timeout(DEADLINE, watched.into_inner().message()).await.unwrap().unwrap();
        assert_eq!(first.unwrap().status(), ServingStatus::NotServing, "{service}");
    }
    context.kill.cancel();
}
