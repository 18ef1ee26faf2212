//! The transport over RDMA devices: adapts `mooncake-rdma` to the engine.
//!
//! An engine with devices registers its memory with all of them, publishes their addresses and keys in its
//! segment descriptor, and answers messages of peers that connect queue pairs on its handshake socket.

use std::{collections::HashMap, sync::Arc};

use mooncake_base::{Endpoint, Error, ErrorCode, Moment, Result};
use mooncake_rdma::{
    BufferDescription, DeviceDescription, Devices, Entry, EntryError, Limits, Operation,
    PeerDescription, PeerLink,
};

use crate::{
    discovery::{
        descriptor::{BufferDescriptor, DeviceDescriptor, SegmentDescriptor},
        handshake::{MessageKind, client::request_with_token, codec::Message},
        metadata::MetadataStore,
    },
    memory::region::Region,
    token::Token,
    transfer_entry::{Opcode, Ownership, RemoteRange, TransferEntry},
    transport::{Capability, Path, TimeLimits, Transport, TransportKind},
};

/// The key of device memory and of files, which are not registered with RDMA devices.
const NO_KEY: u32 = 0;

/// The transport over RDMA devices.
#[derive(Debug)]
pub(crate) struct RdmaTransport {
    pub(crate) devices: Arc<Devices>,
    /// Finds the handshake sockets of peers.
    pub(crate) metadata: Arc<dyn MetadataStore>,
    pub(crate) token: Option<Token>,
}

/// The path to one peer.
#[derive(Debug)]
struct RdmaPath {
    link: Arc<PeerLink>,
    /// Addresses and lengths of the peer's memory that its devices do not reach.
    keyless: Vec<(u64, u64)>,
}

impl Transport for RdmaTransport {
    fn kind(&self) -> TransportKind {
        TransportKind::Rdma
    }

    fn capability(&self) -> Capability {
        Capability {
            crosses_hosts: true,
            owner_checks: false,
            needs_registered_local: false,
            cost: 20,
        }
    }

    fn connect(&self, peer: &SegmentDescriptor, deadline: Moment) -> Result<Arc<dyn Path>> {
        let (metadata, token) = (Arc::clone(&self.metadata), self.token.clone());
        let name = peer.name.clone();
        // A peer of several networks names the one over which devices are connected.
        let named = peer.rdma_server_name.parse::<Endpoint>().ok();
        let named = named.filter(|endpoint| endpoint.port.is_some());
        let exchange = move |body: &[u8], deadline: Moment| {
            let endpoint = named.clone().map_or_else(|| metadata.locate(&name, deadline), Ok)?;
            let message = Message::new(MessageKind::Connection, body);
            Ok(request_with_token(token.as_ref(), &endpoint, &message, deadline)?.body)
        };
        let link =
            PeerLink::new(Arc::clone(&self.devices), &description(peer), Arc::new(exchange))?;
        link.connect(deadline)?;
        let keyless = peer.buffers.iter().filter(|buffer| !has_key(buffer));
        let keyless = keyless.map(|buffer| (buffer.addr, buffer.length)).collect();
        Ok(Arc::new(RdmaPath { link: Arc::new(link), keyless }))
    }
}

impl Path for RdmaPath {
    fn kind(&self) -> TransportKind {
        TransportKind::Rdma
    }

    fn reaches(&self, range: RemoteRange) -> bool {
        self.link.reaches(range.address, range.length)
    }

