//! The RDMA devices of an engine, the memory that is registered with them, and their connections.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{self, AtomicBool},
    },
    time::Duration,
};

use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, DeviceUsage, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_verbs::{Access, ForkSafety, Library, Operation, Ordering, ProtectionDomain};

use crate::{
    endpoint::{Endpoint, Identity},
    endpoints::Endpoints,
    hello::{Hello, format_gid, split_nic_path},
    near_devices::NearDevices,
    nic::{Changes, Nic, Poller},
    peer_memory::{DeviceDescription, PeerMemory},
    rails::Rails,
    registration::{
        Registrations,
        local_memory::LocalMemory,
        rule::{Location, MemorySource, RegistrationRule},
    },
    settings::RdmaSettings,
    slices::{MemoryRange, SliceRule},
};

/// The RDMA devices of an engine.
#[derive(Debug)]
pub struct Devices {
    settings: RdmaSettings,
    /// Name of the engine in the paths of its devices.
    server: String,
    identity: Arc<Identity>,
    // Dropped before what their threads use.
    pollers: Vec<Poller>,
    registrations: Registrations,
    endpoints: Arc<Endpoints>,
    changes: Arc<Changes>,
    /// Published names of memory of other devices, with the names of the devices near it.
    near_devices: Mutex<BTreeMap<String, Vec<String>>>,
    region_bytes_max: u64,
    is_closed: AtomicBool,
    clock: Arc<dyn Clock>,
}

impl Devices {
    /// Opens the devices that the settings name and whose ports are active.
    ///
    /// # Errors
    /// A setting is out of range, the kernel does not list its devices, or no device can be used; the
    /// message names why each was left out.
    pub fn open(
        library: &Arc<Library>,
        settings: RdmaSettings,
        server: &str,
        engine: &str,
    ) -> Result<Arc<Self>> {
        Self::open_with_clock(library, settings, server, engine, SystemClock::shared())
    }

    /// Opens the devices with a clock for deadlines, pauses and measurements; see [`Self::open`].
    ///
    /// # Errors
    /// Those of [`Self::open`].
    pub fn open_with_clock(
        library: &Arc<Library>,
        settings: RdmaSettings,
        server: &str,
        engine: &str,
        clock: Arc<dyn Clock>,
    ) -> Result<Arc<Self>> {
        settings.check()?;
        let listed = library.devices().map_err(|source| {
            Error::new(ErrorCode::INVALID_PARAMS, "the RDMA devices cannot be listed")
                .caused_by(source)
        })?;
        let mut nics: Vec<Nic> = Vec::new();
        let (mut left_out, mut excluded) = (Vec::new(), Vec::new());
        let mut region_bytes_max = settings.region_bytes_max;
        let changes = Arc::<Changes>::default();
        for device in &listed {
            if let Some(reason) = settings.exclusion(device.name()) {
                excluded.push(format!("{} {reason}", device.name()));
                continue;
            }
            match Nic::open(nics.len(), device, &settings, &changes, Arc::clone(&clock)) {
                Ok(nic) => {
                    region_bytes_max = region_bytes_max.min(nic.region_bytes_max());
                    nics.push(nic);
                }
                Err(error) => left_out.push(error.to_string()),
            }
        }
        for wanted in &settings.devices {
            if !listed.iter().any(|device| device.name() == wanted) {
                left_out.push(format!("there is no device {wanted}"));
            }
        }
        if nics.is_empty() {
            left_out.extend(excluded);
            let reasons = if left_out.is_empty() {
                "this machine has none".to_owned()
            } else {
                left_out.join("; ")
            };
            return Err(Error::new(ErrorCode::INVALID_PARAMS, "no RDMA device can be used")
                .with("reasons", reasons));
        }
        left_out.iter().for_each(|reason| tracing::warn!("{reason}"));
        if library.fork_safety() == ForkSafety::Unsafe {
            tracing::warn!(
                "a fork of this process would move registered memory away from RDMA devices: start \
                 other processes before, set RDMAV_FORK_SAFE=1, or use Linux 5.12 or newer"
            );
        }
        let endpoints = Arc::<Endpoints>::default();
        let start = |nic: Nic| Poller::start(&Arc::new(nic), &endpoints);
        Ok(Arc::new(Self {
            settings,
            server: server.to_owned(),
            identity: Identity::new(engine.to_owned()),
            pollers: nics.into_iter().map(start).collect::<Result<_>>()?,
            registrations: Registrations::default(),
            endpoints,
            changes,
            near_devices: Mutex::default(),
            region_bytes_max,
            is_closed: AtomicBool::new(false),
            clock,
        }))
    }

