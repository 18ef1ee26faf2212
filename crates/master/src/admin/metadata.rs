//! The embedded metadata server: a key-value store for transfer engines.
//!
//! Keys are used as they appear in the query, without decoding: engines always encode them the same
//! way.

use std::{collections::HashMap, sync::Arc, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{RawQuery, Request, State},
    http::{Method, StatusCode, header},
    response::{IntoResponse, Response},
    routing::{any, get},
};
use bytes::BytesMut;
use mooncake_base::{sync::Mutex, token::METADATA_OWNER_HEADER};
use mooncake_http::{LimitedListener, Peer};
use tokio::{net::TcpListener, sync::Semaphore, time::timeout};
use tokio_stream::StreamExt;
use tokio_util::sync::CancellationToken;

use super::{decoded, not_found, parameter, text_reply};
use crate::config::Secret;

/// The maximum size of a value.
const VALUE_BYTES_MAX: usize = 16 << 20;

/// The maximum length of a key.
const KEY_BYTES_MAX: usize = 4096;

/// The maximum length of an owner.
const OWNER_BYTES_MAX: usize = 256;

/// The refusal of a change by others than the owner.
const OWNED: &str =
    "the entry belongs to engines with a transfer token; this request shows none, or another";

/// The maximum number of keys.
const KEYS_MAX: usize = 1 << 20;

/// The maximum total size of all values.
const STORED_BYTES_MAX: usize = 1 << 30;

/// The maximum total size of the values that are being received.
const RECEIVED_BYTES_MAX: usize = 4 * VALUE_BYTES_MAX;

/// The deadline for receiving a value.
const VALUE_DEADLINE: Duration = Duration::from_secs(30);

/// The key-value store of the engines' metadata.
#[derive(Debug)]
pub struct Metadata {
    entries: Mutex<Entries>,
    /// The bytes that may still be received before their values are stored.
    receivable: Semaphore,
}

impl Default for Metadata {
    fn default() -> Self {
        Self { entries: Mutex::default(), receivable: Semaphore::new(RECEIVED_BYTES_MAX) }
    }
}

#[derive(Debug, Default)]
struct Entries {
    values: HashMap<String, Bytes>,
    /// Owners of the entries that were written with one; only they change and remove them.
    owners: HashMap<String, Secret>,
    bytes: usize,
}

impl Entries {
    /// Returns whether a request may change the entry.
    fn is_open_to(&self, key: &str, owner: &str) -> bool {
        self.owners.get(key).is_none_or(|own| own.is(owner.as_bytes()))
    }

    fn remove(&mut self, key: &str) -> bool {
        let old = self.values.remove(key);
        self.owners.remove(key);
        self.bytes -= old.as_ref().map_or(0, Bytes::len);
        old.is_some()
    }
}

/// The outcome of a PUT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutOutcome {
    /// The value was stored.
    Updated,
    /// The same value was already stored.
    Unchanged,
    /// The key holds the address of a live engine, which must not be replaced.
    Duplicate,
    /// The store is full.
    Full,
    /// The entry belongs to engines with a token that the request does not show.
    Owned,
}

impl Metadata {
    /// Stores the value, unless it would replace the address of another engine, the entry has
    /// another owner, or the store is full. An owner that is not empty owns the entry from then on.
    pub fn put(&self, key: &str, value: Bytes, owner: &str) -> PutOutcome {
        let mut entries = self.entries.lock();
        if !entries.is_open_to(key, owner) {
            return PutOutcome::Owned;
        }
        let old = entries.values.get(key);
        if key.contains("rpc_meta")
            && let Some(old) = old
        {
            return if *old == value { PutOutcome::Unchanged } else { PutOutcome::Duplicate };
        }
        let old_bytes = old.map_or(0, Bytes::len);
        let bytes = entries.bytes - old_bytes + value.len();
        let is_new = old.is_none();
        if bytes > STORED_BYTES_MAX || (is_new && entries.values.len() >= KEYS_MAX) {
            return PutOutcome::Full;
        }
        entries.bytes = bytes;
        entries.values.insert(key.to_owned(), value);
        if !owner.is_empty() {
            entries.owners.insert(key.to_owned(), Secret::new(owner));
        }
        PutOutcome::Updated
    }

    /// Returns the value of a key.
    pub fn get(&self, key: &str) -> Option<Bytes> {
        self.entries.lock().values.get(key).cloned()
    }

    /// Deletes a key. Returns whether it existed; `None` if the entry has another owner.
    pub fn delete(&self, key: &str, owner: &str) -> Option<bool> {
        let mut entries = self.entries.lock();
        entries.is_open_to(key, owner).then(|| entries.remove(key))
    }

