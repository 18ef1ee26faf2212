//! Two engines connected over one transport, and registered memory of both kinds.

use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};

use mooncake_base::{Clock, Moment, Result, SegmentId, SystemClock};
use mooncake_transfer_engine::{
    Engine, EngineConfig, LocalRange, Opcode, Peer, SharedMemory, TransferEntry, TransportKind,
};

/// Two engines in this process.
pub(crate) struct Pair {
    pub(crate) near: Engine,
    pub(crate) far: Engine,
    pub(crate) peer: Arc<Peer>,
    /// A segment of the store in the memory of the far engine.
    pub(crate) segment: SegmentId,
    pub(crate) runtime: tokio::runtime::Runtime,
}

/// Memory that the far engine has registered.
pub(crate) enum Lent {
    /// Memory allocated by the engine.
    Shared(SharedMemory),
    /// Memory of the user, registered with the engine.
    User(Engine, Vec<u8>),
}

impl Pair {
    pub(crate) fn over_memory() -> Self {
        Self::new(TransportKind::Memory)
    }

    pub(crate) fn over_shm() -> Self {
        Self::new(TransportKind::Shm)
    }

    pub(crate) fn over_tcp() -> Self {
        Self::new(TransportKind::Tcp)
    }

    /// Two engines over the RDMA devices of this machine, or over two simulated devices where it has none.
    #[cfg(feature = "rdma")]
    pub(crate) fn over_rdma() -> Self {
        use mooncake_verbs::{Library, fake::Fabric};
        let real = Library::load()
            .ok()
            .filter(|library| library.devices().is_ok_and(|devices| !devices.is_empty()));
        Self::with_library(real.unwrap_or_else(|| Fabric::of(2).library()))
    }

    #[cfg(feature = "rdma")]
    fn with_library(library: Arc<mooncake_verbs::Library>) -> Self {
        let config = EngineConfig {
            rdma: Some(mooncake_rdma::RdmaSettings::default()),
            rdma_fabric: Some(mooncake_transfer_engine::config::RdmaFabric(library)),
            ..config(Some(TransportKind::Rdma))
        };
        let runtime = runtime();
        let start = || Engine::start(config.clone(), runtime.handle().clone()).unwrap();
        Self::join(start(), start(), TransportKind::Rdma, runtime)
    }

    fn new(kind: TransportKind) -> Self {
        let runtime = runtime();
        let (near, far) = (start(Some(kind), &runtime), start(Some(kind), &runtime));
        Self::join(near, far, kind, runtime)
    }

    fn join(
        near: Engine,
        far: Engine,
        kind: TransportKind,
        runtime: tokio::runtime::Runtime,
    ) -> Self {
        let segment = far.new_segment_id();
        let peer = near.open(far.segment_name(), soon()).unwrap();
        assert_eq!(peer.transport(), Some(kind));
        Self { near, far, peer, segment, runtime }
    }

    /// Registers both kinds of memory, each of `length` bytes.
    pub(crate) fn lend(&self, length: usize) -> [Lent; 2] {
        [Lent::shared(&self.far, length), Lent::user(&self.far, length)]
    }

    pub(crate) fn write(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        move_one(&self.near, &self.peer, Opcode::Write, (held(bytes), address))
    }

    pub(crate) fn read(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        move_one(&self.near, &self.peer, Opcode::Read, (held(bytes), address))
    }
}

impl Lent {
    pub(crate) fn shared(engine: &Engine, length: usize) -> Self {
        Self::Shared(engine.allocate(length as u64).unwrap())
    }

    pub(crate) fn user(engine: &Engine, length: usize) -> Self {
        let bytes = vec![0; length];
        engine.regions().register(bytes.as_ptr() as u64, length as u64, "cpu:0").unwrap();
        Self::User(engine.clone(), bytes)
    }

    pub(crate) fn base(&self) -> u64 {
        match self {
            Self::Shared(memory) => memory.base(),
            Self::User(_, bytes) => bytes.as_ptr() as u64,
        }
    }

    pub(crate) fn length(&self) -> u64 {
        match self {
            Self::Shared(memory) => memory.length(),
            Self::User(_, bytes) => bytes.len() as u64,
        }
    }

    /// Withdraws the memory; afterwards no peer can access it.
    pub(crate) fn withdraw(self) -> Result<()> {
        match self {
            Self::Shared(memory) => drop(memory),
            Self::User(engine, bytes) => engine.regions().unregister(bytes.as_ptr() as u64)?,
        }
        Ok(())
    }
}

/// Starts an engine with only one transport, or with all of them.
pub(crate) fn start(only: Option<TransportKind>, runtime: &tokio::runtime::Runtime) -> Engine {
    Engine::start(config(only), runtime.handle().clone()).unwrap()
}

pub(crate) fn config(only: Option<TransportKind>) -> EngineConfig {
    let all = [TransportKind::Memory, TransportKind::Shm, TransportKind::Tcp, TransportKind::Rdma];
    let disabled = match only {
        Some(kind) => all.into_iter().filter(|other| *other != kind).collect(),
        None => Vec::new(),
    };
    EngineConfig {
        name: "127.0.0.1".to_owned(),
        is_tcp_forced: only == Some(TransportKind::Tcp),
        disabled,
        // A peer that gets no CPU time for a while must not be disconnected.
        withdraw_timeout: 2 * AT_ONCE,
        ..EngineConfig::default()
    }
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

pub(crate) fn move_one(
    engine: &Engine,
    peer: &Peer,
    opcode: Opcode,
    (local, remote): (LocalRange, u64),
) -> Result<()> {
    move_until(engine, peer, opcode, (local, remote), soon())
}

pub(crate) fn move_until(
    engine: &Engine,
    peer: &Peer,
    opcode: Opcode,
    (local, remote): (LocalRange, u64),
    deadline: Moment,
) -> Result<()> {
    let mut entries = [TransferEntry::new(local, remote)];
    engine.transfer(peer, opcode, &mut entries, deadline);
    let [entry] = entries;
    entry.outcome.expect("every entry has an outcome")
}

pub(crate) fn held(bytes: &mut [u8]) -> LocalRange {
    // SAFETY: tests hold no other reference to the bytes while they are transferred.
    unsafe { LocalRange::held(bytes.as_mut_ptr(), bytes.len()) }
}

pub(crate) fn foreign(address: usize, length: usize) -> LocalRange {
    // SAFETY: tests hold no reference to the memory of such a range.
    unsafe { LocalRange::foreign(address, length) }
}

/// Returns bytes that depend on their position and the seed: the position plus the seed modulo 251,
/// combined with the number of the block by XOR. The bytes are assembled from precomputed blocks,
/// since a test may need a gibibyte.
pub(crate) fn pattern(length: usize, seed: usize) -> Vec<u8> {
    static ROWS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
        let row = |block: u8| (0..PERIOD + BLOCK).map(|i| (i % PERIOD) as u8 ^ block).collect();
        (0..=u8::MAX).map(row).collect()
    });
    let mut bytes = Vec::with_capacity(length);
    while bytes.len() < length {
        let (position, row) = (bytes.len(), &ROWS[bytes.len() / BLOCK % 256]);
        let from = (position + seed) % PERIOD;
        bytes.extend_from_slice(&row[from..from + BLOCK.min(length - position)]);
    }
    bytes
}

const BLOCK: usize = 2048;
const PERIOD: usize = 251;

pub(crate) fn soon() -> Moment {
    SystemClock.now() + Duration::from_secs(60)
}

/// A limit for operations that must not wait: generous for a busy machine, but shorter than any
/// deadline.
pub(crate) const AT_ONCE: Duration = Duration::from_secs(20);
