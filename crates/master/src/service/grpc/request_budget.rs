//! The budget for the bytes of gRPC requests: the one that large frames of the native protocol have.

use std::{convert::Infallible, sync::Arc, task};

use axum::body::Body;
use mooncake_base::sync::Mutex;
use tokio::sync::OwnedSemaphorePermit;
use tokio_stream::StreamExt;
use tonic::{
    Status,
    codegen::{BoxFuture, Service, http},
    server::NamedService,
};

use super::{Admission, status};
use crate::service::admission::UNIT_BYTES;

/// A gRPC service whose requests are counted from their first bytes until they are answered. A
/// request without permits is refused, or waits if it ends puts.
#[derive(Debug, Clone)]
pub(super) struct BudgetedRequests<S> {
    pub(super) inner: S,
    pub(super) admission: Admission,
}

impl<S: NamedService> NamedService for BudgetedRequests<S> {
    const NAME: &'static str = S::NAME;
}

type Reply = http::Response<tonic::body::Body>;

impl<S> Service<http::Request<tonic::body::Body>> for BudgetedRequests<S>
where
    S: Service<
            http::Request<Body>,
            Response = Reply,
            Error = Infallible,
            Future = BoxFuture<Reply, Infallible>,
        >,
{
    type Response = Reply;
    type Error = Infallible;
    type Future = BoxFuture<Reply, Infallible>;

    fn poll_ready(
        &mut self,
        context: &mut task::Context<'_>,
    ) -> task::Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
        let method = request.uri().path().rsplit('/').next();
        let held = Arc::new(RequestPermits {
            admission: self.admission.clone(),
            is_put_end: matches!(method, Some("PutEnd" | "PutRevoke")),
            received: Mutex::default(),
        });
        let counting = Arc::clone(&held);
        let answered = self.inner.call(request.map(|body| {
            let pieces = Body::new(body).into_data_stream().then(move |piece| {
                let held = Arc::clone(&counting);
                async move {
                    if let Ok(piece) = &piece {
                        held.add(piece.len()).await.map_err(axum::Error::new)?;
                    }
                    piece
                }
            });
            Body::from_stream(pieces)
        }));
        Box::pin(async move {
            let answered = answered.await;
            drop(held);
            answered
        })
    }
}

/// The permits of one request.
#[derive(Debug)]
struct RequestPermits {
    admission: Admission,
    is_put_end: bool,
    received: Mutex<(usize, Option<OwnedSemaphorePermit>)>,
}

impl RequestPermits {
    /// Counts received bytes. The first few of a request are free, as those of a small frame are.
    async fn add(&self, bytes: usize) -> Result<(), Status> {
        let missing = {
            let (received, permit) = &mut *self.received.lock();
            *received += bytes;
            let counted =
                permit.as_ref().map_or(UNIT_BYTES, |held| held.num_permits() * UNIT_BYTES);
            received.saturating_sub(counted)
        };
        if missing == 0 {
            return Ok(());
        }
        let admitted = if self.is_put_end {
            self.admission.admit_put_end_frame(missing).await
        } else {
            self.admission.admit_frame(missing)
        };
        let new = admitted.map_err(|error| {
            // The code by which a client that sheds load itself is refused, too.
            Status::resource_exhausted(status(&error).message())
        })?;
        match &mut self.received.lock().1 {
            Some(permit) => permit.merge(new),
            none => *none = Some(new),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::{BufMut, Bytes, BytesMut};
    use mooncake_base::SystemClock;
    use mooncake_proto::v1::{self, master_server::MasterServer};
    use prost::Message;

    use super::{super::GrpcService, *};
    use crate::{service::Service as MasterService, state::Rules};

    /// The units of the budget in these tests.
    const UNITS: usize = 32;

    fn calls(admission: &Admission) -> BudgetedRequests<MasterServer<GrpcService>> {
        let service = Arc::new(MasterService::new(Rules::default(), SystemClock::shared()));
        let inner = MasterServer::new(GrpcService { service, admission: admission.clone() });
        BudgetedRequests { inner, admission: admission.clone() }
    }

    /// Returns a framed request of this many bytes.
    fn probe(bytes: usize) -> Bytes {
        let keys = vec![Bytes::from(vec![b'k'; bytes])];
        let message = v1::ProbeRequest { keys, ..Default::default() }.encode_to_vec();
        let mut framed = BytesMut::new();
        framed.put_u8(0);
        framed.put_u32(u32::try_from(message.len()).unwrap());
        framed.put_slice(&message);
        framed.freeze()
    }

    fn request(body: Body) -> http::Request<tonic::body::Body> {
        http::Request::post("/mooncake.v1.Master/Probe")
            .header("content-type", "application/grpc")
            .body(tonic::body::Body::new(body))
            .unwrap()
    }

    /// Returns the gRPC status; 0 if the call was answered.
    fn code(reply: &Reply) -> i32 {
        let code = reply.headers().get("grpc-status");
        code.map_or(0, |code| code.to_str().unwrap().parse().unwrap())
    }

    #[tokio::test]
    async fn requests_share_one_budget() {
        let admission = Admission::with(UNITS * UNIT_BYTES, 1, 1, Duration::from_secs(1));
        let mut calls = calls(&admission);
        let half = probe(UNITS * UNIT_BYTES / 2);
        // A request of which the last byte is missing holds what was received.
        let (send, receive) = tokio::sync::mpsc::channel::<Result<Bytes, axum::Error>>(1);
        let body = Body::from_stream(tokio_stream::wrappers::ReceiverStream::new(receive));
        let mut waiting = tokio::task::JoinSet::new();
        waiting.spawn(calls.call(request(body)));
        send.send(Ok(half.slice(..half.len() - 1))).await.unwrap();
        let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
        while admission.free_frame_bytes() == UNITS * UNIT_BYTES {
            assert!(tokio::time::Instant::now() < deadline, "the bytes are not counted");
            tokio::task::yield_now().await;
        }
        let large = calls.call(request(Body::from(probe(UNITS * UNIT_BYTES * 3 / 4)))).await;
        assert_eq!(code(&large.unwrap()), tonic::Code::ResourceExhausted as i32);
        let small = calls.call(request(Body::from(probe(100)))).await;
        assert_eq!(code(&small.unwrap()), 0, "small requests are served");
        send.send(Ok(half.slice(half.len() - 1..))).await.unwrap();
        drop(send);
        assert_eq!(code(&waiting.join_next().await.unwrap().unwrap().unwrap()), 0);
        assert_eq!(admission.free_frame_bytes(), UNITS * UNIT_BYTES, "all bytes are returned");
        assert_eq!(admission.refused(), 1);
    }
}
