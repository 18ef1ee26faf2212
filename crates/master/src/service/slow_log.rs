//! The slow log: counts slow calls and keeps the latest in a ring of fixed size.

use std::{
    collections::VecDeque,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use mooncake_base::ClientId;
use mooncake_base::sync::Mutex;
use mooncake_proto::{
    calls::Method,
    v1::{request::Call, response},
};

/// The number of slow calls kept.
pub const KEPT_MAX: usize = 128;

/// The number of bytes of a key that are kept.
const KEY_BYTES_SHOWN: usize = 120;

/// The default threshold.
const THRESHOLD: Duration = Duration::from_millis(100);

/// A slow call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlowCall {
    /// The time of its end, in milliseconds since 1970.
    pub ended_ms: u64,
    /// The name of the call.
    pub call: &'static str,
    /// The number of items: keys, segments or the like.
    pub items: usize,
    /// The first key, escaped and truncated.
    pub key: String,
    /// The id of the calling client; empty if the call has none.
    pub client: String,
    /// The duration of the call in the master, including waits.
    pub took: Duration,
    /// The error of the whole call; empty if it did not fail.
    pub failure: String,
}

/// The log of slow calls.
#[derive(Debug)]
pub struct SlowLog {
    threshold_us: AtomicU64,
    total: AtomicU64,
    latest: Mutex<VecDeque<SlowCall>>,
}

impl Default for SlowLog {
    fn default() -> Self {
        let slow = Self {
            threshold_us: AtomicU64::new(0),
            total: AtomicU64::new(0),
            latest: Mutex::default(),
        };
        slow.set_threshold(THRESHOLD);
        slow
    }
}

impl SlowLog {
    /// Returns the minimum duration of a slow call; zero turns the slow log off.
    pub fn threshold(&self) -> Duration {
        Duration::from_micros(self.threshold_us.load(Ordering::Relaxed))
    }

    /// Changes the threshold.
    pub fn set_threshold(&self, threshold: Duration) {
        let micros = u64::try_from(threshold.as_micros()).unwrap_or(u64::MAX);
        self.threshold_us.store(micros, Ordering::Relaxed);
    }

    /// Returns the number of slow calls since the start.
    pub fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Returns the latest slow calls, newest first.
    pub fn latest(&self) -> Vec<SlowCall> {
        self.latest.lock().iter().rev().cloned().collect()
    }

    /// Starts timing a call.
    pub(super) fn begin(&self, call: Option<&Call>) -> Option<PendingCall> {
        let is_off = self.threshold_us.load(Ordering::Relaxed) == 0;
        let summary = if is_off { None } else { call.map(CallSummary::of) };
        Some(PendingCall { method: call?.method(), summary, began: Instant::now() })
    }

    /// Ends timing a call and records it if it was slow.
    pub(super) fn end(&self, pending: PendingCall, took: Duration, answer: &response::Call) {
        let Some(summary) = pending.summary else { return };
        if took < self.threshold() {
            return;
        }
        self.total.fetch_add(1, Ordering::Relaxed);
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let shown = &summary.key[..summary.key.len().min(KEY_BYTES_SHOWN)];
        let slow = SlowCall {
            ended_ms: u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX),
            call: summary.call,
            items: summary.items,
            key: shown.escape_ascii().to_string(),
            client: summary.client.map(|client| client.to_string()).unwrap_or_default(),
            took,
            failure: match answer {
                response::Call::Failure(failure) => failure.message.clone(),
                _ => String::new(),
            },
        };
        tracing::debug!(?slow, "slow call");
        let mut latest = self.latest.lock();
        if latest.len() == KEPT_MAX {
            latest.pop_front();
        }
        latest.push_back(slow);
    }
}

/// A call in progress.
#[derive(Debug)]
pub(super) struct PendingCall {
    pub(super) method: Method,
    pub(super) began: Instant,
    /// None while the slow log is off.
    summary: Option<CallSummary>,
}

/// The part of a call that the slow log keeps.
#[derive(Debug)]
struct CallSummary {
    call: &'static str,
    items: usize,
    key: Bytes,
    client: Option<ClientId>,
}

impl CallSummary {
    fn of(call: &Call) -> Self {
        let client = call.caller().and_then(|caller| ClientId::from_bytes(&caller.client));
        // A call without items counts as one item.
        let items = call.items().max(1);
        Self { call: call.method().name(), items, key: call.first_key(), client }
    }
}

#[cfg(test)]
mod tests {
    use mooncake_proto::v1;

    use super::*;

    fn probe(key: &str) -> Call {
        let keys = vec![Bytes::copy_from_slice(key.as_bytes())];
        Call::Probe(v1::ProbeRequest { caller: None, keys, lease: false, ..Default::default() })
    }

    fn time_probe(slow: &SlowLog, key: &str) {
        let pending = slow.begin(Some(&probe(key)));
        let pending = pending.expect("there is a call");
        let took = pending.began.elapsed();
        slow.end(pending, took, &response::Call::Probe(v1::ProbeResponse::default()));
    }

    #[test]
    fn keeps_only_calls_above_threshold() {
        let slow = SlowLog::default();
        slow.set_threshold(Duration::from_secs(3600));
        time_probe(&slow, "quick");
        assert_eq!((slow.total(), slow.latest().len()), (0, 0));
        slow.set_threshold(Duration::ZERO);
        time_probe(&slow, "off");
        assert_eq!(slow.total(), 0, "zero switches the record off");
        slow.set_threshold(Duration::from_micros(1));
        while slow.total() == 0 {
            time_probe(&slow, "k");
        }
        let kept = &slow.latest()[0];
        assert_eq!((kept.call, kept.items, &kept.key[..]), ("probe", 1, "k"));
        assert!(kept.took >= Duration::from_micros(1) && kept.failure.is_empty());
    }

    #[test]
    fn ring_keeps_latest_and_counts_all() {
        let slow = SlowLog::default();
        slow.set_threshold(Duration::from_micros(1));
        while slow.total() < KEPT_MAX as u64 + 5 {
            let key = slow.total().to_string();
            time_probe(&slow, &key);
        }
        let latest = slow.latest();
        assert_eq!(latest.len(), KEPT_MAX);
        assert_eq!(latest[0].key, (slow.total() - 1).to_string(), "newest first");
    }

    #[test]
    fn key_is_shown_escaped_and_truncated() {
        let slow = SlowLog::default();
        slow.set_threshold(Duration::from_micros(1));
        let long = "\u{1b}[31m".to_owned() + &"x".repeat(10_000);
        while slow.total() == 0 {
            time_probe(&slow, &long);
        }
        let key = &slow.latest()[0].key;
        assert!(key.len() < 1000 && !key.contains('\u{1b}'), "{key}");
    }

    #[test]
    fn every_call_is_named_with_its_client() {
        let caller = v1::Caller { client: vec![7; 16].into(), tenant: String::new() };
        let (caller, keys) = (Some(caller), vec![Bytes::from_static(b"k"); 3]);
        let clear = v1::ClearReplicasRequest { caller, keys, segment: String::new() };
        let summary = CallSummary::of(&Call::ClearReplicas(clear));
        assert_eq!(
            (summary.call, summary.items, &summary.key[..]),
            ("clear_replicas", 3, &b"k"[..])
        );
        assert_eq!(summary.client, ClientId::from_bytes(&[7; 16]));
    }
}
