//! An opened device: its port, the queues on it, and the thread that takes completions and events.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use mooncake_base::sync::{Condvar, Mutex, RwLock};
use mooncake_base::{Clock, Error, ErrorCode, Moment, Result};
use mooncake_verbs::{
    AsyncEvent, Completion, CompletionChannel, CompletionQueue, ConnectionSettings, Context,
    Device, Gid, GidEntry, Mtu, Port, PortState, ProtectionDomain, QueuePair, QueuePairLimits,
    rank_gids,
};

use crate::{
    send_queue::{Load, SendQueue},
    settings::RdmaSettings,
    usage::{Counters, DeviceUsage},
};

/// How long the thread looks for completions without sleeping after it found the last.
const SPIN_TIME: Duration = Duration::from_micros(100);

/// How long the thread sleeps at most. It is woken for completions and events.
const SLEEP_MAX: Duration = Duration::from_millis(100);

/// An opened device.
#[derive(Debug)]
pub(crate) struct Nic {
    index: usize,
    name: String,
    context: Arc<Context>,
    domain: Arc<ProtectionDomain>,
    channel: Arc<CompletionChannel>,
    completions: Arc<CompletionQueue>,
    gid: Gid,
    lid: u16,
    connection: ConnectionSettings,
    limits: QueuePairLimits,
    region_bytes_max: u64,
    /// The queues by slot. A slot is used again after its queue is gone.
    queues: RwLock<Vec<Option<Arc<SendQueue>>>>,
    /// Places for requests in flight, so that the completion queue cannot overrun.
    places: AtomicU32,
    is_active: AtomicBool,
    is_stopping: AtomicBool,
    waiters: AtomicU32,
    waiting: Mutex<()>,
    has_places: Condvar,
    clock: Arc<dyn Clock>,
    counters: Counters,
    depth: u32,
    /// Bytes per second; 0: not known.
    link_rate: u64,
}

/// Returns the address by which peers reach a device.
///
/// # Errors
/// The port is down, or has no such address.
pub(crate) fn choose_address(
    device: &str,
    port: &Port,
    entries: Vec<GidEntry>,
    settings: &RdmaSettings,
) -> Result<GidEntry> {
    let unusable = |text: &str| {
        Error::new(ErrorCode::INVALID_PARAMS, text)
            .with("device", device)
            .with("port", settings.port)
    };
    if port.state != PortState::Active {
        return Err(unusable("the port of an RDMA device is down"));
    }
    let chosen = match settings.gid_index {
        Some(index) => entries.into_iter().find(|entry| entry.index == index),
        None => rank_gids(entries).into_iter().next(),
    };
    chosen.ok_or_else(|| unusable("the port of an RDMA device has no such address"))
}

/// Returns the error of a device that refused a call.
pub(crate) fn failure(device: &str, source: mooncake_verbs::Error) -> Error {
    Error::new(ErrorCode::INVALID_PARAMS, "an RDMA device cannot be used")
        .with("device", device)
        .caused_by(source)
}

/// The thread of a device. Joined when it is dropped.
#[derive(Debug)]
pub(crate) struct Poller {
    nic: Arc<Nic>,
    thread: Option<JoinHandle<()>>,
}

impl Nic {
    /// Opens a device whose port is active.
    ///
    /// # Errors
    /// The port is down, it has no address that peers can use, or the driver refused.
    pub(crate) fn open(
        index: usize,
        device: &Device,
        settings: &RdmaSettings,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        let failed = |source| failure(device.name(), source);
        let context = device.open().map_err(failed)?;
        let port = context.port(settings.port).map_err(failed)?;
        let entries = context.gids(settings.port).map_err(failed)?;
        let entry = choose_address(device.name(), &port, entries, settings)?;
        let limits = context.limits().map_err(failed)?;
        let depth = settings.device_depth.min(limits.completions_max);
        let channel = CompletionChannel::new(&context).map_err(failed)?;
        let completions = CompletionQueue::with_channel(&channel, depth).map_err(failed)?;
        Ok(Self {
            index,
            name: device.name().to_owned(),
            domain: ProtectionDomain::new(&context).map_err(failed)?,
            gid: entry.gid,
            lid: port.lid,
            connection: ConnectionSettings {
                port: settings.port,
                gid_index: entry.index,
                mtu: port.mtu.min(settings.mtu),
                partition_index: settings.partition_index,
                service_level: settings.service_level,
                traffic_class: settings.traffic_class,
                outgoing_reads: limits.outgoing_reads_max.clamp(1, 16),
                incoming_reads: limits.incoming_reads_max.clamp(1, 16),
                ..ConnectionSettings::default()
            },
            limits: QueuePairLimits {
                requests: settings.queue_depth.min(limits.requests_max).min(depth),
                inline_bytes: settings.inline_bytes,
                ..QueuePairLimits::default()
            },
            region_bytes_max: limits.region_bytes_max,
            context,
            channel,
            completions,
            queues: RwLock::default(),
            places: AtomicU32::new(depth),
            is_active: AtomicBool::new(true),
            is_stopping: AtomicBool::new(false),
            waiters: AtomicU32::new(0),
            waiting: Mutex::default(),
            has_places: Condvar::default(),
            clock,
            counters: Counters::default(),
            depth,
            link_rate: u64::from(port.megabits_per_second) * 125_000,
        })
    }

