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
    queues::Queues,
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
}

/// All that calls of several threads share. Locked once per call of the library.
#[derive(Debug, Default)]
struct State {
    now: Duration,
    devices: Vec<DeviceState>,
    queues: Queues,
    /// Completion queues with a channel, by number.
    reporters: HashMap<u32, Reporter>,
}

/// A device and its contexts.
#[derive(Debug)]
struct DeviceState {
    settings: DeviceSettings,
    /// The object that the library hands out; its address never changes.
    object: Box<DeviceObject>,
    gid: Gid,
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
        found.report(match is_up {
            true => ibv_event_type::IBV_EVENT_PORT_ACTIVE,
            false => ibv_event_type::IBV_EVENT_PORT_ERR,
        });
        state.progress();
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
        let devices = &self.devices;
        let is_up = |device: usize| devices[device].is_link_up;
        self.queues.progress(self.now, is_up);
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

impl DeviceState {
    fn new(settings: DeviceSettings, fabric: Weak<Fabric>, index: usize) -> Self {
        let gid = Gid(settings.address.to_ipv6_mapped().octets());
        Self {
            object: Box::new(DeviceObject::new(fabric, index, &settings.name)),
            settings,
            gid,
            is_link_up: true,
            is_removed: false,
            idle_from: Duration::ZERO,
            bytes_sent: 0,
            contexts: Vec::new(),
        }
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
        }
    }
}
