//! Events of objects over ZeroMQ: what became readable and what is no more, for routers and indexes.
//!
//! The state tells its news in the order in which they happened; [`Events::push`] takes them while
//! the state is still locked and never waits. One task packs them into messages of three frames
//! (an empty topic, a sequence number, MessagePack) and hands those to every subscriber. A queue
//! that is full loses its oldest event and a sequence number with it, so that a gap shows the loss;
//! a subscriber that does not keep up misses messages by itself.

mod message;
mod subscriber;
mod zmtp;

use std::{
    collections::VecDeque,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use mooncake_base::sync::Mutex;
use mooncake_base::{Endpoint, Error, Result};
use serde_json::{Value, json};
use tokio::{
    net::TcpListener,
    sync::{Notify, Semaphore, broadcast},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub(crate) use self::message::MessageEncoder;
use crate::{config::EventsConfig, state::ObjectEvent};

/// The most events of one message.
const BATCH_MAX: usize = 64;

/// The most keys' bytes of one message, unless one event alone has more.
const BATCH_BYTES_MAX: usize = 1 << 20;

/// The most subscribers at a time.
const SUBSCRIBERS_MAX: usize = 64;

/// So many messages may wait for a subscriber before it misses some.
const LAG_MAX: usize = 256;

/// What "without a bound" is taken to be.
const CAPACITY_MAX: usize = 1 << 24;

/// How long to wait when the system has no more descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The publisher.
#[derive(Debug)]
pub struct Events {
    config: EventsConfig,
    address: SocketAddr,
    queue: Mutex<Queue>,
    has_more: Notify,
    published_batches: AtomicU64,
    published_events: AtomicU64,
    dropped: AtomicU64,
    skipped: AtomicU64,
    missed: Arc<AtomicU64>,
    subscribers: Arc<AtomicU64>,
}

/// Events that wait to be sent.
#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<ObjectEvent>,
    /// Sequence numbers that no message will have: one for each event that was dropped.
    lost: u64,
}

impl Events {
    pub(crate) fn new(config: EventsConfig, address: SocketAddr) -> Self {
        Self {
            config,
            address,
            queue: Mutex::default(),
            has_more: Notify::new(),
            published_batches: AtomicU64::new(0),
            published_events: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            skipped: AtomicU64::new(0),
            missed: Arc::default(),
            subscribers: Arc::default(),
        }
    }

    /// Takes news in their order. Never waits; what finds no room pushes the oldest out.
    pub fn push(&self, news: impl IntoIterator<Item = ObjectEvent>) {
        let capacity = match self.config.capacity {
            0 => CAPACITY_MAX,
            capacity => capacity.min(CAPACITY_MAX),
        };
        let mut queue = self.queue.lock();
        for event in news {
            // Without its key, an event about one object says nothing.
            if !self.config.has_object_key && !matches!(event, ObjectEvent::Cleared { .. }) {
                self.skipped.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            if queue.waiting.len() >= capacity {
                queue.waiting.pop_front();
                queue.lost += 1;
                self.dropped.fetch_add(1, Ordering::Relaxed);
            }
            queue.waiting.push_back(event);
        }
        drop(queue);
        self.has_more.notify_one();
    }

    /// What `/kv_events/status` says.
    pub fn status(&self) -> Value {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        json!({
            "enabled": true,
            "published_batches": read(&self.published_batches),
            "published_events": read(&self.published_events),
            "dropped_events": read(&self.dropped),
            "skipped_unparsed_keys": read(&self.skipped),
            "missed_by_slow_subscribers": read(&self.missed),
            "subscribers": read(&self.subscribers),
            "endpoint": format!("tcp://{}", self.address),
        })
    }

    /// Publishes until `stop`, and ends once its subscribers' connections have.
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
                    tracing::debug!(%error, "a subscriber could not be accepted");
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
            let (missed, subscribers) = (self.missed.clone(), self.subscribers.clone());
            tasks.spawn(async move {
                let _permit = permit;
                subscribers.fetch_add(1, Ordering::Relaxed);
                let served = subscriber::serve(stream, messages, &missed);
                if let Some(Err(error)) = stop.run_until_cancelled(served).await {
                    tracing::debug!(%peer, %error, "a subscriber went");
                }
                subscribers.fetch_sub(1, Ordering::Relaxed);
            });
        }
    }

    async fn publish(&self, sender: &broadcast::Sender<Bytes>) {
        let mut frame = MessageEncoder::default();
        loop {
            self.has_more.notified().await;
            while let Some(batch) = self.take_batch(&mut frame) {
                let count = batch.len() as u64;
                let message = frame.message(&batch, &self.config);
                // Nobody listening is no failure: the message was published.
                let _ = sender.send(message);
                self.published_batches.fetch_add(1, Ordering::Relaxed);
                self.published_events.fetch_add(count, Ordering::Relaxed);
                tokio::task::yield_now().await;
            }
        }
    }

    /// The next events, and the sequence numbers of what was lost before them passed over.
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

/// Binds what `--kv_events_bind_endpoint` names.
///
/// # Errors
/// Not an endpoint that can be bound here.
pub(crate) async fn bind(endpoint: &str) -> Result<TcpListener> {
    let refuse = |why: &str| {
        Err(Error::invalid(why)
            .with("option", "kv_events_bind_endpoint")
            .with("endpoint", endpoint))
    };
    let Some(rest) = endpoint.strip_prefix("tcp://") else {
        return refuse("events are published at tcp://HOST:PORT and nowhere else");
    };
    let Some((host, port)) = rest.rsplit_once(':') else {
        return refuse("the endpoint has no port");
    };
    let port = match port {
        "*" => Some(0),
        port => port.parse::<u16>().ok(),
    };
    let Some(port) = port else { return refuse("the port is none") };
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