    /// Creates an unconnected queue pair.
    ///
    /// # Errors
    /// The device has no queue pair left, or the driver refused.
    pub(crate) fn create_queue_pair(&self) -> Result<QueuePair> {
        QueuePair::new(&self.domain, &self.completions, self.limits).map_err(|source| {
            Error::new(ErrorCode::TRANSFER_FAIL, "no queue pair can be made")
                .with("device", &self.name)
                .caused_by(source)
        })
    }

    /// Puts a connected queue pair into the table, so that its completions are found.
    pub(crate) fn add_queue(
        &self,
        queue_pair: mooncake_verbs::ConnectedQueuePair,
        load: &Arc<Load>,
    ) -> Arc<SendQueue> {
        let mut queues = self.queues.write();
        let slot = queues.iter().position(Option::is_none).unwrap_or(queues.len());
        let number = u32::try_from(slot).expect("fewer queue pairs than a device can have");
        let queue = Arc::new(SendQueue::new(queue_pair, number, Arc::clone(load)));
        if slot == queues.len() {
            queues.push(None);
        }
        queues[slot] = Some(Arc::clone(&queue));
        queue
    }

    /// Takes a queue out of the table and destroys its queue pair.
    pub(crate) fn remove_queue(&self, queue: &SendQueue) {
        queue.destroy(self);
        if let Some(slot) = self.queues.write().get_mut(queue.slot() as usize)
            && slot.as_ref().is_some_and(|found| found.number() == queue.number())
        {
            *slot = None;
        }
    }

    /// Takes places for requests, at most `wanted`. Returns how many.
    pub(crate) fn take_places(&self, wanted: u32) -> u32 {
        let mut taken = 0;
        let take = |places: u32| {
            taken = places.min(wanted);
            (taken > 0).then(|| places - taken)
        };
        let took = self.places.fetch_update(Ordering::AcqRel, Ordering::Acquire, take);
        if took.is_ok() { taken } else { 0 }
    }

    pub(crate) fn return_places(&self, count: u32) {
        self.places.fetch_add(count, Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) > 0 {
            // The waiter looks with this lock held, or has not begun to wait.
            drop(self.waiting.lock());
            self.has_places.notify_all();
        }
    }

    /// Waits until requests ended, or the time is over.
    pub(crate) fn wait_for_places(&self, timeout: Duration) {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let mut waiting = self.waiting.lock();
        self.has_places.wait_for(&mut waiting, timeout);
        drop(waiting);
        self.waiters.fetch_sub(1, Ordering::SeqCst);
    }

    /// Records the outcome of a request. Not inlined, so that its instructions are counted.
    #[inline(never)]
    fn complete(&self, completion: &Completion) {
        let (slot, sequence) = ((completion.request >> 32) as usize, completion.request as u32);
        let queue = self.queues.read().get(slot).cloned().flatten();
        // A queue pair that was destroyed may have left completions.
        if let Some(queue) = queue.filter(|queue| queue.number() == completion.queue_pair) {
            queue.complete(self, sequence, completion.status);
        }
    }

    fn handle_event(&self, event: AsyncEvent) {
        tracing::debug!(device = self.name, ?event, "an event of an RDMA device");
        match event {
            AsyncEvent::PortActive(port) if port == self.connection.port => {
                self.is_active.store(true, Ordering::Release);
                tracing::info!(device = self.name, "the link of an RDMA device is up again");
            }
            AsyncEvent::PortError(port) if port == self.connection.port => {
                self.deactivate("the link of an RDMA device is down");
            }
            AsyncEvent::AddressChange(port) if port == self.connection.port => {
                let now = self.context.gid(port, self.connection.gid_index.into());
                if now.is_ok_and(|gid| gid != self.gid) {
                    self.deactivate("the address of an RDMA device changed");
                }
            }
            AsyncEvent::DeviceFatal => self.deactivate("an RDMA device failed or was removed"),
            AsyncEvent::QueuePairError(number) => {
                let queues = self.queues.read();
                let found = queues.iter().flatten().find(|queue| queue.number() == number);
                found.cloned().iter().for_each(|queue| queue.fail());
            }
            _ => {}
        }
    }

