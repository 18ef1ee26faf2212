//! The listeners: accept connections, detect the protocol from the first bytes, and dispatch. A
//! connection that sends nothing, or no known protocol, is dropped.

mod standby;

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use bytes::BytesMut;
use mooncake_os::acceptor::ACCEPT_PAUSE;
use mooncake_proto::native_frame::MAGIC;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UnixListener},
    time::timeout,
};

use super::{
    connection::{Connection, ServerContext, grpc_stream::GrpcStream},
    native,
};
use crate::server::Server;

/// The maximum number of connections at a time, over all protocols.
pub const CONNECTIONS_MAX: usize = 65_536;

/// The deadline for the first bytes, which identify the protocol.
const SNIFF_DEADLINE: Duration = Duration::from_secs(10);

/// The deadline for an HTTP/1 request and its response.
const HTTP_DEADLINE: Duration = Duration::from_secs(5);

/// The maximum size of the head of an HTTP/1 request.
const HTTP_HEAD_BYTES_MAX: usize = 8 * 1024;

/// The TCP keepalive time. Probes close the connections of dead hosts.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// Serves the TCP port until the master stops.
pub(crate) async fn serve_tcp(listener: TcpListener, server: Arc<Server>) {
    while let Some(accepted) = server.stop_token().run_until_cancelled(listener.accept()).await {
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                pause_accepting(&error).await;
                continue;
            }
        };
        set_socket_options(&stream, server.config().is_tcp_nodelay);
        let Some(context) = server.context() else {
            standby::answer(stream, &server);
            continue;
        };
        let connection = Connection::new(&context, is_local(&stream, peer), Some(peer));
        let (place, inner) = (connection.place.clone(), context.clone());
        let shared = Arc::clone(&server);
        let routed = async move { route(stream, connection, inner, &shared).await };
        context.spawn_connection(&place, routed);
    }
}

/// Serves the abstract Unix socket until the master stops. Only the native protocol is spoken there.
pub(crate) async fn serve_unix(listener: UnixListener, server: Arc<Server>) {
    while let Some(accepted) = server.stop_token().run_until_cancelled(listener.accept()).await {
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                pause_accepting(&error).await;
                continue;
            }
        };
        // Clients learn the name of the socket from a master that leads. They try its port again.
        let Some(context) = server.context() else { continue };
        let connection = Connection::new(&context, true, None);
        let (place, inner) = (connection.place.clone(), context.clone());
        context.spawn_connection(&place, native::serve_local(stream, connection, inner));
    }
}

/// The protocol of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Protocol {
    Native,
    /// A standby that asks for the log.
    Standby,
    Grpc,
    Http,
}

/// Reads until the first bytes identify the protocol, then serves the connection.
async fn route(
    mut stream: TcpStream,
    connection: Connection,
    context: ServerContext,
    server: &Server,
) {
    let mut prefix = BytesMut::with_capacity(256);
    let sniffed = tokio::select! {
        sniffed = protocol_of(&mut stream, &mut prefix) => sniffed,
        () = context.stop.cancelled() => None,
    };
    match sniffed {
        Some(Protocol::Standby) => send_log(stream, prefix, &connection, &context),
        Some(Protocol::Native) => native::serve(stream, prefix, connection, context).await,
        Some(Protocol::Grpc) => {
            // The receiver ends with the master. Then the stream is dropped, which closes it.
            let stream = GrpcStream::new(prefix, stream, connection, context.idle);
            let _ = context.to_grpc.send(Ok(stream)).await;
        }
        Some(Protocol::Http) => {
            let health = || crate::admin::health_of(server).to_string();
            let _ = timeout(HTTP_DEADLINE, answer_http(stream, prefix, health)).await;
        }
        None => {
            tracing::debug!(first = %prefix.escape_ascii(), "closed a connection of unknown protocol")
        }
    }
}

/// Reads until the first bytes identify the protocol; `None` if they do not.
async fn protocol_of(stream: &mut TcpStream, prefix: &mut BytesMut) -> Option<Protocol> {
    let sniffing = async {
        loop {
            match sniff(prefix) {
                Sniffed::Protocol(protocol) => return Some(protocol),
                Sniffed::Unknown => return None,
                Sniffed::NeedMore => {}
            }
            match stream.read_buf(prefix).await {
                Ok(0) | Err(_) => return None,
                Ok(_) => {}
            }
        }
    };
    timeout(SNIFF_DEADLINE, sniffing).await.ok().flatten()
}

