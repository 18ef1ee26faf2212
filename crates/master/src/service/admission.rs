//! Admission control: limits on the bytes and large calls in flight. Excess calls are refused at
//! once with a retryable error code, because a reply after a long wait would come too late. Ends and
//! revocations of puts wait instead: they free what an overloaded master is short of.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use mooncake_base::{Error, ErrorCode, Result};
use mooncake_proto::{calls::Repetition, native_frame::FRAME_BYTES_MAX, v1::request::Call};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit},
    time::timeout,
};

/// Frames up to this size are not counted: every connection has a buffer for one of them.
pub(super) const SMALL_FRAME_BYTES: usize = 32 << 10;

/// The maximum number of bytes of larger frames over all connections: 32 frames of the maximum
/// size. A frame counts from its first byte until its response is written.
const FRAMES_BYTES_MAX: usize = 32 * FRAME_BYTES_MAX;

/// The unit in which frame bytes are counted.
pub(super) const UNIT_BYTES: usize = 4 << 10;

/// A call with more items than this is a large call.
const LARGE_ITEMS: usize = 1024;

/// The maximum number of large calls that wait for a permit.
const WAITING_MAX: usize = 256;

/// How long a large call may wait for a permit.
const WAIT_DEADLINE: Duration = Duration::from_secs(10);

/// How long the end of puts may wait: for as long as the peer may take to send it.
const PUT_END_DEADLINE: Duration = Duration::from_secs(30);

/// The first bytes of requests that end or revoke puts, as our clients encode them: the key of the
/// field in `Request`. Another encoder may begin with another field and is not recognized.
const PUT_END_KEYS: [u8; 2] = [7 << 3 | 2, 8 << 3 | 2];

/// Admission control over all connections.
#[derive(Debug, Clone)]
pub struct Admission {
    frames: Arc<Semaphore>,
    /// Permits of large calls, each of which runs on its own thread. There is one permit less than
    /// runtime threads, so that small calls find a free core.
    large_calls: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
    deadline: Duration,
    refused: Arc<AtomicU64>,
}

impl Admission {
    /// Creates admission control for a master with this number of runtime threads.
    pub fn new(threads: usize) -> Self {
        let large_calls = threads.saturating_sub(1).max(1);
        Self::with(FRAMES_BYTES_MAX, large_calls, WAITING_MAX, WAIT_DEADLINE)
    }

    pub(super) fn with(
        frames_bytes: usize,
        large_calls: usize,
        waiting: usize,
        deadline: Duration,
    ) -> Self {
        Self {
            deadline,
            refused: Arc::default(),
            frames: Arc::new(Semaphore::new(frames_bytes / UNIT_BYTES)),
            large_calls: Arc::new(Semaphore::new(large_calls)),
            waiting: Arc::new(Semaphore::new(waiting)),
        }
    }

    /// Acquires permits for a frame of `bytes` bytes. They are held until the frame is answered.
    ///
    /// # Errors
    /// `RPC_FAIL`: no permits are available now.
    pub(super) fn admit_frame(&self, bytes: usize) -> Result<OwnedSemaphorePermit> {
        let units = u32::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX);
        self.frames.clone().try_acquire_many_owned(units).map_err(|_| self.busy("too many bytes"))
    }

    /// Waits for permits for a frame that ends puts.
    ///
    /// # Errors
    /// `RPC_FAIL`: the frames in flight take too long.
    pub(super) async fn admit_put_end_frame(&self, bytes: usize) -> Result<OwnedSemaphorePermit> {
        let units = u32::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX);
        match timeout(PUT_END_DEADLINE, self.frames.clone().acquire_many_owned(units)).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(self.busy("too many bytes")),
        }
    }

    /// Admits a call: a small call at once, a large call when it gets a permit. The end of puts gets
    /// none if that takes too long.
    ///
    /// # Errors
    /// `RPC_FAIL`: too many large calls wait, or the call waited too long.
    pub(super) async fn admit(&self, call: Option<&Call>) -> Result<Option<SemaphorePermit<'_>>> {
        let Some(call) = call.filter(|call| is_large(call)) else { return Ok(None) };
        if let Ok(permit) = self.large_calls.try_acquire() {
            return Ok(Some(permit));
        }
        let is_put_end = call.method().repetition() == Repetition::ClosesPut;
        let place = self.waiting.try_acquire();
        if place.is_err() && !is_put_end {
            return Err(self.busy("too many large calls wait"));
        }
        match timeout(self.deadline, self.large_calls.acquire()).await {
            Ok(Ok(permit)) => Ok(Some(permit)),
            _ if is_put_end => Ok(None),
            _ => Err(self.busy("a large call waited too long")),
        }
    }

    /// Returns the number of calls refused since the start.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Returns the bytes of large frames in flight.
    pub fn large_frame_bytes(&self) -> u64 {
        FRAMES_BYTES_MAX.saturating_sub(self.free_frame_bytes()) as u64
    }

    /// Returns the bytes of large frames that may still be received.
    pub(super) fn free_frame_bytes(&self) -> usize {
        self.frames.available_permits() * UNIT_BYTES
    }

    fn busy(&self, why: &str) -> Error {
        self.refused.fetch_add(1, Ordering::Relaxed);
        let message = "the master is overloaded; retry later";
        Error::new(ErrorCode::RPC_FAIL, message).with("why", why)
    }
}

