//! Memory, owners and segment descriptors for the TCP tests.

use std::{
    net::TcpListener,
    sync::{Arc, LazyLock},
    time::Duration,
};

use mooncake_base::{Clock, Endpoint, EngineId, Moment, SystemClock};
use tokio::runtime::Runtime;

use crate::{
    discovery::descriptor::{NativeDescriptor, SegmentDescriptor},
    memory::region::{Backing, Region, Regions},
    transfer_entry::{LocalRange, TransferEntry},
    transport::{
        Path, Transport,
        tcp::{TcpServer, TcpServerSettings, TcpSettings, TcpTransport},
    },
};

pub(super) static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
});

/// The frames that the client uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WireProtocol {
    Native,
    CompatV2,
    CompatV1,
}

/// Memory that is accessed only through its address, like user memory.
#[derive(Debug)]
pub(super) struct Memory {
    base: *mut [u8],
}

/// An owner of registered memory with its server.
#[derive(Debug)]
pub(super) struct Owner {
    pub(super) server: TcpServer,
    pub(super) regions: Arc<Regions>,
    pub(super) engine: EngineId,
}

impl WireProtocol {
    pub(super) const ALL: [Self; 3] = [Self::Native, Self::CompatV2, Self::CompatV1];
}

// SAFETY: this is plain memory; the tests wait for a transfer before they read its bytes.
unsafe impl Sync for Memory {}

impl Memory {
    pub(super) fn zeroed(length: usize) -> Self {
        Self { base: Box::into_raw(vec![0; length].into_boxed_slice()) }
    }

    pub(super) fn patterned(length: usize, seed: usize) -> Self {
        let bytes: Vec<u8> =
            (0..length).map(|index| (index * 31 + index / 251 + seed * 7 + 1) as u8).collect();
        Self { base: Box::into_raw(bytes.into_boxed_slice()) }
    }

    pub(super) fn address(&self) -> u64 {
        self.base.cast::<u8>().expose_provenance() as u64
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        // SAFETY: the memory is owned here and no transfer is in flight while a test reads it.
        unsafe { &*self.base }.to_vec()
    }

    /// Returns an entry between bytes of this memory and any address of the peer.
    pub(super) fn part(&self, offset: usize, length: usize, remote: u64) -> TransferEntry {
        assert!(offset + length <= self.base.len());
        let base = self.base.cast::<u8>().wrapping_add(offset);
        // SAFETY: the range is in the allocation, which tests keep until the transfer ends.
        TransferEntry::new(unsafe { LocalRange::held(base, length) }, remote)
    }

    /// Returns an entry between bytes of this memory and bytes of the peer's memory.
    pub(super) fn entry(
        &self,
        offset: usize,
        length: usize,
        peer: &Self,
        at: usize,
    ) -> TransferEntry {
        self.part(offset, length, peer.address() + at as u64)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `Box::into_raw` and is freed once.
        drop(unsafe { Box::from_raw(self.base) });
    }
}

impl Owner {
    pub(super) fn start(host: &str) -> Self {
        let address = Endpoint::new(host, 0).to_string();
        Self::start_with(&address, TcpServerSettings::default())
    }

    pub(super) fn start_with(address: &str, settings: TcpServerSettings) -> Self {
        let regions = Arc::new(Regions::default());
        let engine = settings.engine.unwrap_or_else(EngineId::random);
        let settings = TcpServerSettings { engine: Some(engine), ..settings };
        let listener = TcpListener::bind(address).unwrap();
        let server =
            TcpServer::start(listener, Arc::clone(&regions), settings, RUNTIME.handle()).unwrap();
        Self { server, regions, engine }
    }

    /// Returns an owner with one registered memory. The owner must be dropped before the memory.
    pub(super) fn with_memory(length: usize) -> (Self, Memory) {
        let owner = Self::start("127.0.0.1");
        let memory = Memory::patterned(length, 9);
        drop(owner.lend(&memory));
        (owner, memory)
    }

    pub(super) fn lend(&self, memory: &Memory) -> Arc<Region> {
        let length = memory.base.len() as u64;
        self.regions.register(memory.address(), length, "*", Backing::User).unwrap()
    }

    pub(super) fn unregister(&self, memory: &Memory) {
        self.regions.unregister(memory.address(), Duration::from_secs(20)).unwrap();
    }

    pub(super) fn descriptor(&self, protocol: WireProtocol) -> SegmentDescriptor {
        let address = self.server.address();
        SegmentDescriptor {
            name: "peer".into(),
            protocol: "tcp".into(),
            tcp_data_host: address.ip().to_string(),
            tcp_data_port: address.port(),
            tcp_proto_version: if protocol == WireProtocol::CompatV1 { 1 } else { 2 },
            mooncake: (protocol == WireProtocol::Native)
                .then(|| NativeDescriptor::new(self.engine, None)),
            ..SegmentDescriptor::default()
        }
    }

    pub(super) fn path(&self, protocol: WireProtocol) -> Arc<dyn Path> {
        TcpTransport::new(TcpSettings::default())
            .connect(&self.descriptor(protocol), soon())
            .unwrap()
    }
}

/// Splits the memory into entries of equal length; `remote` returns the peer's address of each.
pub(super) fn entries(
    memory: &Memory,
    length: usize,
    remote: impl Fn(usize) -> u64,
) -> Vec<TransferEntry> {
    (0..memory.base.len() / length)
        .map(|index| memory.part(index * length, length, remote(index)))
        .collect()
}

pub(super) fn moved(entry: &TransferEntry) -> bool {
    matches!(entry.outcome, Some(Ok(())))
}

pub(super) fn outcomes(entries: &[TransferEntry]) -> Vec<bool> {
    entries.iter().map(|entry| entry.outcome.as_ref().unwrap().is_ok()).collect()
}

/// Returns a deadline that only a hanging test reaches.
pub(super) fn soon() -> Moment {
    SystemClock.now() + Duration::from_secs(60)
}

/// A limit for operations that must not wait: generous for a busy machine, but shorter than any
/// deadline or timeout (half a minute).
pub(super) const AT_ONCE: Duration = Duration::from_secs(20);