    fn transfer(&self, opcode: Opcode, entries: &mut [TransferEntry], limits: TimeLimits) {
        // The pages of a mapped file may vanish, and cannot be pinned.
        let is_served = |entry: &TransferEntry| {
            entry.outcome.is_none()
                && entry.local.ownership() != Ownership::Volatile
                && !self.is_keyless(entry.remote)
        };
        let mut open: Vec<_> = entries.iter_mut().filter(|entry| is_served(entry)).collect();
        let wanted = open.iter().map(|entry| Entry {
            local: entry.local.address() as u64,
            remote: entry.remote,
            length: entry.local.length() as u64,
        });
        let wanted: Vec<_> = wanted.collect();
        let operation = match opcode {
            Opcode::Read => Operation::Read,
            Opcode::Write => Operation::Write,
        };
        let limits = Limits { deadline: limits.deadline, stall: limits.stall };
        // SAFETY: the creator of a local range promised that it stays mapped, or that it may fail: memory
        // that is not mapped cannot be registered, and the kernel keeps pages that are. No Rust reference
        // exists to bytes that are written.
        unsafe {
            self.link.transfer(operation, &wanted, limits, |index, outcome| {
                let entry = &mut *open[index];
                entry.outcome = match outcome {
                    Ok(()) => Some(Ok(())),
                    // Another path finds out what is wrong with the memory.
                    Err(EntryError::NotRegistered) => None,
                    Err(EntryError::NotPublished) => Some(Err(not_published(entry))),
                    Err(EntryError::Failed(error)) => Some(Err(at(entry, error))),
                };
            });
        }
    }

    fn is_alive(&self) -> bool {
        self.link.is_usable()
    }

    fn close(&self) {
        self.link.close();
    }
}

impl RdmaPath {
    /// Returns whether an address of the peer is in memory that its devices do not reach: another path does.
    fn is_keyless(&self, address: u64) -> bool {
        self.keyless
            .iter()
            .any(|(base, length)| address.checked_sub(*base).is_some_and(|at| at < *length))
    }
}

/// Returns the devices for a segment descriptor.
pub(crate) fn describe_devices(devices: &Devices) -> Vec<DeviceDescriptor> {
    let described = devices.describe().into_iter();
    described
        .map(|DeviceDescription { name, gid, lid }| DeviceDescriptor { name, lid, gid })
        .collect()
}

/// Returns the buffers of a region for a segment descriptor: one for each registration.
pub(crate) fn describe_region(devices: &Devices, region: &Region) -> Vec<BufferDescriptor> {
    let mut keys = devices.keys(region.base);
    if keys.is_empty() {
        // Upstream refuses a descriptor in which a buffer has no keys.
        keys.push((region.base, region.length, vec![NO_KEY; devices.describe().len()]));
    }
    let buffer = |(addr, length, keys): (u64, u64, Vec<u32>)| BufferDescriptor {
        name: region.location.clone(),
        addr,
        length,
        lkey: keys.clone(),
        rkey: keys,
    };
    keys.into_iter().map(buffer).collect()
}

/// Returns what a peer has published for RDMA.
fn description(peer: &SegmentDescriptor) -> PeerDescription {
    let device = |device: &DeviceDescriptor| DeviceDescription {
        name: device.name.clone(),
        gid: device.gid.clone(),
        lid: device.lid,
    };
    let buffer = |buffer: &BufferDescriptor| BufferDescription {
        location: buffer.name.clone(),
        address: buffer.addr,
        length: buffer.length,
        keys: buffer.rkey.clone(),
    };
    let server = match peer.rdma_server_name.as_str() {
        "" => peer.name.clone(),
        server => server.to_owned(),
    };
    PeerDescription {
        server,
        devices: peer.devices.iter().map(device).collect(),
        buffers: peer.buffers.iter().filter(|buffer| has_key(buffer)).map(buffer).collect(),
        priority: priority(peer),
    }
}

/// Returns whether devices reach a buffer.
fn has_key(buffer: &BufferDescriptor) -> bool {
    buffer.rkey.iter().any(|key| *key != NO_KEY)
}

/// Returns the near devices and the others for each location: those of our own field, which upstream's
/// engines do not have, else those of upstream's matrix.
fn priority(peer: &SegmentDescriptor) -> HashMap<String, (Vec<String>, Vec<String>)> {
    match peer.mooncake.as_ref().map(|native| &native.near_devices) {
        Some(near) => {
            let rows = near.iter().map(|(name, near)| (name.clone(), (near.clone(), Vec::new())));
            rows.collect()
        }
        None => peer.priority_matrix.clone().into_iter().collect(),
    }
}

fn not_published(entry: &TransferEntry) -> Error {
    let text = "the address is not in a registered range of its owner";
    at(entry, Error::new(ErrorCode::TRANSFER_FAIL, text))
}

fn at(entry: &TransferEntry, error: Error) -> Error {
    error.with("address", format_args!("{:#x}", entry.remote)).with("length", entry.local.length())
}