    /// Uses the device no more until its link is up: what is in flight goes over other devices.
    fn deactivate(&self, reason: &str) {
        if self.is_active.swap(false, Ordering::AcqRel) {
            self.counters.count_link_failure();
            tracing::warn!(device = self.name, "{reason}");
        }
        let queues: Vec<_> = self.queues.read().iter().flatten().cloned().collect();
        queues.iter().for_each(|queue| queue.fail());
    }

    pub(crate) fn now(&self) -> Moment {
        self.clock.now()
    }

    pub(crate) fn link_rate(&self) -> u64 {
        self.link_rate
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    pub(crate) fn usage(&self) -> DeviceUsage {
        let free = self.places.load(Ordering::Relaxed).min(self.depth);
        DeviceUsage {
            is_active: self.is_active(),
            in_flight: self.depth - free,
            in_flight_max: self.depth,
            queue_pairs: self.queues.read().iter().flatten().count(),
            ..self.counters.usage(&self.name)
        }
    }

    pub(crate) fn index(&self) -> usize {
        self.index
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn domain(&self) -> &Arc<ProtectionDomain> {
        &self.domain
    }

    pub(crate) fn gid(&self) -> Gid {
        self.gid
    }

    pub(crate) fn lid(&self) -> u16 {
        self.lid
    }

    pub(crate) fn mtu(&self) -> Mtu {
        self.connection.mtu
    }

    pub(crate) fn region_bytes_max(&self) -> u64 {
        self.region_bytes_max
    }

    pub(crate) fn connection(&self) -> &ConnectionSettings {
        &self.connection
    }

    pub(crate) fn is_active(&self) -> bool {
        self.is_active.load(Ordering::Acquire)
    }
}

impl Poller {
    /// Starts the thread of a device.
    ///
    /// # Errors
    /// The system has no thread left.
    pub(crate) fn start(nic: &Arc<Nic>) -> Result<Self> {
        let polled = Arc::clone(nic);
        let thread = std::thread::Builder::new()
            .name(format!("rdma-{}", nic.name))
            .spawn(move || poll(&polled))
            .map_err(|source| Error::internal("no thread can be started").caused_by(source))?;
        Ok(Self { nic: Arc::clone(nic), thread: Some(thread) })
    }

    pub(crate) fn nic(&self) -> &Arc<Nic> {
        &self.nic
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        self.nic.is_stopping.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // The thread has not panicked, or said so itself.
            let _ = thread.join();
        }
    }
}

/// Takes completions and events until the poller is dropped. Looks without sleeping while completions
/// arrive, and sleeps when none has for a moment.
fn poll(nic: &Nic) {
    let mut last_found = Instant::now();
    while !nic.is_stopping.load(Ordering::Acquire) {
        match nic.completions.poll(|completion| nic.complete(&completion)) {
            Ok(0) if last_found.elapsed() < SPIN_TIME => std::hint::spin_loop(),
            Ok(0) => {
                if let Err(error) = sleep(nic) {
                    nic.deactivate("an RDMA device cannot be waited for");
                    tracing::debug!(device = nic.name, %error, "waiting failed");
                    std::thread::park_timeout(SLEEP_MAX);
                }
                last_found = Instant::now();
            }
            Ok(_) => last_found = Instant::now(),
            Err(error) => {
                nic.deactivate("the completions of an RDMA device cannot be read");
                tracing::debug!(device = nic.name, %error, "polling failed");
                std::thread::park_timeout(SLEEP_MAX);
            }
        }
    }
}

/// Sleeps until there is a completion or an event, and handles the events.
fn sleep(nic: &Nic) -> mooncake_verbs::Result<()> {
    nic.completions.arm()?;
    // What arrived before the queue was armed causes no wake-up.
    if nic.completions.poll(|completion| nic.complete(&completion))? > 0 {
        return Ok(());
    }
    nic.channel.wait_or_event(SLEEP_MAX)?;
    while let Some(event) = nic.context.next_event(Duration::ZERO)? {
        nic.handle_event(event);
    }
    Ok(())
}
