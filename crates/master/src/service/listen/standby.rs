//! What the RPC port of a standby answers: who leads, and its health.

use std::{sync::Arc, time::Duration};

use bytes::BytesMut;
use mooncake_base::{Error, ErrorCode, Result};
use mooncake_proto::{
    native_frame::{self, ServerGreeting},
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

/// Greets with the address of the leader, or why there is none; strangers do not learn it from a master
/// with a token.
async fn refuse(mut stream: TcpStream, prefix: BytesMut, server: &Server) -> Result<()> {
    let mut greeting = prefix;
    let broken = |source: std::io::Error| {
        Error::new(ErrorCode::RPC_FAIL, "the peer hung up").caused_by(source)
    };
    // A socket that is closed with unread bytes resets the connection, and the answer may be lost.
    while greeting.len() < native_frame::client_greeting().len() {
        if stream.read_buf(&mut greeting).await.map_err(broken)? == 0 {
            return Ok(());
        }
    }
    let refusal = match server.cluster() {
        Some(cluster) if server.config().rpc_token.is_none() => cluster.refusal(),
        _ => not_leader(None),
    };
    let ours = ServerGreeting {
        version: native_frame::VERSION,
        refusal: Some(fitted(&refusal)),
        ..ServerGreeting::default()
    };
    let mut output = BytesMut::new();
    native_frame::encode(&ours, &mut output)?;
    stream.write_all(&output).await.map_err(broken)?;
    stream.shutdown().await.map_err(broken)
}

/// Returns a refusal that a greeting has room for: its causes name addresses, of any length.
fn fitted(refusal: &Error) -> v1::Failure {
    let mut failure: v1::Failure = refusal.into();
    let room = native_frame::GREETING_BYTES_MAX - OTHER_BYTES_MAX;
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
            assert!(output.len() <= native_frame::GREETING_BYTES_MAX, "{length}: {}", output.len());
        }
    }
}
