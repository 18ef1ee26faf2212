//! Device memory that RDMA devices access themselves, on a simulated fabric.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use mooncake_base::Result;
use mooncake_rdma::RdmaSettings;
use mooncake_transfer_engine::{
    Engine, EngineConfig, Opcode, Peer, TransportKind, config::RdmaFabric,
};
use mooncake_verbs::fake::Fabric;
use tokio::runtime::Runtime;

use crate::{KINDS, MIB, entries, fake::Fake, outcomes, pattern, runtime, soon};

/// An engine with the driver, and one without; both with the devices of one fabric.
struct Pair {
    with_driver: Engine,
    other: Engine,
    _runtime: Runtime,
}

impl Pair {
    fn new(fake: &Fake, settings: &RdmaSettings, others: &[TransportKind]) -> Self {
        let (fabric, runtime) = (Fabric::of(2), runtime());
        let start = |device_driver: PathBuf| {
            let config = EngineConfig {
                name: "127.0.0.1".to_owned(),
                disabled: KINDS.into_iter().filter(|kind| !others.contains(kind)).collect(),
                rdma: Some(settings.clone()),
                rdma_fabric: Some(RdmaFabric(fabric.library())),
                device_driver,
                ..EngineConfig::default()
            };
            Engine::start(config, runtime.handle().clone()).unwrap()
        };
        let (with_driver, other) = (start(fake.file()), start(PathBuf::from("no-driver.so")));
        Self { with_driver, other, _runtime: runtime }
    }

    fn over_rdma(fake: &Fake) -> Self {
        Self::new(fake, &RdmaSettings::default(), &[])
    }

    /// Lends device memory from an offset on. Returns it as the other engine knows it.
    fn lend(&self, address: usize, length: usize) -> Arc<Peer> {
        self.with_driver.regions().register(address as u64, length as u64, "*").unwrap();
        self.other.open(self.with_driver.segment_name(), soon()).unwrap()
    }

    /// Returns the number of pinned buffers that were made for copies.
    fn pinned(&self) -> usize {
        self.with_driver.snapshot().pinned.open
    }
}

/// Moves a range: local address, length, address at the peer. Returns the transport that moved it.
fn move_one(
    engine: &Engine,
    peer: &Peer,
    opcode: Opcode,
    range: (usize, usize, u64),
) -> Result<Option<TransportKind>> {
    let mut entries = entries(&[range]);
    let served = engine.transfer(peer, opcode, &mut entries, soon());
    outcomes(entries).remove(0).map(|()| served)
}

/// Returns bytes that a transfer wrote unseen by the compiler.
fn written(bytes: &[u8]) -> Vec<u8> {
    std::hint::black_box(bytes).to_vec()
}

#[test]
fn peers_reach_device_memory_without_its_owner() {
    let fake = Fake::load();
    let pair = Pair::over_rdma(&fake);
    // The range begins within a page, which is exported whole.
    let (offset, length) = (100, 3 * MIB + 5);
    let there = fake.memory(&vec![7; offset + length + 9]) + offset;
    let peer = pair.lend(there, length);
    let (bytes, back) = (pattern(length, 3), vec![0; length]);
    let here = (bytes.as_ptr() as usize, length, there as u64);
    let served = move_one(&pair.other, &peer, Opcode::Write, here).unwrap();
    assert_eq!(served, Some(TransportKind::Rdma));
    assert!(fake.bytes(there, length) == bytes);
    assert_eq!(fake.bytes(there - offset, offset), vec![7; offset]);
    assert_eq!(fake.bytes(there + length, 9), [7; 9]);
    let here = (back.as_ptr() as usize, length, there as u64);
    move_one(&pair.other, &peer, Opcode::Read, here).unwrap();
    assert!(written(&back) == bytes);
    assert_eq!(pair.pinned(), 0, "nothing was copied through host memory");
}

#[test]
fn registered_device_memory_is_moved_without_a_copy() {
    let fake = Fake::load();
    let pair = Pair::over_rdma(&fake);
    let length = 2 * MIB + 1;
    let lent = vec![0_u8; length];
    pair.other.regions().register(lent.as_ptr() as u64, length as u64, "cpu:0").unwrap();
    let peer = pair.with_driver.open(pair.other.segment_name(), soon()).unwrap();
    let here = fake.memory(&pattern(length, 5));
    pair.with_driver.regions().register(here as u64, length as u64, "*").unwrap();
    // Work that is queued on the default stream comes first.
    fake.fill(0, here, 9, 1000);
    let range = (here, length, lent.as_ptr() as u64);
    let served = move_one(&pair.with_driver, &peer, Opcode::Write, range).unwrap();
    assert_eq!(served, Some(TransportKind::Rdma));
    let mut expected = pattern(length, 5);
    expected[..1000].fill(9);
    assert!(written(&lent) == expected);
    let back = fake.memory(&vec![0; length]);
    pair.with_driver.regions().register(back as u64, length as u64, "*").unwrap();
    let range = (back, length, lent.as_ptr() as u64);
    move_one(&pair.with_driver, &peer, Opcode::Read, range).unwrap();
    assert!(fake.bytes(back, length) == expected);
    assert_eq!(pair.pinned(), 0, "nothing was copied through host memory");
    // Memory that is not registered is staged.
    let staged = fake.memory(&vec![0; length]);
    let range = (staged, length, lent.as_ptr() as u64);
    move_one(&pair.with_driver, &peer, Opcode::Read, range).unwrap();
    assert!(fake.bytes(staged, length) == expected);
    assert!(pair.pinned() > 0);
}

