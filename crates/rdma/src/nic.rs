//! An opened device: its port, the queues on it, and the thread that takes completions and events.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use mooncake_base::sync::{Condvar, Mutex, RwLock};
use mooncake_base::{Clock, DeviceUsage, Error, ErrorCode, Moment, Result};
use mooncake_os::threads::Threads;
use mooncake_verbs::{
    AsyncEvent, Completion, CompletionChannel, CompletionQueue, ConnectionSettings, Context,
    Device, ProtectionDomain, QueuePair, QueuePairLimits,
};

use crate::{
    address::Address, endpoints::Endpoints, load::Load, send_queue::SendQueue,
    settings::RdmaSettings, usage::Counters,
};

/// How long the thread looks for completions without sleeping after it found the last.
const SPIN_TIME: Duration = Duration::from_micros(100);

/// How long the thread sleeps at most. It is woken for completions and events.
const SLEEP_MAX: Duration = Duration::from_millis(100);

/// How often the thread of a busy device looks for events.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// How often a device that is not active is asked whether it can be used: its port may become active, or get
/// its address back, without an event.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// Reads of a queue pair in flight, as many as upstream's engines have.
const READS_MAX: u8 = 16;

/// An opened device.
#[derive(Debug)]
pub(crate) struct Nic {
    index: usize,
    name: String,
    context: Arc<Context>,
    domain: Arc<ProtectionDomain>,
    channel: Arc<CompletionChannel>,
    /// Replaced after it has failed.
    completions: RwLock<Arc<CompletionQueue>>,
    /// The completion queue has failed, and could not be replaced yet.
    has_lost_completions: AtomicBool,
    address: RwLock<Arc<Address>>,
    settings: RdmaSettings,
    /// Told of each change of the address.
    changes: Arc<Changes>,
    limits: QueuePairLimits,
    region_bytes_max: u64,
    /// The queues by slot. A slot is used again after its queue is gone.
    queues: RwLock<Vec<Option<Arc<SendQueue>>>>,
    /// Places for requests in flight, so that the completion queue cannot overrun.
    places: AtomicU32,
    is_active: AtomicBool,
    /// The completion queue is being made anew, after which the device is used again.
    is_renewing: AtomicBool,
    /// When the device was last asked whether it can be used.
    asked: Mutex<Option<Instant>>,
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

/// Who is told that an address of a device has changed.
#[derive(Default)]
pub(crate) struct Changes(Mutex<Option<Box<dyn Fn() + Send + Sync>>>);

impl Changes {
    /// Calls a function after each change. It must not block: completions wait for it.
    pub(crate) fn observe(&self, observer: impl Fn() + Send + Sync + 'static) {
        *self.0.lock() = Some(Box::new(observer));
    }