    /// Registers a range at a location, such as `cpu:0`, with each device.
    ///
    /// # Errors
    /// A device refused; the message says why. Nothing is registered then.
    ///
    /// # Safety
    /// Until the range is deregistered it stays mapped, and no Rust reference exists to it: peers read and
    /// write it at any time.
    pub unsafe fn register(&self, base: u64, length: u64, location: &str) -> Result<()> {
        // SAFETY: by the contract of the function.
        unsafe {
            let location = Location { name: location, device: None };
            self.register_from(MemorySource::Pages, (base, length), location)
        }
    }

    /// Registers a range whose bytes devices get at as `source` says; see [`Self::register`].
    ///
    /// # Errors
    /// Those of [`Self::register`].
    ///
    /// # Safety
    /// That of [`Self::register`].
    pub unsafe fn register_from(
        &self,
        source: MemorySource<'_>,
        range: (u64, u64),
        location: Location<'_>,
    ) -> Result<()> {
        let rule = RegistrationRule { source, ..self.registration_rule() };
        let names = self.names_near(location);
        let near = NearDevices::named(self.nics().map(|nic| nic.name()), names);
        // SAFETY: by the contract of the function.
        unsafe { self.registrations.register(&self.domains(), range, near, rule) }?;
        if location.device.is_some() {
            self.near_devices.lock().insert(location.name.to_owned(), names.to_vec());
        }
        Ok(())
    }

    /// Returns the names of the devices near a location. Where a device is known, its place on the bus
    /// counts: names of its memory follow an order that may differ between processes.
    fn names_near(&self, location: Location<'_>) -> &[String] {
        let by_place = location.device.and_then(|device| self.settings.near_gpus.get(device));
        let names = by_place.or_else(|| self.settings.near.get(location.name));
        names.map_or(&[][..], Vec::as_slice)
    }

    /// Calls a function after each change of an address that [`Self::describe`] tells. It must not block.
    pub fn observe(&self, observer: impl Fn() + Send + Sync + 'static) {
        self.changes.observe(observer);
    }

    /// Ends the registration of the range that begins at `base`, if there is one. When this succeeds no
    /// device accesses the range any more.
    ///
    /// # Errors
    /// A transfer of this process still used the range after the time.
    pub fn deregister(&self, base: u64, timeout: Duration) -> Result<()> {
        self.registrations.deregister(base, timeout)
    }

    /// Returns whether memory of CUDA devices is registered.
    pub fn uses_device_memory(&self) -> bool {
        self.settings.uses_device_memory
    }

    /// Returns whether each byte of a range of this process is registered.
    pub fn holds(&self, address: u64, length: u64) -> bool {
        self.memory().covers(address, length)
    }

    /// Returns the devices, for a segment descriptor.
    pub fn describe(&self) -> Vec<DeviceDescription> {
        let describe = |nic: &Arc<Nic>| {
            let address = nic.address();
            let (name, gid) = (nic.name().to_owned(), format_gid(address.gid()));
            DeviceDescription { name, gid, lid: address.lid }
        };
        self.nics().map(describe).collect()
    }

    /// Returns the use of each device.
    pub fn usage(&self) -> Vec<DeviceUsage> {
        self.nics().map(|nic| nic.usage()).collect()
    }

    /// Returns the names of the opened devices near each location of memory, where some are nearer than
    /// others.
    pub fn near(&self) -> BTreeMap<String, Vec<String>> {
        let opened = |name: &String| self.nics().any(|nic| nic.name() == name);
        let mut near = self.settings.near.clone();
        near.extend(self.near_devices.lock().clone());
        let rows = near.into_iter().map(|(location, mut names)| {
            names.retain(|name| opened(name));
            (location, names)
        });
        rows.filter(|(_, names): &(_, Vec<_>)| !names.is_empty()).collect()
    }

    /// Returns the registrations of the range that begins at `base`, for a segment descriptor: first
    /// address, length, and the keys of the devices.
    pub fn keys(&self, base: u64) -> Vec<(u64, u64, Vec<u32>)> {
        let keys = self.registrations.keys(base).into_iter();
        keys.map(|(MemoryRange { address, length }, keys)| (address, length, keys)).collect()
    }

