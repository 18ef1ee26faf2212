//! The counted transfers over RDMA, on simulated devices: what the calling thread does for a slice,
//! and what the thread of a device does when it completes.

use std::{collections::HashMap, sync::Arc, time::Duration};

use mooncake_base::{Clock, Error, SystemClock};
use mooncake_benches::callgrind::counted;
use mooncake_rdma::{
    BufferDescription, Devices, Entry, Limits, Operation, PeerDescription, PeerExchange, PeerLink,
    RdmaSettings,
};
use mooncake_verbs::{Library, fake::Fabric};

/// Slices of a transfer.
pub(crate) const SLICES: usize = 4000;
const SLICE_BYTES: usize = 1024;

/// Makes transfers to one peer.
pub(crate) fn transfers() {
    // Deeper than a transfer, so that no poster waits: how often it would look is decided by chance.
    let settings = RdmaSettings {
        slice_bytes: SLICE_BYTES as u32,
        slice_tail_bytes: 0,
        queue_depth: SLICES as u32,
        device_depth: 4 * SLICES as u32,
        ..RdmaSettings::default()
    };
    let library = Fabric::of(2).library();
    let left = Side::new(&library, "left:1", &settings);
    let right = Side::new(&library, "right:2", &settings);
    let link = left.link_to(&right);
    link.connect(SystemClock.now() + Duration::from_secs(600)).unwrap();
    move_bytes(&link, &left, &right);
    counted(&mut || move_bytes(&link, &left, &right));
}

/// Slices of each transfer of [`transfers_to`], and the number of transfers.
const SLICES_EACH: usize = 32;
const TRANSFERS: usize = 1000;

/// Slices of all counted transfers of [`transfers_to`].
pub(crate) const SLICES_IN_TURN: usize = SLICES_EACH * TRANSFERS;

/// Makes transfers to one peer, to 10 and to 1,000 in turn.
pub(crate) fn transfers_to_one() {
    transfers_to(1);
}

pub(crate) fn transfers_to_ten() {
    transfers_to(10);
}

pub(crate) fn transfers_to_thousand() {
    transfers_to(1000);
}

/// Makes transfers to peers in turn. All of them are one engine's devices, which are known to the caller
/// under another name each, so that the caller has connections with all.
fn transfers_to(peers: usize) {
    let settings = RdmaSettings {
        slice_bytes: SLICE_BYTES as u32,
        slice_tail_bytes: 0,
        queue_pairs: 1,
        ..RdmaSettings::default()
    };
    let library = Fabric::of(1).library();
    let left = Side::new(&library, "left:1", &settings);
    let right = Side::new(&library, "right:2", &settings);
    let links: Vec<_> = (0..peers).map(|peer| left.link_to_alias(&right, peer)).collect();
    let length = (SLICES_EACH * SLICE_BYTES) as u64;
    for link in &links {
        link.connect(SystemClock.now() + Duration::from_secs(600)).unwrap();
        move_part(link, &left, &right, length);
    }
    counted(&mut || {
        for turn in 0..TRANSFERS {
            move_part(&links[turn % peers], &left, &right, length);
        }
    });
}

fn move_bytes(link: &Arc<PeerLink>, left: &Side, right: &Side) {
    move_part(link, left, right, (SLICES * SLICE_BYTES) as u64);
}

fn move_part(link: &Arc<PeerLink>, left: &Side, right: &Side, length: u64) {
    let entries = [Entry { local: left.base(), remote: right.base(), length }];
    let limits = Limits { deadline: SystemClock.now() + Duration::from_secs(600), stall: None };
    // SAFETY: the memory of both sides outlives the call, and is not touched meanwhile.
    unsafe {
        link.transfer(Operation::Write, &entries, limits, |_, outcome| outcome.unwrap());
    }
}

/// The devices of an engine, and memory that is registered with them.
struct Side {
    devices: Arc<Devices>,
    server: &'static str,
    memory: Box<[u8]>,
}

impl Side {
    fn new(library: &Arc<Library>, server: &'static str, settings: &RdmaSettings) -> Self {
        let devices = Devices::open(library, settings.clone(), server, server).unwrap();
        let mut memory = vec![0; SLICES * SLICE_BYTES].into_boxed_slice();
        let base = memory.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: deregistered before the memory is dropped; touched only between transfers.
        unsafe { devices.register(base, memory.len() as u64, "cpu:0") }.unwrap();
        Self { devices, server, memory }
    }

    fn base(&self) -> u64 {
        self.memory.as_ptr() as u64
    }

    fn link_to(&self, peer: &Self) -> Arc<PeerLink> {
        self.link_by_names(peer, peer.server.to_owned(), self.server.to_owned())
    }

    /// Makes a link to a peer under a name of its own; the peer sees another caller for each.
    fn link_to_alias(&self, peer: &Self, number: usize) -> Arc<PeerLink> {
        self.link_by_names(peer, format!("right{number}:2"), format!("left{number}:1"))
    }

    fn link_by_names(&self, peer: &Self, name: String, own_name: String) -> Arc<PeerLink> {
        let buffer = |(address, length, keys)| BufferDescription {
            location: "cpu:0".to_owned(),
            address,
            length,
            keys,
        };
        let published = PeerDescription {
            server: name.clone(),
            devices: peer.devices.describe(),
            buffers: peer.devices.keys(peer.base()).into_iter().map(buffer).collect(),
            priority: HashMap::new(),
        };
        let devices = Arc::downgrade(&peer.devices);
        let (server, own_server) = (peer.server, self.server);
        let exchange: PeerExchange = Arc::new(move |body, _| {
            let gone = || Error::closed("the peer is gone");
            // Each side is told the names that it knows.
            let renamed = |text: &[u8], names: [(&str, &str); 2]| {
                let text = String::from_utf8(text.to_vec()).unwrap();
                names.iter().fold(text, |text, (from, to)| text.replace(from, to))
            };
            let there = [(name.as_str(), server), (own_server, own_name.as_str())];
            let back = [(server, name.as_str()), (own_name.as_str(), own_server)];
            let answer =
                devices.upgrade().ok_or_else(gone)?.answer(renamed(body, there).as_bytes());
            Ok(renamed(&answer, back).into_bytes())
        });
        Arc::new(PeerLink::new(Arc::clone(&self.devices), &published, exchange).unwrap())
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        self.devices
            .deregister(self.base(), Duration::from_secs(60))
            .expect("no transfer is running");
    }
}