    /// Deletes the entries that an engine of that name stored about itself.
    pub fn remove_engine(&self, name: &str) {
        let endings = [format!("/ram/{name}"), format!("/rpc_meta/{name}")];
        let mut entries = self.entries.lock();
        let gone: Vec<String> = entries
            .values
            .keys()
            .filter(|key| {
                let key = decoded(key);
                key.starts_with(b"mooncake/")
                    && endings.iter().any(|ending| key.ends_with(ending.as_bytes()))
            })
            .cloned()
            .collect();
        for key in gone {
            entries.remove(&key);
        }
    }
}

/// Receives a value and stores it. No more than [`RECEIVED_BYTES_MAX`] bytes are received at a time.
async fn receive_and_put(store: &Metadata, key: &str, owner: &str, body: Body) -> Response {
    let mut permits = None;
    let receiving = async {
        let mut value = BytesMut::new();
        let mut pieces = body.into_data_stream();
        while let Some(piece) = pieces.next().await {
            let Some(piece) = piece.ok().filter(|p| p.len() <= VALUE_BYTES_MAX - value.len())
            else {
                return Err((
                    StatusCode::PAYLOAD_TOO_LARGE,
                    "the value is too large or was cut off",
                ));
            };
            let bytes = u32::try_from(piece.len()).unwrap_or(u32::MAX);
            let Ok(permit) = store.receivable.try_acquire_many(bytes) else {
                let text = "too many values are being received; retry later";
                return Err((StatusCode::SERVICE_UNAVAILABLE, text));
            };
            match &mut permits {
                None => permits = Some(permit),
                Some(permits) => permits.merge(permit),
            }
            value.extend_from_slice(&piece);
        }
        Ok(value.freeze())
    };
    match timeout(VALUE_DEADLINE, receiving).await {
        Ok(Ok(value)) => match store.put(key, value, owner) {
            PutOutcome::Updated => text_with_status(StatusCode::OK, "metadata updated"),
            PutOutcome::Unchanged => text_with_status(StatusCode::OK, "metadata unchanged"),
            PutOutcome::Duplicate => {
                text_with_status(StatusCode::BAD_REQUEST, "Duplicate rpc_meta key not allowed")
            }
            PutOutcome::Owned => text_with_status(StatusCode::FORBIDDEN, OWNED),
            PutOutcome::Full => {
                text_with_status(StatusCode::INSUFFICIENT_STORAGE, "the metadata server is full")
            }
        },
        Ok(Err((status, text))) => text_with_status(status, text),
        Err(_) => text_with_status(StatusCode::REQUEST_TIMEOUT, "the value did not arrive in time"),
    }
}

/// Serves the metadata port until `stop`.
pub(crate) async fn serve(listener: TcpListener, store: Arc<Metadata>, stop: CancellationToken) {
    let app = Router::new()
        .route("/metadata", any(answer))
        .route("/health", get(|| async { text_reply("OK") }))
        .fallback(|| async { not_found() })
        .method_not_allowed_fallback(|| async { not_found() })
        .with_state(store)
        .into_make_service_with_connect_info::<Peer>();
    let served = axum::serve(LimitedListener::new(listener), app)
        .with_graceful_shutdown(stop.cancelled_owned())
        .await;
    if let Err(error) = served {
        tracing::error!(%error, "the metadata server failed");
    }
}

async fn answer(
    State(store): State<Arc<Metadata>>,
    RawQuery(query): RawQuery,
    request: Request,
) -> Response {
    let method = request.method().clone();
    // The HTTP server strips the body from the reply to HEAD.
    let method = if method == Method::HEAD { Method::GET } else { method };
    if ![Method::GET, Method::PUT, Method::DELETE].contains(&method) {
        return not_found();
    }
    let query = query.unwrap_or_default();
    let Some(key) = parameter(&query, "key").filter(|key| !key.is_empty()) else {
        return text_with_status(StatusCode::BAD_REQUEST, "Missing key parameter");
    };
    if key.len() > KEY_BYTES_MAX {
        return text_with_status(StatusCode::BAD_REQUEST, "the key is too long");
    }
    let owner = request.headers().get(METADATA_OWNER_HEADER);
    let owner = owner.and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    if owner.len() > OWNER_BYTES_MAX {
        return text_with_status(StatusCode::BAD_REQUEST, "the owner is too long");
    }
    match method {
        Method::GET => match store.get(key) {
            Some(value) => ([(header::CONTENT_TYPE, "application/json")], value).into_response(),
            None => text_with_status(StatusCode::NOT_FOUND, "metadata not found"),
        },
        Method::PUT => receive_and_put(&store, key, &owner, request.into_body()).await,
        _ => match store.delete(key, &owner) {
            Some(true) => text_with_status(StatusCode::OK, "metadata deleted"),
            Some(false) => text_with_status(StatusCode::NOT_FOUND, "metadata not found"),
            None => text_with_status(StatusCode::FORBIDDEN, OWNED),
        },
    }
}

