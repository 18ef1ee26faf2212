//! What the RPC port of a standby answers: who leads, and its health.

use std::{sync::Arc, time::Duration};

use bytes::{Buf as _, BytesMut};
use mooncake_base::{Error, ErrorCode, Result};
use mooncake_proto::{
    native_frame::{self, GREETING_BYTES_MAX, ServerGreeting},
    native_token::{Challenge, ClientProof},
    v1,
};
use prost::Message as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

use super::{HTTP_DEADLINE, Protocol, answer_http, protocol_of};
use crate::{
    cluster::not_leader,
    server::Server,
    service::reply_size::{SHORT_BYTES_MAX, shorten_failure},
};

/// More bytes than a greeting has beside the text of its refusal.
const OTHER_BYTES_MAX: usize = 64;

/// Time in which a peer must have read the answer.
const DEADLINE: Duration = Duration::from_secs(5);

/// Answers a connection to a master that does not lead, and closes it.
pub(super) fn answer(stream: TcpStream, server: &Arc<Server>) {
    let inner = Arc::clone(server);
    let place = server.permits().take_in();
    server.spawn_answer(async move {
        let answer = timeout(2 * DEADLINE, answer_protocol(stream, &inner));
        // The oldest connection ends if there are too many.
        let _ = place.displaced().run_until_cancelled(answer).await;
    });
}

async fn answer_protocol(mut stream: TcpStream, server: &Server) {
    let mut prefix = BytesMut::with_capacity(256);
    match protocol_of(&mut stream, &mut prefix).await {
        Some(Protocol::Native | Protocol::Standby) => {
            let _ = timeout(DEADLINE, refuse(stream, prefix, server)).await;
        }
        Some(Protocol::Http) => {
            let health = || crate::admin::health_of(server).to_string();
            let _ = timeout(HTTP_DEADLINE, answer_http(stream, prefix, health)).await;
        }
        // A client of gRPC connects again, or elsewhere.
        Some(Protocol::Grpc) | None => {}
    }
}

/// Greets with the address of the leader, or why there is none. A master with a token says that only to
/// those that prove it.
async fn refuse(mut stream: TcpStream, prefix: BytesMut, server: &Server) -> Result<()> {
    let mut input = prefix;
    let greeting_bytes = native_frame::client_greeting().len();
    // A socket that is closed with unread bytes resets the connection, and the answer may be lost.
    while input.len() < greeting_bytes {
        if stream.read_buf(&mut input).await.map_err(broken)? == 0 {
            return Ok(());
        }
    }
    input.advance(greeting_bytes);
    let reason = match &server.config().rpc_token {
        None => reason(server),
        Some(token) => {
            let challenge = Challenge::new();
            // Clients of earlier versions read no further, and go on to another master.
            let refusal = Some(fitted(&not_leader(None)));
            send(&mut stream, &ServerGreeting { refusal, ..challenge.greeting() }).await?;
            let Some(proof) = read_proof(&mut stream, &mut input).await? else { return Ok(()) };
            match challenge.check(token, &proof) {
                Ok(_) => reason(server),
                Err(error) => {
                    if let Some(cluster) = server.cluster() {
                        cluster.record_refused_token(stream.peer_addr().ok(), &error);
                    }
                    error
                }
            }
        }
    };
    let version = native_frame::VERSION;
    let refusal = Some(fitted(&reason));
    send(&mut stream, &ServerGreeting { version, refusal, ..ServerGreeting::default() }).await?;
    stream.shutdown().await.map_err(broken)
}

/// Returns why this master answers no calls.
fn reason(server: &Server) -> Error {
    server.cluster().map_or_else(|| not_leader(None), |cluster| cluster.refusal())
}

/// Reads the proof of the token; `None` if the peer closed the connection instead.
async fn read_proof(stream: &mut TcpStream, input: &mut BytesMut) -> Result<Option<ClientProof>> {
    loop {
        match native_frame::decode(input, GREETING_BYTES_MAX) {
            Ok(Some(proof)) => return Ok(Some(proof)),
            Ok(None) => {}
            // The first call of a client that knows no tokens.
            Err(_) => return Ok(Some(ClientProof::default())),
        }
        if stream.read_buf(input).await.map_err(broken)? == 0 {
            return Ok(None);
        }
    }
}

async fn send(stream: &mut TcpStream, greeting: &ServerGreeting) -> Result<()> {
    let mut output = BytesMut::new();
    native_frame::encode(greeting, &mut output)?;
    stream.write_all(&output).await.map_err(broken)
}

fn broken(source: std::io::Error) -> Error {
    Error::new(ErrorCode::RPC_FAIL, "the peer hung up").caused_by(source)
}

/// Returns a refusal that a greeting has room for: its causes name addresses, of any length.
fn fitted(refusal: &Error) -> v1::Failure {
    let mut failure: v1::Failure = refusal.into();
    let room = GREETING_BYTES_MAX - OTHER_BYTES_MAX;
    if failure.encoded_len() > room {
        // The message has the causes, too.
        shorten_failure(&mut failure, room - SHORT_BYTES_MAX);
    }
    failure
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_fit_into_a_greeting() {
        for length in [10, 500, 900, 950, 1000, 5000] {
            let service = "é".repeat(length);
            let error = not_leader(None)
                .with("lease_service", &service)
                .caused_by(Error::closed("no answer").with("from", &service));
            let refusal = fitted(&error);
            assert!(refusal.message.starts_with("this master does not lead"), "{refusal:?}");
            let version = native_frame::VERSION;
            let greeting =
                ServerGreeting { version, refusal: Some(refusal), ..ServerGreeting::default() };
            let mut output = BytesMut::new();
            native_frame::encode(&greeting, &mut output).unwrap();
            assert!(output.len() <= GREETING_BYTES_MAX, "{length}: {}", output.len());
        }
    }
}