#[test]
fn device_memory_that_cannot_be_registered_is_staged() {
    let fake = Fake::load();
    let refused = || fake.refuse_exports(true);
    let allowed = RdmaSettings::default();
    let disabled = RdmaSettings { uses_device_memory: false, ..RdmaSettings::default() };
    for (settings, refuse) in [(allowed, true), (disabled, false)] {
        fake.refuse_exports(false);
        if refuse {
            refused();
        }
        let pair = Pair::new(&fake, &settings, &[TransportKind::Tcp]);
        let length = MIB + 1;
        let there = fake.memory(&vec![0; length]);
        let peer = pair.lend(there, length);
        let bytes = pattern(length, 1);
        let here = (bytes.as_ptr() as usize, length, there as u64);
        let served = move_one(&pair.other, &peer, Opcode::Write, here).unwrap();
        assert_eq!(served, Some(TransportKind::Tcp));
        assert!(fake.bytes(there, length) == bytes);
        assert!(pair.pinned() > 0);
        pair.with_driver.regions().unregister(there as u64).unwrap();
    }
}

#[test]
fn peers_cannot_reach_unregistered_device_memory() {
    let fake = Fake::load();
    let pair = Pair::over_rdma(&fake);
    let there = fake.memory(&vec![0; MIB]);
    let peer = pair.lend(there, MIB);
    let bytes = pattern(MIB, 2);
    let here = (bytes.as_ptr() as usize, MIB, there as u64);
    move_one(&pair.other, &peer, Opcode::Write, here).unwrap();
    pair.with_driver.regions().unregister(there as u64).unwrap();
    assert!(move_one(&pair.other, &peer, Opcode::Write, here).is_err());
}

#[test]
fn small_writes_from_device_memory_arrive() {
    let fake = Fake::load();
    let pair = Pair::over_rdma(&fake);
    let lent = vec![0_u8; 4096];
    pair.other.regions().register(lent.as_ptr() as u64, 4096, "cpu:0").unwrap();
    let peer = pair.with_driver.open(pair.other.segment_name(), soon()).unwrap();
    let here = fake.memory(&pattern(4096, 7));
    pair.with_driver.regions().register(here as u64, 4096, "*").unwrap();
    // Host memory of such a length is read by the processor, which cannot read this.
    for length in [1, 40, 64, 65] {
        let range = (here + length, length, lent.as_ptr() as u64 + length as u64);
        let served = move_one(&pair.with_driver, &peer, Opcode::Write, range).unwrap();
        assert_eq!(served, Some(TransportKind::Rdma));
        assert!(written(&lent)[length..2 * length] == pattern(4096, 7)[length..2 * length]);
    }
    assert_eq!(pair.pinned(), 0, "nothing was copied through host memory");
}

#[test]
fn device_memory_is_near_the_devices_of_its_place() {
    let fake = Fake::load();
    let names = |name: &str| vec![name.to_owned()];
    // The first GPU of the driver is the second one on the bus.
    let settings = RdmaSettings {
        near: BTreeMap::from([
            ("cuda:0".to_owned(), names("fake1")),
            ("cuda:1".to_owned(), names("fake0")),
            ("cpu:0".to_owned(), names("fake1")),
        ]),
        near_gpus: BTreeMap::from([
            ("0000:c2:00.0".to_owned(), names("fake0")),
            ("0000:04:00.0".to_owned(), names("fake1")),
        ]),
        ..RdmaSettings::default()
    };
    let pair = Pair::new(&fake, &settings, &[]);
    // A caller that takes all memory for that of the first node is corrected.
    for location in ["*", "cpu:0"] {
        let there = fake.memory(&vec![0; MIB]);
        pair.with_driver.regions().register(there as u64, MIB as u64, location).unwrap();
    }
    let regions = pair.with_driver.regions().all();
    assert!(regions.iter().all(|region| region.location == "cuda:0"), "{regions:?}");
    let peer = pair.other.open(pair.with_driver.segment_name(), soon()).unwrap();
    let native = peer.descriptor().mooncake.clone().unwrap();
    assert_eq!(native.near_devices["cuda:0"], ["fake0"], "{native:?}");
}