fn text_with_status(status: StatusCode, text: &'static str) -> Response {
    (status, text_reply(text)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_with_an_owner_are_changed_by_the_owner_only() {
        let store = Metadata::default();
        let put = |value: &'static str, owner| store.put("k/rpc_meta/a", value.into(), owner);
        assert_eq!(put("1", "me"), PutOutcome::Updated);
        assert_eq!(store.delete("k/rpc_meta/a", ""), None);
        assert_eq!(store.delete("k/rpc_meta/a", "you"), None);
        assert_eq!(put("2", ""), PutOutcome::Owned);
        assert_eq!(store.get("k/rpc_meta/a").unwrap(), "1");
        assert_eq!(store.delete("k/rpc_meta/a", "me"), Some(true));
        assert_eq!(put("2", ""), PutOutcome::Updated, "a free name is open to all");
        assert_eq!(store.delete("k/rpc_meta/a", "you"), Some(true), "nobody owns it");
    }

    #[test]
    fn removes_only_entries_of_expired_engine() {
        let store = Metadata::default();
        for key in [
            "mooncake%2Fram%2Fa%3A1",
            "mooncake%2Frpc_meta%2Fa%3A1",
            "mooncake/c1/ram/a:1",
            "mooncake%2Fram%2Fba%3A1",
            "other%2Fram%2Fa%3A1",
        ] {
            assert_eq!(store.put(key, Bytes::from_static(b"x"), ""), PutOutcome::Updated);
        }
        store.remove_engine("a:1");
        assert!(store.get("mooncake%2Fram%2Fa%3A1").is_none());
        assert!(store.get("mooncake%2Frpc_meta%2Fa%3A1").is_none());
        assert!(store.get("mooncake/c1/ram/a:1").is_none());
        assert!(store.get("mooncake%2Fram%2Fba%3A1").is_some());
        assert!(store.get("other%2Fram%2Fa%3A1").is_some());
        assert_eq!(store.entries.lock().bytes, 2);
    }

    #[test]
    fn stored_bytes_follow_replacement_and_deletion() {
        let store = Metadata::default();
        store.put("a", Bytes::from_static(b"12345"), "");
        store.put("a", Bytes::from_static(b"1"), "");
        assert_eq!(store.entries.lock().bytes, 1);
        assert_eq!((store.delete("a", ""), store.delete("a", "")), (Some(true), Some(false)));
        assert_eq!(store.entries.lock().bytes, 0);
    }

    #[tokio::test]
    async fn received_values_share_one_budget() {
        let store = Metadata::default();
        let piece = Bytes::from(vec![7; VALUE_BYTES_MAX - 1]);
        let channels = (0..4).map(|_| tokio::sync::mpsc::channel::<Result<Bytes, String>>(1));
        let (senders, bodies): (Vec<_>, Vec<_>) = channels.unzip();
        let receiving = bodies.into_iter().map(|receiver| {
            let stream = tokio_stream::wrappers::ReceiverStream::new(receiver);
            Box::pin(receive_and_put(&store, "key", "", Body::from_stream(stream)))
        });
        let mut receiving: Vec<_> = receiving.collect();
        for (sender, put) in senders.iter().zip(&mut receiving) {
            sender.send(Ok(piece.clone())).await.unwrap();
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            assert!(put.as_mut().poll(&mut context).is_pending(), "a byte is missing");
        }
        assert_eq!(store.receivable.available_permits(), 4);
        let refused = receive_and_put(&store, "other", "", Body::from(vec![1; 5])).await;
        assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
        let small = receive_and_put(&store, "other", "", Body::from(vec![1; 4])).await;
        assert_eq!(small.status(), StatusCode::OK);
        drop(senders);
        for put in receiving {
            assert_eq!(put.await.status(), StatusCode::OK);
        }
        assert_eq!(store.receivable.available_permits(), RECEIVED_BYTES_MAX);
        let large =
            receive_and_put(&store, "large", "", Body::from(vec![1; VALUE_BYTES_MAX + 1])).await;
        assert_eq!(large.status(), StatusCode::PAYLOAD_TOO_LARGE);
    }
}
