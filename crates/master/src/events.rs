//! Object events over ZeroMQ, for routers and indexes: which objects became readable and which were
//! removed.
//!
//! The state emits events in the order of the changes. [`Events::push`] queues them while the state
//! is still locked and never blocks. One task packs them into messages of three frames (an empty
//! topic, a sequence number, MessagePack) and sends those to every subscriber. A full queue drops
//! its oldest event together with a sequence number, so that subscribers see a gap. A slow
//! subscriber misses messages without affecting others. One of several masters that begins to lead
//! skips the numbers of earlier leaders: what changed in between was not published.

mod message;
mod subscriber;
mod zmtp;

use std::{
    collections::VecDeque,
    net::SocketAddr,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use mooncake_base::{Endpoint, Error, Result, counters, sync::Mutex};
use mooncake_os::acceptor::ACCEPT_PAUSE;
use tokio::{
    net::TcpListener,
    sync::{Notify, Semaphore, broadcast},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub(crate) use self::message::MessageEncoder;
use crate::{config::EventsConfig, state::ObjectEvent};

/// The maximum number of events in one message.
const BATCH_MAX: usize = 64;

/// The maximum total key size in one message, unless a single event exceeds it.
const BATCH_BYTES_MAX: usize = 1 << 20;

/// The maximum number of subscribers.
const SUBSCRIBERS_MAX: usize = 64;

/// The number of messages a subscriber may lag behind before it misses some.
const LAG_MAX: usize = 256;

/// The queue capacity used for "unbounded".
const CAPACITY_MAX: usize = 1 << 24;

/// The event publisher.
#[derive(Debug)]
pub struct Events {
    config: EventsConfig,
    address: SocketAddr,
    /// The number before that of the first message.
    before: u64,
    queue: Mutex<EventQueue>,
    has_more: Notify,
    counters: Arc<EventCounters>,
}

counters! {
    /// Counts what is published, and what is not.
    struct EventCounters;
    /// What was published, and what was not.
    #[derive(Copy)]
    pub struct EventCounts {}
    METRICS {
        /// Events published.
        published_events = counter "published_total",
        /// Events dropped because the queue was full.
        dropped = counter "dropped_total",
        /// Messages missed by slow subscribers.
        missed = counter "missed_total",
        /// Connected event subscribers.
        subscribers = gauge "subscribers",
        /// Messages published.
        published_batches,
        /// Events without a key, which are not published.
        skipped,
    }
}

/// The queue of events to be sent.
#[derive(Debug, Default)]
struct EventQueue {
    waiting: VecDeque<ObjectEvent>,
    /// The number of dropped events. Their sequence numbers are skipped.
    lost: u64,
}

impl Events {
    /// Creates a publisher whose messages have the numbers behind `before`.
    pub(crate) fn new(config: EventsConfig, address: SocketAddr, before: u64) -> Self {
        Self {
            config,
            address,
            before,
            queue: Mutex::default(),
            has_more: Notify::new(),
            counters: Arc::default(),
        }
    }

    /// Queues events in order. Never blocks; a full queue drops its oldest event.
    pub fn push(&self, events: impl IntoIterator<Item = ObjectEvent>) {
        let capacity = match self.config.capacity {
            0 => CAPACITY_MAX,
            capacity => capacity.min(CAPACITY_MAX),
        };
        let mut queue = self.queue.lock();
        for event in events {
            // Without its key, an event about one object carries no information.
            if !self.config.has_object_key && !matches!(event, ObjectEvent::Cleared { .. }) {
                self.counters.skipped.increment();
                continue;
            }
            if queue.waiting.len() >= capacity {
                queue.waiting.pop_front();
                queue.lost += 1;
                self.counters.dropped.increment();
            }
            queue.waiting.push_back(event);
        }
        drop(queue);
        self.has_more.notify_one();
    }

    /// Returns the counters.
    pub fn counts(&self) -> EventCounts {
        self.counters.snapshot()
    }

    /// Returns the number of the first message.
    pub const fn first_sequence(&self) -> u64 {
        self.before + 1
    }

    /// Returns the endpoint to which subscribers connect.
    pub fn endpoint(&self) -> String {
        format!("tcp://{}", self.address)
    }

    /// Publishes until `stop`. Returns when the connections of all subscribers have ended.
    pub(crate) async fn serve(self: Arc<Self>, listener: TcpListener, stop: CancellationToken) {
        let (sender, _) = broadcast::channel(LAG_MAX);
        let tasks = TaskTracker::new();
        let accepting = self.accept(listener, &sender, &tasks, &stop);
        let publishing = self.publish(&sender);
        tokio::select! {
            () = accepting => {}
            () = publishing => {}
            () = stop.cancelled() => {}
        }
        drop(sender);
        tasks.close();
        tasks.wait().await;
    }

    async fn accept(
        &self,
        listener: TcpListener,
        sender: &broadcast::Sender<Bytes>,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) {
        let permits = Arc::new(Semaphore::new(SUBSCRIBERS_MAX));
        loop {
            let (stream, peer) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::debug!(%error, "cannot accept a subscriber");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let Ok(permit) = permits.clone().try_acquire_owned() else {
                tracing::warn!(%peer, limit = SUBSCRIBERS_MAX, "too many subscribers, one is refused");
                continue;
            };
            let _ = stream.set_nodelay(true);
            let (messages, stop) = (sender.subscribe(), stop.clone());
            let counters = self.counters.clone();
            tasks.spawn(async move {
                let _permit = permit;
                counters.subscribers.increment();
                let served = subscriber::serve(stream, messages, &counters.missed);
                if let Some(Err(error)) = stop.run_until_cancelled(served).await {
                    tracing::debug!(%peer, %error, "a subscriber disconnected");
                }
                counters.subscribers.subtract(1);
            });
        }
    }

    async fn publish(&self, sender: &broadcast::Sender<Bytes>) {
        let mut frame = MessageEncoder::after(self.before);
        loop {
            self.has_more.notified().await;
            while let Some(batch) = self.take_batch(&mut frame) {
                let count = batch.len() as u64;
                let message = frame.message(&batch, &self.config);
                // An error means that there are no subscribers. The message counts as published.
                let _ = sender.send(message);
                self.counters.published_batches.increment();
                self.counters.published_events.add(count);
                tokio::task::yield_now().await;
            }
        }
    }

    /// Returns the next events, and skips the sequence numbers of events dropped before them.
    fn take_batch(&self, frame: &mut MessageEncoder) -> Option<Vec<ObjectEvent>> {
        let mut queue = self.queue.lock();
        frame.skip(std::mem::take(&mut queue.lost));
        let mut batch = Vec::new();
        let mut bytes = 0;
        while batch.len() < BATCH_MAX {
            bytes += queue.waiting.front()?.key().len();
            if bytes > BATCH_BYTES_MAX && !batch.is_empty() {
                break;
            }
            batch.extend(queue.waiting.pop_front());
            if queue.waiting.is_empty() {
                break;
            }
        }
        Some(batch)
    }
}

/// Returns a number above those of the messages of all leaders that began to lead before `time`. No leader
/// sends 4096 messages in a millisecond; and the numbers of this decade are below 2^53, so that every
/// reader of JSON reads them exactly.
pub(crate) fn sequence_at(time: SystemTime) -> u64 {
    let since_1970 = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX).saturating_mul(4096)
}

/// Binds the endpoint of `--kv_events_bind_endpoint`.
///
/// # Errors
/// The endpoint is invalid or cannot be bound.
pub(crate) async fn bind(endpoint: &str) -> Result<TcpListener> {
    let refuse = |why: &str| {
        Err(Error::invalid(why)
            .with("option", "kv_events_bind_endpoint")
            .with("endpoint", endpoint))
    };
    let Some(rest) = endpoint.strip_prefix("tcp://") else {
        return refuse("the endpoint of events must be tcp://HOST:PORT");
    };
    let Some((host, port)) = rest.rsplit_once(':') else {
        return refuse("the endpoint has no port");
    };
    let port = match port {
        "*" => Some(0),
        port => port.parse::<u16>().ok(),
    };
    let Some(port) = port else { return refuse("the port is not a number") };
    let host = match host {
        "*" => "0.0.0.0".to_owned(),
        host => host.parse::<Endpoint>()?.host.to_string(),
    };
    match TcpListener::bind((&host[..], port)).await {
        Ok(listener) => Ok(listener),
        Err(source) => {
            refuse("the endpoint cannot be bound").map_err(|error: Error| error.caused_by(source))
        }
    }
}

#[cfg(test)]
mod tests;