    /// Answers a message of a peer that connects devices.
    pub fn answer(&self, body: &[u8]) -> Vec<u8> {
        let answer = match Hello::from_json(body) {
            Ok(request) => self.answer_request(&request),
            Err(error) => Hello::refusal(error.to_string()),
        };
        answer.to_json()
    }

    fn answer_request(&self, request: &Hello) -> Hello {
        if self.is_closed.load(atomic::Ordering::Acquire) {
            return Hello::refusal("the engine is closed");
        }
        let Some((server, device)) = split_nic_path(&request.peer_nic_path) else {
            let path = &request.peer_nic_path;
            return Hello::refusal(format!("Invalid peer_nic_path in handshake: {path}"));
        };
        let Some(nic) = self.nics().find(|nic| server == self.server && nic.name() == device)
        else {
            let text = "Local RDMA context not found for handshake NIC";
            return Hello::refusal(format!("{text}: {device}"));
        };
        if !nic.is_active() {
            let peer = &request.local_nic_path;
            return Hello::refusal(format!(
                "Local RDMA endpoint unavailable for {device} <- {peer}"
            ));
        }
        self.endpoint(nic.index(), &request.local_nic_path).answer(request)
    }

    /// Ends all connections and registrations: no peer reaches memory of this process any more. Messages of
    /// peers are refused from now on. Idempotent.
    pub fn close(&self) {
        self.is_closed.store(true, atomic::Ordering::Release);
        self.endpoints.close();
        self.registrations.clear();
    }

    /// Returns the endpoint of an own device and one of a peer.
    pub(crate) fn endpoint(&self, nic: usize, peer_path: &str) -> Arc<Endpoint> {
        let own = self.pollers[nic].nic();
        let count = self.settings.queue_pairs;
        let make = || Endpoint::new(own, &self.server, peer_path, count, &self.identity);
        self.endpoints.get_or_add(nic, peer_path, self.settings.connections_max, make)
    }

    /// Returns the number of pairs of own devices and those of peers that are kept.
    pub fn pairs(&self) -> usize {
        self.endpoints.len()
    }

    /// Returns the pairs of own and remote devices over which a peer is reached.
    pub(crate) fn rails(&self, peer: &PeerMemory) -> Rails {
        let own: Vec<_> = self.nics().map(|nic| nic.name()).collect();
        let remote: Vec<_> = peer.devices.iter().map(|device| device.name.as_str()).collect();
        Rails::between(&own, &remote, &peer.near, &self.settings.affinity)
    }

    pub(crate) fn memory(&self) -> Arc<LocalMemory> {
        self.registrations.memory()
    }

    /// Returns registered memory and further ranges, which are registered while the result lives, for the
    /// own requests of an operation: peers have no access. The ranges may be memory of another device.
    ///
    /// # Safety
    /// That of [`Self::register`], while the result lives.
    pub(crate) unsafe fn memory_with(
        &self,
        memory: &LocalMemory,
        ranges: Vec<MemoryRange>,
        operation: Operation,
    ) -> LocalMemory {
        let access = match operation {
            // The memory may be read-only.
            Operation::Write => Access::Source,
            Operation::Read => Access::Destination,
        };
        let source = MemorySource::PeerMemory;
        let rule = RegistrationRule { access, source, ..self.registration_rule() };
        // SAFETY: by the contract of the function.
        unsafe { memory.with_temporary(&self.domains(), ranges, rule) }
    }

    fn domains(&self) -> Vec<Arc<ProtectionDomain>> {
        self.nics().map(|nic| Arc::clone(nic.domain())).collect()
    }

    fn registration_rule(&self) -> RegistrationRule<'static> {
        let ordering = if self.settings.is_relaxed { Ordering::Relaxed } else { Ordering::Strict };
        RegistrationRule {
            bytes_max: self.region_bytes_max,
            ordering,
            access: Access::RemoteReadWrite,
            source: MemorySource::Pages,
        }
    }

    pub(crate) fn slice_rule(&self) -> SliceRule {
        let bytes = self.settings.slice_bytes;
        let tail = self.settings.slice_tail_bytes.min(bytes);
        SliceRule { bytes, tail, tries: self.settings.tries }
    }

    pub(crate) fn now(&self) -> Moment {
        self.clock.now()
    }

    pub(crate) fn settings(&self) -> &RdmaSettings {
        &self.settings
    }

    fn nics(&self) -> impl Iterator<Item = &Arc<Nic>> {
        self.pollers.iter().map(Poller::nic)
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        self.close();
    }
}
