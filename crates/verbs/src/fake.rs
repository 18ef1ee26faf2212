//! A simulated fabric: RDMA devices of one process whose links, delays and failures a test controls.
//!
//! [`Fabric::library`] has the function table of libibverbs over simulated devices, so that everything
//! above the table is the code that runs on real ones. Requests between two queue pairs are copies within
//! the process. Time is moved by hand: with the default rates a request completes when it is posted.

mod exported;
mod functions;
mod objects;
mod queues;

use std::{
    cell::RefCell,
    collections::HashMap,
    net::Ipv4Addr,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use rdma_sys::ibv_event_type;

use self::{
    objects::{ContextHandle, DeviceObject, Reporter},
    queues::{FakeQueuePair, Network, Queues},
};
use crate::{Gid, Library};

/// Simulated devices and the network between them.
#[derive(Debug)]
pub struct Fabric {
    state: Mutex<State>,
}

/// A simulated device.
#[derive(Debug, Clone)]
pub struct DeviceSettings {
    /// Name, such as `fake0`.
    pub name: String,
    /// Address of the only port.
    pub address: Ipv4Addr,
    /// Time from the start of a request to its completion.
    pub latency: Duration,
    /// Bytes that the device sends per second; None is no limit.
    pub bytes_per_second: Option<u64>,
    /// Maximum length of a registration.
    pub region_bytes_max: u64,
    /// Bytes that a request may carry in itself; more are refused.
    pub inline_bytes_max: u32,
    /// Reads of a peer that a queue pair serves at a time.
    pub reads_max: u8,
    /// Kind of the addresses, by its number in ibverbs: 2 is RoCE v2.
    pub gid_kind: u32,
}

/// All that calls of several threads share. Locked once per call of the library.
#[derive(Debug, Default)]
struct State {
    now: Duration,
    devices: Vec<DeviceState>,
    queues: Queues,
    /// Completion queues with a channel, by number.
    reporters: HashMap<u32, Reporter>,
    /// The library keeps registered pages from children.
    is_fork_protected: bool,
    /// The kernel copies registered pages for a child.
    is_copied_on_fork: bool,
    /// Requests that were posted, and those that carried their bytes in themselves.
    requests: u64,
    inline_requests: u64,
}

/// A device and its contexts.
#[derive(Debug)]
struct DeviceState {
    settings: DeviceSettings,
    /// The object that the library hands out; its address never changes.
    object: Box<DeviceObject>,
    /// The address and its entry in the table of the port, if there is one.
    gid: Option<(u8, Gid)>,
    lid: u16,
    is_link_up: bool,
    is_removed: bool,
    /// When the device has sent everything that was posted.
    idle_from: Duration,
    bytes_sent: u64,
    contexts: Vec<ContextHandle>,
}

thread_local! {
    /// The fabric whose devices are listed: the function of the library takes no argument.
    static LISTED: RefCell<Option<Arc<Fabric>>> = const { RefCell::new(None) };
}

/// Runs `list` while `ibv_get_device_list` shows the devices of the fabric.
pub(crate) fn with_fabric<T>(fabric: &Arc<Fabric>, list: impl FnOnce() -> T) -> T {
    LISTED.with(|listed| listed.replace(Some(Arc::clone(fabric))));
    let result = list();
    LISTED.with(|listed| listed.replace(None));
    result
}

impl Fabric {
    /// Creates a fabric with devices that reach one another.
    pub fn new(devices: impl IntoIterator<Item = DeviceSettings>) -> Arc<Self> {
        Arc::new_cyclic(|fabric| {
            let device = |(index, settings)| DeviceState::new(settings, fabric.clone(), index);
            let devices = devices.into_iter().enumerate().map(device).collect();
            Self { state: Mutex::new(State { devices, ..State::default() }) }
        })
    }

    /// Creates a fabric of `count` devices `fake0`, `fake1` and so on, without delays.
    pub fn of(count: u8) -> Arc<Self> {
        Self::new((0..count).map(|index| DeviceSettings {
            name: format!("fake{index}"),
            address: Ipv4Addr::new(10, 77, 0, index + 1),
            ..DeviceSettings::default()
        }))
    }

    /// Returns the library whose devices are those of the fabric.
    pub fn library(self: &Arc<Self>) -> Arc<Library> {
        Library::fake(functions::table(), Arc::clone(self))
    }

    /// Moves the clock. Requests that are due complete; those of peers that could not be reached fail
    /// after their retries.
    pub fn advance(&self, time: Duration) {
        let mut state = self.lock();
        state.now += time;
        state.progress();
    }

    /// Returns the time since the fabric was created.
    pub fn now(&self) -> Duration {
        self.lock().now
    }

    /// Takes the link of a device down or up, and reports it to the contexts of the device.
    ///
    /// # Panics
    /// There is no such device.
    pub fn set_link(&self, device: usize, is_up: bool) {
        let mut state = self.lock();
        let found = &mut state.devices[device];
        found.is_link_up = is_up;
        found.report(if is_up {
            ibv_event_type::IBV_EVENT_PORT_ACTIVE
        } else {
            ibv_event_type::IBV_EVENT_PORT_ERR
        });
        state.progress();
    }

    /// Takes the link of a device down or up, without an event: some drivers report no port that is active
    /// again.
    ///
    /// # Panics
    /// There is no such device.
    pub fn set_link_silently(&self, device: usize, is_up: bool) {
        let mut state = self.lock();
        state.devices[device].is_link_up = is_up;
        state.progress();
    }

    /// Gives a device another address, at an entry of its table, or takes it away, and reports that.
    ///
    /// # Panics
    /// There is no such device.
    pub fn set_address(&self, device: usize, address: Option<(u8, Ipv4Addr)>) {
        let mut state = self.lock();
        let found = &mut state.devices[device];
        found.gid = address.map(|(index, address)| (index, mapped(address)));
        found.report(ibv_event_type::IBV_EVENT_GID_CHANGE);
        state.progress();
    }

    /// Gives the port of a device another identifier in its subnet, and reports that.
    ///
    /// # Panics
    /// There is no such device.
    pub fn set_lid(&self, device: usize, lid: u16) {
        let mut state = self.lock();
        let found = &mut state.devices[device];
        found.lid = lid;
        found.report(ibv_event_type::IBV_EVENT_LID_CHANGE);
        state.progress();
    }

    /// Makes the completion queues of a device overrun: they report nothing any more.
    ///
    /// # Panics
    /// There is no such device.
    pub fn fail_completions(&self, device: usize) {
        let mut state = self.lock();
        state.queues.fail_completions(device);
        state.devices[device].report(ibv_event_type::IBV_EVENT_CQ_ERR);
        state.progress();
    }

    /// Lets the kernel copy registered pages for a child of the process, as newer ones do.
    pub fn copy_on_fork(&self) {
        self.lock().is_copied_on_fork = true;
    }

    /// Returns whether the library keeps registered pages from children.
    pub fn is_fork_protected(&self) -> bool {
        self.lock().is_fork_protected
    }

    /// From now on a queue pair gets the lowest number that no other one has, as on some devices.
    pub fn reuse_numbers(&self) {
        self.lock().queues.reuses_numbers = true;
    }

    /// Returns the number of requests that were posted, of all queue pairs.
    pub fn requests_posted(&self) -> u64 {
        self.lock().requests
    }

    /// Returns the number of requests that carried their bytes in themselves.
    pub fn inline_requests(&self) -> u64 {
        self.lock().inline_requests
    }

    /// Removes a device: its requests are flushed, and its calls fail.
    ///
    /// # Panics
    /// There is no such device.
    pub fn remove(&self, device: usize) {
        let mut state = self.lock();
        let found = &mut state.devices[device];
        (found.is_removed, found.is_link_up) = (true, false);
        found.report(ibv_event_type::IBV_EVENT_DEVICE_FATAL);
        state.queues.fail_device(device);
        state.progress();
    }

    /// Returns the number of requests that are posted and not completed, of all queue pairs.
    pub fn requests_in_flight(&self) -> usize {
        self.lock().queues.requests_in_flight()
    }

    /// Returns the number of bytes of the requests that were posted to a device.
    ///
    /// # Panics
    /// There is no such device.
    pub fn bytes_sent(&self, device: usize) -> u64 {
        self.lock().devices[device].bytes_sent
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A test that panicked has failed already; the others of the process go on.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Completes what is due.
    fn progress(&mut self) {
        self.queues.progress(self.now, &self.devices);
        for completions in self.queues.take_events() {
            if let Some(reporter) = self.reporters.get(&completions) {
                reporter.report();
            }
        }
    }

    /// Returns when a request that a device starts now is done.
    fn due(&mut self, device: usize, bytes: u32) -> Duration {
        let now = self.now;
        let found = &mut self.devices[device];
        found.bytes_sent += u64::from(bytes);
        let start = found.idle_from.max(now);
        let rate = found.settings.bytes_per_second;
        let sending = rate.map_or(0.0, |rate| f64::from(bytes) / rate as f64);
        found.idle_from = start + Duration::from_secs_f64(sending);
        found.idle_from + found.settings.latency
    }
}

impl Network for Vec<DeviceState> {
    fn carries(&self, queue_pair: &FakeQueuePair) -> bool {
        let device = &self[queue_pair.device];
        let index = i32::from(queue_pair.gid_index);
        device.is_link_up && device.address(index) == Some(queue_pair.gid)
    }

    fn lid(&self, device: usize) -> u16 {
        self[device].lid
    }
}

fn mapped(address: Ipv4Addr) -> Gid {
    Gid(address.to_ipv6_mapped().octets())
}

impl DeviceState {
    fn new(settings: DeviceSettings, fabric: Weak<Fabric>, index: usize) -> Self {
        let gid = Some((0, mapped(settings.address)));
        Self {
            object: Box::new(DeviceObject::new(fabric, index, &settings.name)),
            settings,
            gid,
            lid: 0,
            is_link_up: true,
            is_removed: false,
            idle_from: Duration::ZERO,
            bytes_sent: 0,
            contexts: Vec::new(),
        }
    }

    /// Returns the address in an entry of the table of the port.
    fn address(&self, index: i32) -> Option<Gid> {
        self.gid.filter(|(used, _)| i32::from(*used) == index).map(|(_, gid)| gid)
    }

    fn report(&self, event: ibv_event_type) {
        for context in &self.contexts {
            context.report(event);
        }
    }
}

impl Default for DeviceSettings {
    fn default() -> Self {
        Self {
            name: "fake0".to_owned(),
            address: Ipv4Addr::new(10, 77, 0, 1),
            latency: Duration::ZERO,
            bytes_per_second: None,
            region_bytes_max: 1 << 40,
            inline_bytes_max: 64,
            reads_max: 16,
            gid_kind: 2,
        }
    }
}
