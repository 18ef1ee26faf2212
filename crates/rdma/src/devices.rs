//! The RDMA devices of an engine, the memory that is registered with them, and their connections.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc,
        atomic::{self, AtomicBool},
    },
    time::Duration,
};

use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_verbs::{Library, Ordering, ProtectionDomain};

use crate::{
    endpoint::{Endpoint, Identity},
    hello::{Hello, format_gid, split_nic_path},
    link::{PeerExchange, PeerLink},
    near_devices::NearDevices,
    nic::{Nic, Poller},
    peer_memory::{DeviceDescription, PeerDescription, PeerMemory},
    registration::{LocalMemory, MemorySource, RegistrationRule, Registrations},
    settings::RdmaSettings,
    slices::{MemoryRange, SliceRule},
    usage::DeviceUsage,
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
    /// By own device and path of the peer's.
    endpoints: Mutex<HashMap<(usize, String), Arc<Endpoint>>>,
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
        Self::open_with_clock(library, settings, (server, engine), SystemClock::shared())
    }

    /// Opens the devices with a clock for deadlines, pauses and measurements; see [`Self::open`], which
    /// takes the names of server and engine separately.
    ///
    /// # Errors
    /// Those of [`Self::open`].
    pub fn open_with_clock(
        library: &Arc<Library>,
        settings: RdmaSettings,
        (server, engine): (&str, &str),
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
        for device in &listed {
            if let Some(reason) = settings.exclusion(device.name()) {
                excluded.push(format!("{} {reason}", device.name()));
                continue;
            }
            match Nic::open(nics.len(), device, &settings, Arc::clone(&clock)) {
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
            let reasons = match left_out.is_empty() {
                true => "this machine has none".to_owned(),
                false => left_out.join("; "),
            };
            return Err(Error::new(ErrorCode::INVALID_PARAMS, "no RDMA device can be used")
                .with("reasons", reasons));
        }
        left_out.iter().for_each(|reason| tracing::warn!("{reason}"));
        let start = |nic: Nic| Poller::start(&Arc::new(nic));
        Ok(Arc::new(Self {
            settings,
            server: server.to_owned(),
            identity: Identity::new(engine.to_owned()),
            pollers: nics.into_iter().map(start).collect::<Result<_>>()?,
            registrations: Registrations::default(),
            endpoints: Mutex::default(),
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
        unsafe { self.register_from(MemorySource::Pages, (base, length), location) }
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
        location: &str,
    ) -> Result<()> {
        let rule = RegistrationRule { source, ..self.registration_rule() };
        let names = self.settings.near.get(location).map_or(&[][..], Vec::as_slice);
        let near = NearDevices::named(self.nics().map(|nic| nic.name()), names);
        // SAFETY: by the contract of the function.
        unsafe { self.registrations.register(&self.domains(), range, near, rule) }
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
        self.nics()
            .map(|nic| DeviceDescription {
                name: nic.name().to_owned(),
                gid: format_gid(nic.gid()),
                lid: nic.lid(),
            })
            .collect()
    }

    /// Returns the use of each device.
    pub fn usage(&self) -> Vec<DeviceUsage> {
        self.nics().map(|nic| nic.usage()).collect()
    }

    /// Returns the names of the opened devices near each location of memory, where some are nearer than
    /// others.
    pub fn near(&self) -> BTreeMap<String, Vec<String>> {
        let opened = |name: &String| self.nics().any(|nic| nic.name() == name);
        let rows = self.settings.near.iter().map(|(location, names)| {
            (location.clone(), names.iter().filter(|name| opened(name)).cloned().collect())
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
        let endpoints = std::mem::take(&mut *self.endpoints.lock());
        endpoints.values().for_each(|endpoint| endpoint.disconnect());
        self.registrations.clear();
    }

    /// Makes a link to a peer. `exchange` sends a message to the handshake socket of the peer.
    ///
    /// # Errors
    /// The peer has published no device, or what it has published is contradictory.
    pub fn link(
        self: &Arc<Self>,
        published: &PeerDescription,
        exchange: PeerExchange,
    ) -> Result<PeerLink> {
        PeerLink::new(Arc::clone(self), published, exchange)
    }

    /// Returns the endpoint of an own device and one of a peer.
    pub(crate) fn endpoint(&self, nic: usize, peer_path: &str) -> Arc<Endpoint> {
        let mut endpoints = self.endpoints.lock();
        let key = (nic, peer_path.to_owned());
        if let Some(endpoint) = endpoints.get(&key) {
            return Arc::clone(endpoint);
        }
        let oldest = self.excess(&endpoints);
        let oldest = oldest.and_then(|oldest| endpoints.remove(&oldest));
        let own = self.pollers[nic].nic();
        let count = self.settings.queue_pairs;
        let endpoint = Endpoint::new(own, &self.server, peer_path, count, &self.identity);
        let endpoint = Arc::new(endpoint);
        endpoints.insert(key, Arc::clone(&endpoint));
        drop(endpoints);
        // Destroying queue pairs takes a while.
        drop(oldest);
        endpoint
    }

    /// Returns the endpoint that was connected first, if there are as many as there may be.
    fn excess(
        &self,
        endpoints: &HashMap<(usize, String), Arc<Endpoint>>,
    ) -> Option<(usize, String)> {
        if endpoints.len() < self.settings.connections_max {
            return None;
        }
        let unused = endpoints.iter().filter(|(_, endpoint)| Arc::strong_count(endpoint) == 1);
        let oldest = unused.min_by_key(|(_, endpoint)| endpoint.connected_since())?;
        Some(oldest.0.clone())
    }

    /// Returns the pairs of own and remote devices over which a peer is reached, and how many of the first
    /// are connected from the start: one for each device, and those that the settings prefer.
    pub(crate) fn rails(&self, peer: &PeerMemory) -> (Vec<(usize, usize)>, usize) {
        let own = self.pollers.len();
        let remote_count = peer.devices.len();
        let far = (0..remote_count).filter(|remote| !peer.near.contains(remote));
        let remotes: Vec<_> = peer.near.iter().copied().chain(far).collect();
        let affinity = &self.settings.affinity;
        let mut rails = Vec::new();
        for (local, nic) in self.nics().enumerate() {
            let prefers =
                |remote: &&usize| affinity.prefers(nic.name(), &peer.devices[**remote].name);
            rails.extend(remotes.iter().filter(prefers).map(|remote| (local, *remote)));
        }
        // One pair for each device that has no preferred one.
        let rounds = 0..own.max(remote_count);
        let preferred = rails.clone();
        for (local, remote) in rounds.map(|step| (step % own, remotes[step % remote_count])) {
            if !preferred.iter().any(|pair| pair.0 == local) {
                rails.push((local, remote));
            }
        }
        let primary = rails.len();
        // Then the other combinations, for when devices fail.
        for shift in 0..remote_count {
            for local in 0..own {
                let pair = (local, remotes[(local + shift) % remote_count]);
                if !rails.contains(&pair) {
                    rails.push(pair);
                }
            }
        }
        (rails, primary)
    }

    pub(crate) fn memory(&self) -> Arc<LocalMemory> {
        self.registrations.memory()
    }

    /// Returns registered memory and further ranges, which are registered while the result lives.
    ///
    /// # Safety
    /// That of [`Self::register`], while the result lives.
    pub(crate) unsafe fn memory_with(
        &self,
        memory: &LocalMemory,
        ranges: Vec<MemoryRange>,
    ) -> LocalMemory {
        // SAFETY: by the contract of the function.
        unsafe { memory.with_temporary(&self.domains(), ranges, self.registration_rule()) }
    }

    fn domains(&self) -> Vec<Arc<ProtectionDomain>> {
        self.nics().map(|nic| Arc::clone(nic.domain())).collect()
    }

    fn registration_rule(&self) -> RegistrationRule<'static> {
        let ordering = if self.settings.is_relaxed { Ordering::Relaxed } else { Ordering::Strict };
        RegistrationRule { bytes_max: self.region_bytes_max, ordering, source: MemorySource::Pages }
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