/// Returns whether a call may occupy a thread for long. A call that sets quotas writes a file.
pub(super) fn is_large(call: &Call) -> bool {
    let sweeps_or_writes =
        matches!(call, Call::RemoveMatching(_) | Call::ListObjects(_) | Call::SetQuotas(_));
    sweeps_or_writes || call.items() > LARGE_ITEMS
}

/// Returns whether a request with this first byte ends or revokes puts.
pub(super) fn begins_put_end(first: u8) -> bool {
    PUT_END_KEYS.contains(&first)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use mooncake_proto::v1;

    use super::*;

    fn probe(keys: usize) -> Call {
        let keys = vec![Bytes::from_static(b"k"); keys];
        Call::Probe(v1::ProbeRequest { caller: None, keys, lease: false, ..Default::default() })
    }

    #[tokio::test]
    async fn small_calls_never_wait_for_large_ones() {
        let admission = Admission::with(0, 1, 1, WAIT_DEADLINE);
        let large = probe(LARGE_ITEMS + 1);
        let first = admission.admit(Some(&large)).await.unwrap();
        assert!(first.is_some());
        assert!(admission.admit(Some(&probe(LARGE_ITEMS))).await.unwrap().is_none());
        let waits = admission.admit(Some(&large));
        let refused = async {
            // This future is polled after the waiting call, when the only waiting slot is taken.
            let error = admission.admit(Some(&large)).await.unwrap_err();
            let error = error.to_string();
            assert!(error.contains("too many large calls"), "{error}");
            drop(first);
        };
        let (waited, ()) = tokio::join!(waits, refused);
        assert!(waited.unwrap().is_some());
    }

    #[tokio::test]
    async fn large_call_waits_at_most_its_deadline() {
        let admission = Admission::with(0, 1, 1, Duration::from_millis(1));
        let sweep = Call::ListObjects(v1::ListObjectsRequest::default());
        let _first = admission.admit(Some(&sweep)).await.unwrap();
        let error = admission.admit(Some(&sweep)).await.unwrap_err();
        let error = error.to_string();
        assert!(error.contains("waited too long"), "{error}");
    }

    fn put_end(items: usize) -> Call {
        let columns = v1::PutRefColumns { versions: vec![1; items], ..Default::default() };
        Call::PutEnd(v1::PutEndRequest { caller: None, columns: Some(columns) })
    }

    #[tokio::test]
    async fn end_of_puts_is_not_refused() {
        let admission = Admission::with(UNIT_BYTES, 1, 0, Duration::from_millis(1));
        let end = put_end(LARGE_ITEMS + 1);
        let first = admission.admit(Some(&end)).await.unwrap();
        assert!(first.is_some());
        assert!(admission.admit(Some(&probe(LARGE_ITEMS + 1))).await.is_err());
        assert!(admission.admit(Some(&end)).await.unwrap().is_none(), "without a permit, later");
        let frame = admission.admit_frame(UNIT_BYTES).unwrap();
        assert!(admission.admit_frame(UNIT_BYTES).is_err());
        let end = admission.admit_put_end_frame(UNIT_BYTES);
        let free = async { drop(frame) };
        let (end, ()) = tokio::join!(end, free);
        drop(end.unwrap());
    }

    #[test]
    fn first_byte_tells_the_end_of_puts() {
        let revoke = Call::PutRevoke(v1::PutRevokeRequest::default());
        for (call, is_end) in [(put_end(1), true), (revoke, true), (probe(1), false)] {
            let request =
                v1::Request { call: Some(call), call_number: 1, ..v1::Request::default() };
            let first = prost::Message::encode_to_vec(&request)[0];
            assert_eq!(begins_put_end(first), is_end, "{request:?}");
        }
    }

    #[test]
    fn counts_items_of_columns() {
        let locate = |lengths| {
            let column = v1::KeyColumn { bytes: Bytes::new(), lengths };
            Call::Locate(v1::LocateRequest { keys: Some(column), ..Default::default() })
        };
        assert!(!is_large(&locate(vec![0; LARGE_ITEMS])));
        assert!(is_large(&locate(vec![0; LARGE_ITEMS + 1])));
        let keys = vec![Bytes::from_static(b"k"); LARGE_ITEMS + 1];
        let clear = v1::ClearReplicasRequest { caller: None, keys, segment: String::new() };
        assert!(is_large(&Call::ClearReplicas(clear)));
    }

    #[test]
    fn dropped_frame_returns_its_bytes() {
        let admission = Admission::with(4 * UNIT_BYTES, 1, 1, WAIT_DEADLINE);
        let three = admission.admit_frame(2 * UNIT_BYTES + 1).unwrap();
        assert_eq!(admission.admit_frame(2 * UNIT_BYTES).unwrap_err().code(), ErrorCode::RPC_FAIL);
        let _one = admission.admit_frame(UNIT_BYTES).unwrap();
        drop(three);
        assert!(admission.admit_frame(3 * UNIT_BYTES).is_ok());
        assert_eq!(admission.refused(), 1);
    }
}