    fn report(&self) {
        if let Some(observer) = &*self.0.lock() {
            observer();
        }
    }
}

impl std::fmt::Debug for Changes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Changes").finish_non_exhaustive()
    }
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
    threads: Threads,
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
        changes: &Arc<Changes>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        let failed = |source| failure(device.name(), source);
        let context = device.open().map_err(failed)?;
        let port = context.port(settings.port).map_err(failed)?;
        let entries = context.gids(settings.port).map_err(failed)?;
        let limits = context.limits().map_err(failed)?;
        let connection = ConnectionSettings {
            port: settings.port,
            partition_index: settings.partition_index,
            service_level: settings.service_level,
            traffic_class: settings.traffic_class,
            outgoing_reads: limits.outgoing_reads_max.clamp(1, READS_MAX),
            incoming_reads: limits.incoming_reads_max.clamp(1, READS_MAX),
            ..ConnectionSettings::default()
        };
        let address = Address::first(device.name(), &port, entries, settings, connection)?;
        let depth = settings.device_depth.min(limits.completions_max);
        let channel = CompletionChannel::new(&context).map_err(failed)?;
        let vector = completion_vector(index);
        let completions = CompletionQueue::with_channel(&channel, depth, vector).map_err(failed)?;
        Ok(Self {
            index,
            name: device.name().to_owned(),
            domain: ProtectionDomain::new(&context).map_err(failed)?,
            address: RwLock::new(Arc::new(address)),
            settings: settings.clone(),
            changes: Arc::clone(changes),
            limits: QueuePairLimits {
                requests: settings.queue_depth.min(limits.requests_max).min(depth),
                inline_bytes: settings.inline_bytes,
                ..QueuePairLimits::default()
            },
            region_bytes_max: limits.region_bytes_max,
            context,
            channel,
            completions: RwLock::new(completions),
            has_lost_completions: AtomicBool::new(false),
            queues: RwLock::default(),
            places: AtomicU32::new(depth),
            is_active: AtomicBool::new(true),
            is_renewing: AtomicBool::new(false),
            asked: Mutex::default(),
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
        QueuePair::new(&self.domain, &self.completions(), self.limits).map_err(|source| {
            Error::new(ErrorCode::TRANSFER_FAIL, "no queue pair can be made")
                .with("device", &self.name)
                .caused_by(source)
        })
    }

    /// Puts a queue pair that was connected from an address into the table, so that its completions are
    /// found.
    pub(crate) fn add_queue(
        &self,
        queue_pair: mooncake_verbs::ConnectedQueuePair,
        load: &Arc<Load>,
        address: &Address,
    ) -> Arc<SendQueue> {
        let mut queues = self.queues.write();
        let slot = queues.iter().position(Option::is_none).unwrap_or(queues.len());
        let number = u32::try_from(slot).expect("fewer queue pairs than a device can have");
        let queue = Arc::new(SendQueue::new(queue_pair, number, Arc::clone(load)));
        if slot == queues.len() {
            queues.push(None);
        }
        queues[slot] = Some(Arc::clone(&queue));
        drop(queues);
        // The address may have changed while the two ends were connected: after this look, who changes it
        // finds the queue.
        if self.address().generation != address.generation {
            queue.fail();
        }
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

    /// Handles the events that have arrived, and asks a device that is not active whether it can be used.
    fn look(&self) -> mooncake_verbs::Result<()> {
        while let Some(event) = self.context.next_event(Duration::ZERO)? {
            self.handle_event(event);
        }
        if !self.is_active() {
            self.ask_again(Instant::now());
        }
        Ok(())
    }

    fn handle_event(&self, event: AsyncEvent) {
        tracing::debug!(device = self.name, ?event, "an event of an RDMA device");
        match event {
            AsyncEvent::PortError(port) if port == self.settings.port => {
                self.deactivate("the link of an RDMA device is down");
            }
            AsyncEvent::PortActive(port) | AsyncEvent::AddressChange(port)
                if port == self.settings.port =>
            {
                self.refresh();
            }
            AsyncEvent::CompletionQueueError => self.replace_completions(),
            AsyncEvent::DeviceFatal => self.deactivate("an RDMA device failed or was removed"),
            AsyncEvent::QueuePairError(number) => {
                let queues = self.queues.read();
                let found = queues.iter().flatten().find(|queue| queue.number() == number);
                found.cloned().iter().for_each(|queue| queue.fail());
            }
            _ => {}
        }
    }

    /// Asks the port for its state and its addresses, and uses the device accordingly.
    fn refresh(&self) {
        if self.has_lost_completions.load(Ordering::Acquire) {
            self.replace_completions();
            return;
        }
        match self.next_address() {
            Ok(next) => self.use_address(next),
            Err(error) => {
                tracing::debug!(device = self.name, %error, "an RDMA device cannot be used");
                self.deactivate("an RDMA device lost its link or its address");
            }
        }
    }

    fn next_address(&self) -> Result<Address> {
        let failed = |source| failure(&self.name, source);
        let port = self.context.port(self.settings.port).map_err(failed)?;
        let entries = self.context.gids(self.settings.port).map_err(failed)?;
        self.address().again(&self.name, &port, entries, &self.settings)
    }

    /// Uses the device by an address from now on. Connections from another one are given up.
    fn use_address(&self, next: Address) {
        let before = self.address();
        if before.generation != next.generation {
            tracing::warn!(
                device = self.name,
                from = %before.gid(),
                to = %next.gid(),
                lid = next.lid,
                "the address of an RDMA device changed"
            );
            *self.address.write() = Arc::new(next);
            self.changes.report();
            self.fail_queues();
        }
        if !self.is_active.swap(true, Ordering::AcqRel) {
            tracing::info!(device = self.name, "an RDMA device is used again");
        }
    }

    /// Makes the completion queue anew after it has failed, and gives up all connections: nothing reports
    /// what they have in flight.
    fn replace_completions(&self) {
        self.has_lost_completions.store(true, Ordering::Release);
        self.is_renewing.store(true, Ordering::Release);
        self.deactivate("the completion queue of an RDMA device failed");
        let vector = completion_vector(self.index);
        match CompletionQueue::with_channel(&self.channel, self.depth, vector) {
            Ok(made) => {
                let before = self.address();
                // Queue pairs that are being connected report to the old queue.
                let next = Address { generation: before.generation + 1, ..Address::clone(&before) };
                *self.completions.write() = made;
                *self.address.write() = Arc::new(next);
                self.has_lost_completions.store(false, Ordering::Release);
                let queues: Vec<_> = self.queues.read().iter().flatten().cloned().collect();
                queues.iter().for_each(|queue| queue.destroy(self));
                self.refresh();
            }
            Err(error) => {
                tracing::debug!(device = self.name, %error, "no completion queue can be made");
            }
        }
        self.is_renewing.store(false, Ordering::Release);
    }

    /// Asks a device that is not active, now and then, whether it can be used.
    fn ask_again(&self, now: Instant) {
        let mut asked = self.asked.lock();
        if asked.is_none_or(|before| now - before >= RETRY_INTERVAL) {
            *asked = Some(now);
            drop(asked);
            self.refresh();
        }
    }

    /// Uses the device no more until its link is up: what is in flight goes over other devices.
    fn deactivate(&self, reason: &str) {
        if self.is_active.swap(false, Ordering::AcqRel) {
            self.counters.count_link_failure();
            tracing::warn!(device = self.name, "{reason}");
        }
        self.fail_queues();
    }

    /// Fails all connections: what is in flight goes over other devices.
    fn fail_queues(&self) {
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

    /// Returns how peers reach the device now.
    pub(crate) fn address(&self) -> Arc<Address> {
        Arc::clone(&self.address.read())
    }

    fn completions(&self) -> Arc<CompletionQueue> {
        Arc::clone(&self.completions.read())
    }

    /// Returns how long a connection may be without a completion: as long as the settings say, and not
    /// shorter than a few slices take on the link.
    pub(crate) fn stall_timeout(&self) -> Duration {
        let slice_bytes =
            u64::from(self.settings.slice_bytes) + u64::from(self.settings.slice_tail_bytes);
        let slices = (slice_bytes * 4 * 1000).checked_div(self.link_rate).unwrap_or(0);
        self.settings.stall_timeout.max(Duration::from_millis(slices))
    }

    pub(crate) fn region_bytes_max(&self) -> u64 {
        self.region_bytes_max
    }

    /// Returns whether the device is not active for as long as its completion queue is made anew.
    pub(crate) fn is_renewing(&self) -> bool {
        self.is_renewing.load(Ordering::Acquire)
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
    pub(crate) fn start(nic: &Arc<Nic>, endpoints: &Arc<Endpoints>) -> Result<Self> {
        let (polled, endpoints) = (Arc::clone(nic), Arc::clone(endpoints));
        let threads = Threads::new(1);
        threads
            .spawn(&format!("rdma-{}", nic.name), move || poll(&polled, &endpoints))
            .map_err(|source| Error::internal("no thread can be started").caused_by(source))?;
        Ok(Self { nic: Arc::clone(nic), threads })
    }

    pub(crate) fn nic(&self) -> &Arc<Nic> {
        &self.nic
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        self.nic.is_stopping.store(true, Ordering::Release);
        self.threads.join();
    }
}

/// Takes completions and events until the poller is dropped. Looks without sleeping while completions
/// arrive, and sleeps when none has for a moment.
fn poll(nic: &Nic, endpoints: &Endpoints) {
    let mut completions = nic.completions();
    let mut last_found = Instant::now();
    let mut last_look = last_found;
    while !nic.is_stopping.load(Ordering::Acquire) {
        let mut has_slept = false;
        let polled = match completions.poll(|completion| nic.complete(&completion)) {
            Ok(0) if last_found.elapsed() < SPIN_TIME => {
                std::hint::spin_loop();
                continue;
            }
            Ok(0) => {
                has_slept = true;
                sleep(nic, &completions)
            }
            Ok(_) => Ok(()),
            Err(error) => {
                nic.replace_completions();
                completions = nic.completions();
                Err(error)
            }
        };
        last_found = Instant::now();
        let looked = if has_slept || last_found - last_look >= LOOK_INTERVAL {
            last_look = last_found;
            let looked = nic.look();
            completions = nic.completions();
            endpoints.check_idle(nic);
            looked
        } else {
            Ok(())
        };
        if let Err(error) = polled.and(looked) {
            nic.deactivate("an RDMA device cannot be waited for");
            tracing::debug!(device = nic.name, %error, "waiting failed");
            std::thread::park_timeout(SLEEP_MAX);
        }
    }
}

/// Sleeps until there is a completion or an event.
fn sleep(nic: &Nic, completions: &CompletionQueue) -> mooncake_verbs::Result<()> {
    completions.arm()?;
    // What arrived before the queue was armed causes no wake-up.
    if completions.poll(|completion| nic.complete(&completion))? == 0 {
        nic.channel.wait_or_event(SLEEP_MAX)?;
    }
    Ok(())
}

/// Returns the interrupt of a device: those of processes and devices go to different processors.
fn completion_vector(index: usize) -> u32 {
    std::process::id().wrapping_add(u32::try_from(index).unwrap_or(0))
}