/// Hands the connection of a standby to a thread.
fn send_log(stream: TcpStream, prefix: BytesMut, connection: &Connection, context: &ServerContext) {
    match (&context.log_source, stream.into_std()) {
        (Some(source), Ok(stream)) => source.serve(stream, prefix, connection.place.clone()),
        (None, _) => tracing::warn!("a standby connected to a master without --enable_ha"),
        (_, Err(error)) => tracing::warn!(%error, "the connection of a standby cannot be used"),
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Sniffed {
    NeedMore,
    Protocol(Protocol),
    Unknown,
}

/// Detects the protocol from the first bytes.
fn sniff(prefix: &[u8]) -> Sniffed {
    const BEGINNINGS: [(&[u8], Protocol); 10] = [
        (&MAGIC, Protocol::Native),
        (&mooncake_proto::standby::MAGIC, Protocol::Standby),
        (b"PRI * HTTP/2.0", Protocol::Grpc),
        (b"GET ", Protocol::Http),
        (b"HEAD ", Protocol::Http),
        (b"POST ", Protocol::Http),
        (b"PUT ", Protocol::Http),
        (b"DELETE ", Protocol::Http),
        (b"OPTIONS ", Protocol::Http),
        (b"PATCH ", Protocol::Http),
    ];
    if let Some((_, protocol)) = BEGINNINGS.iter().find(|(start, _)| prefix.starts_with(start)) {
        return Sniffed::Protocol(*protocol);
    }
    if BEGINNINGS.iter().any(|(start, _)| start.starts_with(prefix)) {
        return Sniffed::NeedMore;
    }
    Sniffed::Unknown
}

/// Answers one HTTP/1 request with the health of the master, then closes the connection.
async fn answer_http(
    mut stream: TcpStream,
    mut head: BytesMut,
    health: impl Fn() -> String,
) -> io::Result<()> {
    while !head.windows(4).any(|window| window == b"\r\n\r\n") {
        if head.len() > HTTP_HEAD_BYTES_MAX || stream.read_buf(&mut head).await? == 0 {
            return Ok(());
        }
    }
    let line = head[..].split(|byte| *byte == b'\r').next().unwrap_or_default();
    let mut words = line.split(|byte| *byte == b' ');
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let is_read = matches!(method, b"GET" | b"HEAD");
    let (status, kind, body) = if is_read && matches!(path, b"/" | b"/health") {
        ("200 OK", "application/json", health())
    } else {
        let body =
            "404 Not Found: this is the port of mooncake clients; it answers / and /health\n";
        ("404 Not Found", "text/plain", body.to_owned())
    };
    let mut answer = format!(
        "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\
         connection: close\r\n\r\n",
        body.len()
    );
    if method != b"HEAD" {
        answer.push_str(&body);
    }
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await
}

fn set_socket_options(stream: &TcpStream, is_nodelay: bool) {
    // Errors are ignored: the socket works without these options, with more latency or without
    // detection of dead peers.
    let _ = stream.set_nodelay(is_nodelay);
    let keepalive = socket2::TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE / 3);
    let _ = socket2::SockRef::from(stream).set_tcp_keepalive(&keepalive);
}

fn is_local(stream: &TcpStream, peer: SocketAddr) -> bool {
    let peer = peer.ip().to_canonical();
    peer.is_loopback() || stream.local_addr().is_ok_and(|own| own.ip().to_canonical() == peer)
}

async fn pause_accepting(error: &io::Error) {
    tracing::warn!(%error, "cannot accept a connection");
    tokio::time::sleep(ACCEPT_PAUSE).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sniffs_protocol_from_first_bytes() {
        let check = |prefix: &[u8], sniffed: Sniffed| {
            assert_eq!(sniff(prefix), sniffed, "{}", prefix.escape_ascii());
        };
        check(b"", Sniffed::NeedMore);
        check(b"M", Sniffed::NeedMore);
        check(b"MOONLEA", Sniffed::NeedMore);
        check(b"MOONLEAN\x01", Sniffed::Protocol(Protocol::Native));
        check(b"MOONSTBY\x01", Sniffed::Protocol(Protocol::Standby));
        check(b"MOONLEAP", Sniffed::Unknown);
        check(b"P", Sniffed::NeedMore);
        check(b"PRI * HTTP/2.0\r\n", Sniffed::Protocol(Protocol::Grpc));
        check(b"PRI * HTTP/3", Sniffed::Unknown);
        check(b"PUT /", Sniffed::Protocol(Protocol::Http));
        check(b"GET /metrics", Sniffed::Protocol(Protocol::Http));
        check(b"\x16\x03\x01", Sniffed::Unknown);
        check(b"get /", Sniffed::Unknown);
    }
}
