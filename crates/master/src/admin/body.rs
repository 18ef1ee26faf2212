//! The request body, read completely. Errors are returned as JSON, like all other failures.

use axum::{
    extract::{FromRequest, Request},
    http::{StatusCode, header},
    response::Response,
};
use bytes::{Bytes, BytesMut};
use mooncake_base::Error;
use tokio_stream::StreamExt;

use super::failure;

/// The maximum length of a body: some ten thousand names.
const BYTES_MAX: usize = 2 << 20;

/// A request body of limited length.
#[derive(Debug)]
pub(super) struct LimitedBody(pub(super) Bytes);

impl<S: Sync> FromRequest<S> for LimitedBody {
    type Rejection = Response;

    async fn from_request(request: Request, _: &S) -> Result<Self, Response> {
        let declared = request.headers().get(header::CONTENT_LENGTH);
        let declared = declared.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        if declared.is_some_and(|length| length > BYTES_MAX as u64) {
            return Err(too_long());
        }
        let mut bytes = BytesMut::new();
        let mut pieces = request.into_body().into_data_stream();
        while let Some(piece) = pieces.next().await {
            let Ok(piece) = piece else {
                let error = Error::invalid("the body was cut off");
                return Err(failure(StatusCode::BAD_REQUEST, &error));
            };
            if piece.len() > BYTES_MAX - bytes.len() {
                return Err(too_long());
            }
            bytes.extend_from_slice(&piece);
        }
        Ok(Self(bytes.freeze()))
    }
}

fn too_long() -> Response {
    let error = Error::invalid(format!("the body is longer than {BYTES_MAX} bytes"));
    failure(StatusCode::PAYLOAD_TOO_LARGE, &error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::{Body, to_bytes};

    async fn taken(request: Request) -> Result<Bytes, (StatusCode, serde_json::Value)> {
        match LimitedBody::from_request(request, &()).await {
            Ok(LimitedBody(bytes)) => Ok(bytes),
            Err(refusal) => {
                let status = refusal.status();
                let body = to_bytes(refusal.into_body(), 4096).await.unwrap();
                Err((status, serde_json::from_slice(&body).unwrap()))
            }
        }
    }

    #[tokio::test]
    async fn refuses_body_above_limit_in_json() {
        let longest = vec![b' '; BYTES_MAX];
        let body = taken(Request::new(Body::from(longest.clone()))).await.unwrap();
        assert_eq!(body.len(), BYTES_MAX);
        let declared =
            Request::builder().header("content-length", BYTES_MAX + 1).body(Body::empty());
        // Two frames and no content length: only counting bytes finds the limit.
        let frames = [longest, vec![b'x']].map(Ok::<_, std::convert::Infallible>);
        let chunked = Request::new(Body::from_stream(tokio_stream::iter(frames)));
        for request in [declared.unwrap(), chunked] {
            let (status, reply) = taken(request).await.unwrap_err();
            assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
            assert_eq!((&reply["success"], &reply["error_code"]), (&false.into(), &(-600).into()));
        }
    }

    #[tokio::test]
    async fn refuses_truncated_body_in_json() {
        let cut = [Ok(vec![b'{']), Err(std::io::Error::other("gone"))];
        let request = Request::new(Body::from_stream(tokio_stream::iter(cut)));
        let (status, reply) = taken(request).await.unwrap_err();
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert_eq!(reply["error_message"], "the body was cut off");
    }
}
