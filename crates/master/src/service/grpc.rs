//! The gRPC protocol: the same calls as methods, with health checking and reflection.

mod health;
mod request_budget;

use std::{io, sync::Arc, time::Duration};

use mooncake_base::{Error, ErrorCode, ErrorKind, Token};
use mooncake_proto::{
    FILE_DESCRIPTOR_SET,
    calls::Rpc,
    native_frame::FRAME_BYTES_MAX,
    native_token,
    v1::{self, master_server::MasterServer, response},
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status, service::interceptor::InterceptedService, transport::Server};

use self::{health::HealthWhileLeading, request_budget::BudgetedRequests};
use super::{
    Admission, AnsweringThread, Service,
    connection::grpc_stream::{GrpcCall, GrpcPeer, GrpcStream},
};

/// The interval of HTTP/2 keepalive probes.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// The maximum number of concurrent streams per connection; further streams wait in the client.
const STREAMS_MAX: u32 = 256;

/// The maximum number of calls in flight per connection. Further calls are refused with
/// `RESOURCE_EXHAUSTED`.
const CALLS_MAX: usize = 64;

/// The deadline of a call, unless the client sets a shorter one.
const CALL_DEADLINE: Duration = Duration::from_secs(30);

/// Serves connections until `stop`, then waits for the calls in flight.
pub(crate) async fn serve(
    service: Arc<Service>,
    admission: Admission,
    token: Option<Token>,
    connections: mpsc::Receiver<io::Result<GrpcStream>>,
    stop: CancellationToken,
) {
    let health = HealthWhileLeading::server(Arc::clone(&service)).await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1();
    let own = Arc::clone(&service);
    let check_token = move |request| {
        let mut request = check_token(token.as_ref(), request).map_err(|error| {
            own.record_refusal(&error);
            status(&error)
        })?;
        if let Some(peer) = request.extensions().get::<GrpcPeer>() {
            if let Err(error) = peer.place.prove() {
                own.record_excess();
                return Err(Status::resource_exhausted(status(&error).message()));
            }
            // Dropped with the request.
            let call = peer.begin_call();
            request.extensions_mut().insert(call);
        }
        Ok(request)
    };
    let reflection = match reflection {
        Ok(reflection) => Some(InterceptedService::new(reflection, check_token.clone())),
        Err(error) => {
            tracing::error!(%error, "gRPC reflection is off: the built-in file descriptor set is invalid");
            None
        }
    };
    let master = MasterServer::new(GrpcService { service, admission: admission.clone() })
        .max_decoding_message_size(FRAME_BYTES_MAX)
        .max_encoding_message_size(FRAME_BYTES_MAX);
    let master = BudgetedRequests { inner: master, admission };
    // Before the message is received: others must not take from the budget of the callers.
    let master = InterceptedService::new(master, check_token);
    let served = Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE))
        .max_concurrent_streams(STREAMS_MAX)
        .concurrency_limit_per_connection(CALLS_MAX)
        .load_shed(true)
        .timeout(CALL_DEADLINE)
        .add_service(health)
        .add_optional_service(reflection)
        .add_service(master)
        .serve_with_incoming_shutdown(ReceiverStream::new(connections), stop.cancelled())
        .await;
    if let Err(error) = served {
        tracing::error!(%error, "the gRPC server failed");
    }
}

/// Lets a call pass whose metadata carry the token of the master, if it has one.
fn check_token(
    token: Option<&Token>,
    request: tonic::Request<()>,
) -> mooncake_base::Result<tonic::Request<()>> {
    let Some(token) = token else { return Ok(request) };
    let Some(shown) = request.metadata().get("authorization") else {
        return Err(native_token::missing_token());
    };
    match shown.as_bytes().strip_prefix(b"Bearer ") {
        Some(shown) if token.is(shown) => Ok(request),
        _ => {
            let text = "the metadata `authorization` is not `Bearer` and the token of the master; \
                        see MOONCAKE_MASTER_TOKEN";
            Err(Error::new(ErrorCode::ILLEGAL_CLIENT, text))
        }
    }
}

#[derive(Debug)]
struct GrpcService {
    service: Arc<Service>,
    admission: Admission,
}

impl GrpcService {
    async fn call<R: Rpc>(
        &self,
        request: tonic::Request<R>,
    ) -> Result<tonic::Response<R::Answer>, Status> {
        let peer = request.extensions().get::<GrpcPeer>().cloned();
        let _running = request.extensions().get::<Arc<GrpcCall>>().cloned();
        let origin = peer.map(|peer| peer.origin);
        let origin = origin.unwrap_or_else(|| self.service.open_session(false));
        let call = Some(request.into_inner().into_call());
        self.service.record_arrival(call.as_ref(), &origin);
        self.service.wait_for_owners(call.as_ref()).await;
        let permit = self.admission.admit(call.as_ref()).await.map_err(|error| status(&error))?;
        let request = v1::Request { call, ..Default::default() };
        let executed = self.service.execute_for(request, &origin, permit).await;
        let answer = self.service.answer_from_log(executed, AnsweringThread::Runtime).await;
        match answer.call {
            Some(response::Call::Failure(failure)) => Err(status(&Error::from(&failure))),
            Some(call) => R::answer(call).map(tonic::Response::new).ok_or_else(mismatch),
            None => Err(mismatch()),
        }
    }
}

fn mismatch() -> Status {
    Status::internal("the response is not of the kind of the call")
}

/// Converts the failure of a whole call to a gRPC status. The message begins with the name of
/// upstream's error code.
fn status(error: &Error) -> Status {
    let code = match error.kind() {
        ErrorKind::InvalidArgument => Code::InvalidArgument,
        ErrorKind::Closed | ErrorKind::NotReady | ErrorKind::Busy => Code::FailedPrecondition,
        ErrorKind::NotFound => Code::NotFound,
        ErrorKind::AlreadyExists => Code::AlreadyExists,
        ErrorKind::NoSpace | ErrorKind::QuotaExceeded => Code::ResourceExhausted,
        ErrorKind::Unavailable | ErrorKind::TransferFailed => Code::Unavailable,
        ErrorKind::Timeout => Code::DeadlineExceeded,
        ErrorKind::Corrupt | ErrorKind::Storage => Code::DataLoss,
        ErrorKind::PermissionDenied => Code::PermissionDenied,
        ErrorKind::NotSupported => Code::Unimplemented,
        ErrorKind::Internal => Code::Internal,
    };
    Status::new(code, format!("{}: {}", error.code().name(), error.message()))
}

/// Implements the tonic service. It expands to the whole `impl` block, because `async_trait` must see
/// the methods.
macro_rules! grpc_service {
    ($(
        $method:ident($request:ident -> $response:ident) $name:ident, $metric:literal, $repetition:ident,
        |$r:ident| items: $items:expr, keys: $keys:expr;
    )+) => {
        #[tonic::async_trait]
        impl v1::master_server::Master for GrpcService {
            $(
                async fn $name(
                    &self,
                    request: tonic::Request<v1::$request>,
                ) -> Result<tonic::Response<v1::$response>, Status> {
                    self.call(request).await
                }
            )+
        }
    };
}

mooncake_proto::for_each_call!(grpc_service);
