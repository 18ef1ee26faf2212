//! How much the master takes on at a time. What goes beyond is refused at once, with a code that
//! says to come again: nobody waits for an answer that would come too late.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use mooncake_base::{Error, ErrorCode, Result};
use mooncake_proto::{native_frame::FRAME_BYTES_MAX, v1::request::Call};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit},
    time::timeout,
};

/// Frames up to this are not counted: every connection has a buffer for one.
pub(super) const SMALL_FRAME_BYTES: usize = 32 << 10;

/// The most bytes of larger frames over all connections, from their first byte to their answer's
/// last: 32 of the largest.
const FRAMES_BYTES_MAX: usize = 32 * FRAME_BYTES_MAX;

/// Frames are counted in units of this.
const UNIT_BYTES: usize = 4 << 10;

/// A call with more items than this is a large one.
const LARGE_ITEMS: usize = 1024;

/// The most large calls that may wait for their turn.
const WAITING_MAX: usize = 256;

/// How long a large call may wait for its turn.
const WAIT_DEADLINE: Duration = Duration::from_secs(10);

/// What all connections together may ask of the master.
#[derive(Debug, Clone)]
pub struct Admission {
    frames: Arc<Semaphore>,
    /// Large calls, each on a thread of its own, run one less than there are threads that serve, so
    /// that small ones find a core free.
    large_calls: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
    deadline: Duration,
    refused: Arc<AtomicU64>,
}

impl Admission {
    /// For a master with so many threads.
    pub fn new(threads: usize) -> Self {
        let large_calls = threads.saturating_sub(1).max(1);
        Self::with(FRAMES_BYTES_MAX, large_calls, WAITING_MAX, WAIT_DEADLINE)
    }

    fn with(frames_bytes: usize, large_calls: usize, waiting: usize, deadline: Duration) -> Self {
        Self {
            deadline,
            refused: Arc::default(),
            frames: Arc::new(Semaphore::new(frames_bytes / UNIT_BYTES)),
            large_calls: Arc::new(Semaphore::new(large_calls)),
            waiting: Arc::new(Semaphore::new(waiting)),
        }
    }

    /// Room for a frame of so many bytes, until it is answered.
    ///
    /// # Errors
    /// `RPC_FAIL`: there is none now.
    pub(super) fn admit_frame(&self, bytes: usize) -> Result<OwnedSemaphorePermit> {
        let units = u32::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX);
        self.frames.clone().try_acquire_many_owned(units).map_err(|_| self.busy("too many bytes"))
    }

    /// The turn of a call: at once for a small one, after others for a large one.
    ///
    /// # Errors
    /// `RPC_FAIL`: too many wait, or it waited for too long.
    pub(super) async fn admit(&self, call: Option<&Call>) -> Result<Option<SemaphorePermit<'_>>> {
        if !call.is_some_and(is_large) {
            return Ok(None);
        }
        if let Ok(permit) = self.large_calls.try_acquire() {
            return Ok(Some(permit));
        }
        let Ok(_place) = self.waiting.try_acquire() else {
            return Err(self.busy("too many large calls wait"));
        };
        match timeout(self.deadline, self.large_calls.acquire()).await {
            Ok(Ok(permit)) => Ok(Some(permit)),
            _ => Err(self.busy("a large call waited too long for its turn")),
        }
    }

    /// How many calls were refused since the start.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Bytes of large frames that are taken on now.
    pub fn large_frame_bytes(&self) -> u64 {
        let free = self.frames.available_permits() * UNIT_BYTES;
        FRAMES_BYTES_MAX.saturating_sub(free) as u64
    }

    fn busy(&self, why: &str) -> Error {
        self.refused.fetch_add(1, Ordering::Relaxed);
        let message = "the master has too much to do now; try again in a moment";
        Error::new(ErrorCode::RPC_FAIL, message).with("why", why)
    }
}

/// Whether a call may keep a thread for long, beyond what it is to be answered in.
pub(super) fn is_large(call: &Call) -> bool {
    matches!(call, Call::RemoveMatching(_) | Call::ListObjects(_)) || call.items() > LARGE_ITEMS
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use mooncake_proto::v1;

    use super::*;

    fn probe(keys: usize) -> Call {
        let keys = vec![Bytes::from_static(b"k"); keys];
        Call::Probe(v1::ProbeRequest { caller: None, keys, lease: false })
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
            // It is polled after the one that waits, and finds no place to wait.
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

    #[test]
    fn counts_items_of_columns() {
        let locate = |lengths| {
            let column = v1::KeyColumn { bytes: Bytes::new(), lengths };
            Call::Locate(v1::LocateRequest { columns: Some(column), ..Default::default() })
        };
        assert!(!is_large(&locate(vec![0; LARGE_ITEMS])));
        assert!(is_large(&locate(vec![0; LARGE_ITEMS + 1])));
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
