//! Two engines' devices with memory, whose messages are passed on by calls.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use mooncake_base::{Clock, Moment, SystemClock, clock::ManualClock};
use mooncake_rdma::{
    BufferDescription, Devices, Entry, EntryError, Limits, Operation, PeerDescription,
    PeerExchange, PeerLink, RdmaSettings,
};
use mooncake_verbs::Library;

/// How long a transfer may take. An emulated machine is slow.
const PATIENCE: Duration = Duration::from_secs(60);

/// Two engines that can reach each other.
pub(crate) struct Sides {
    pub(crate) left: Side,
    pub(crate) right: Side,
    settings: RdmaSettings,
    clock: Arc<dyn Clock>,
    patience: Duration,
}

/// The devices of an engine, and memory that is registered with them.
pub(crate) struct Side {
    pub(crate) devices: Arc<Devices>,
    server: String,
    memory: Box<[u8]>,
    exchanges: Arc<AtomicUsize>,
}

pub(crate) fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

impl Sides {
    pub(crate) fn new(library: &Arc<Library>, bytes: usize, settings: RdmaSettings) -> Self {
        Self::start(library, bytes, settings, SystemClock::shared())
    }

    /// Sides whose clock is moved by hand.
    pub(crate) fn with_clock(
        library: &Arc<Library>,
        bytes: usize,
        settings: RdmaSettings,
        clock: &Arc<ManualClock>,
    ) -> Self {
        let clock: Arc<dyn Clock> = Arc::<ManualClock>::clone(clock);
        // A test moves the clock as fast as it can.
        let patience = Duration::from_secs(86_400);
        Self { patience, ..Self::start(library, bytes, settings, clock) }
    }

    fn start(
        library: &Arc<Library>,
        bytes: usize,
        settings: RdmaSettings,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let left = Side::new(library, "left:1", bytes, (&settings, &clock));
        let right = Side::new(library, "right:2", bytes, (&settings, &clock));
        Self { left, right, settings, clock, patience: PATIENCE }
    }

    /// Starts the right side again under its name, with other queue pairs and keys. What it had is gone
    /// before.
    pub(crate) fn restart_right(&mut self, library: &Arc<Library>) {
        self.right.devices.close();
        let bytes = self.right.memory.len();
        self.right = Side::new(library, "right:2", bytes, (&self.settings, &self.clock));
    }

    pub(crate) fn link(&self) -> Arc<PeerLink> {
        self.link_with(&[(self.right.base(), self.right.memory.len() as u64)])
    }

    pub(crate) fn link_with(&self, ranges: &[(u64, u64)]) -> Arc<PeerLink> {
        self.left.link_to(&self.right, ranges)
    }

    pub(crate) fn link_back(&self) -> Arc<PeerLink> {
        self.right.link_to(&self.left, &[(self.left.base(), self.left.memory.len() as u64)])
    }

    pub(crate) fn link_to_self(&self) -> Arc<PeerLink> {
        self.left.link_to(&self.left, &[(self.left.base(), self.left.memory.len() as u64)])
    }

    pub(crate) fn deadline(&self) -> Moment {
        self.clock.now() + self.patience
    }

    /// Moves ranges, given by left offset, right offset and length.
    pub(crate) fn transfer(&self, operation: Operation, ranges: &[(usize, usize, usize)]) {
        let entry = |(left, right, length): &(usize, usize, usize)| Entry {
            local: self.left.base() + *left as u64,
            remote: self.right.base() + *right as u64,
            length: *length as u64,
        };
        let entries: Vec<_> = ranges.iter().map(entry).collect();
        let link = self.link();
        for outcome in self.try_transfer(&link, operation, &entries) {
            outcome.unwrap_or_else(|error| panic!("{error:?}"));
        }
    }

    pub(crate) fn try_transfer(
        &self,
        link: &Arc<PeerLink>,
        operation: Operation,
        entries: &[Entry],
    ) -> Vec<Result<(), EntryError>> {
        self.try_transfer_until(link, self.deadline(), operation, entries)
    }

    pub(crate) fn try_transfer_until(
        &self,
        link: &Arc<PeerLink>,
        deadline: Moment,
        operation: Operation,
        entries: &[Entry],
    ) -> Vec<Result<(), EntryError>> {
        let limits = Limits { deadline, stall: None };
        let mut outcomes = Vec::new();
        // SAFETY: the memory of both sides outlives the call, and is not touched meanwhile.
        unsafe {
            link.transfer(operation, entries, limits, |index, outcome| {
                assert_eq!(index, outcomes.len());
                outcomes.push(outcome);
            });
        }
        outcomes
    }
}

impl Side {
    pub(crate) fn new(
        library: &Arc<Library>,
        server: &str,
        bytes: usize,
        (settings, clock): (&RdmaSettings, &Arc<dyn Clock>),
    ) -> Self {
        let engine = SystemClock.now().since_boot().as_nanos().to_string();
        let (settings, clock) = (settings.clone(), Arc::clone(clock));
        let devices = Devices::open_with_clock(library, settings, server, &engine, clock).unwrap();
        let mut memory = vec![0; bytes].into_boxed_slice();
        let base = memory.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: deregistered before the memory is dropped; touched only between transfers.
        unsafe { devices.register(base, bytes as u64, "cpu:0") }.unwrap();
        Self { devices, server: server.to_owned(), memory, exchanges: Arc::default() }
    }

    fn link_to(&self, peer: &Self, ranges: &[(u64, u64)]) -> Arc<PeerLink> {
        let buffers = ranges.iter().flat_map(|(base, _)| peer.devices.keys(*base));
        let buffer = |(address, length, keys)| BufferDescription {
            location: "cpu:0".to_owned(),
            address,
            length,
            keys,
        };
        let near = peer.devices.near().into_iter();
        let priority = near.map(|(location, names)| (location, (names, Vec::new())));
        let published = PeerDescription {
            server: peer.server.clone(),
            devices: peer.devices.describe(),
            buffers: buffers.map(buffer).collect(),
            priority: priority.collect(),
        };
        let devices = Arc::downgrade(&peer.devices);
        let exchanges = Arc::clone(&self.exchanges);
        let exchange: PeerExchange = Arc::new(move |body, _| {
            exchanges.fetch_add(1, Ordering::Relaxed);
            let gone = || mooncake_base::Error::closed("the peer is gone");
            Ok(devices.upgrade().ok_or_else(gone)?.answer(body))
        });
        Arc::new(PeerLink::new(Arc::clone(&self.devices), &published, exchange).unwrap())
    }

    /// Returns how many messages were sent to peers.
    pub(crate) fn exchanges(&self) -> usize {
        self.exchanges.load(Ordering::Relaxed)
    }

    pub(crate) fn base(&self) -> u64 {
        self.memory.as_ptr() as u64
    }

    pub(crate) fn fill(&mut self, byte: impl Fn(usize) -> u8) {
        for (index, place) in self.memory.iter_mut().enumerate() {
            *place = byte(index);
        }
    }

    /// Checks a part of the memory; `expected` is given indices from its start.
    pub(crate) fn check(&self, offset: usize, length: usize, expected: impl Fn(usize) -> u8) {
        let part = &self.memory[offset..offset + length];
        let wrong = (0..length).find(|index| part[*index] != expected(*index));
        assert_eq!(wrong, None, "the first wrong byte");
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        self.devices.deregister(self.base(), PATIENCE).expect("no transfer is running");
    }
}
