//! An opened device: its limits, its ports and their addresses.

use std::{fmt, mem, net::Ipv6Addr, ptr::NonNull};

use rdma_sys::{ibv_context, ibv_device_attr, ibv_gid, ibv_port_attr, ibv_port_state};

use crate::{Device, Error, Library, Result};

/// An opened device.
pub struct Context {
    handle: NonNull<ibv_context>,
    device: Device,
}

// SAFETY: ibverbs allows every call on one context from several threads at once; only `Drop` of
// the last owner closes it.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// Resource limits of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Number of ports, numbered from 1.
    pub ports: u8,
    /// Maximum length of a registered range.
    pub region_bytes_max: u64,
    /// Maximum number of registrations.
    pub regions_max: u32,
    /// Maximum number of completion queues.
    pub completion_queues_max: u32,
    /// Maximum number of entries in a completion queue.
    pub completions_max: u32,
    /// Maximum number of queue pairs.
    pub queue_pairs_max: u32,
}

/// Attributes of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Port {
    /// State of the link.
    pub state: PortState,
    /// Link layer of the port.
    pub link_layer: LinkLayer,
    /// Current payload size of a packet.
    pub mtu_bytes: u32,
    /// Number of entries in the address table, used or not.
    pub gid_count: u32,
    /// Address within an InfiniBand subnet; 0 on Ethernet.
    pub lid: u16,
}

/// State of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortState {
    /// The port carries traffic.
    Active,
    /// No cable, or disabled.
    Down,
    /// Coming up, or between states.
    Waiting,
}

/// Link layer of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkLayer {
    /// InfiniBand: peers are addressed by `lid`.
    InfiniBand,
    /// Ethernet (RoCE): peers are addressed by an entry of the address table.
    Ethernet,
    /// Not reported by the driver.
    Unknown,
}

/// An address of a port: 16 bytes, on Ethernet an IPv6 address or an IPv4 one mapped into it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Gid(pub [u8; 16]);

impl Context {
    pub(crate) fn new(handle: NonNull<ibv_context>, device: Device) -> Self {
        Self { handle, device }
    }

    /// Queries the resource limits of the device.
    ///
    /// # Errors
    /// The driver refused.
    pub fn limits(&self) -> Result<DeviceLimits> {
        // SAFETY: integers and arrays of integers only, for which zero is a value.
        let mut attributes: ibv_device_attr = unsafe { mem::zeroed() };
        let query = self.library().functions.ibv_query_device;
        // SAFETY: the context is open while `self` lives, and `attributes` lives past the call.
        let code = unsafe { query(self.as_ptr(), &raw mut attributes) };
        self.check("ibv_query_device", code)?;
        let count = |value: libc::c_int| u32::try_from(value).unwrap_or(0);
        Ok(DeviceLimits {
            ports: attributes.phys_port_cnt,
            region_bytes_max: attributes.max_mr_size,
            regions_max: count(attributes.max_mr),
            completion_queues_max: count(attributes.max_cq),
            completions_max: count(attributes.max_cqe),
            queue_pairs_max: count(attributes.max_qp),
        })
    }

    /// Queries the attributes of a port; ports are numbered from 1.
    ///
    /// # Errors
    /// There is no such port, or the driver refused.
    pub fn port(&self, number: u8) -> Result<Port> {
        // SAFETY: integers only, for which zero is a value.
        let mut attributes: ibv_port_attr = unsafe { mem::zeroed() };
        let query = self.library().functions.ibv_query_port;
        // SAFETY: the context is open while `self` lives, and `attributes` lives past the call and
        // is as large as any version of the library fills.
        let code = unsafe { query(self.as_ptr(), number, &raw mut attributes) };
        self.check("ibv_query_port", code)?;
        Ok(Port {
            state: match attributes.state {
                ibv_port_state::IBV_PORT_ACTIVE => PortState::Active,
                ibv_port_state::IBV_PORT_DOWN => PortState::Down,
                _ => PortState::Waiting,
            },
            link_layer: match attributes.link_layer {
                1 => LinkLayer::InfiniBand,
                2 => LinkLayer::Ethernet,
                _ => LinkLayer::Unknown,
            },
            mtu_bytes: 128_u32.checked_shl(attributes.active_mtu).unwrap_or(0),
            gid_count: u32::try_from(attributes.gid_tbl_len).unwrap_or(0),
            lid: attributes.lid,
        })
    }

    /// Queries an entry of a port's address table; an unused entry is all zeros.
    ///
    /// # Errors
    /// There is no such port or entry, or the driver refused.
    pub fn gid(&self, port: u8, index: u32) -> Result<Gid> {
        let out_of_range = Error::OutOfRange { what: "the index", value: index.into() };
        let index = libc::c_int::try_from(index).map_err(|_| out_of_range)?;
        let mut gid = ibv_gid { raw: [0; 16] };
        let query = self.library().functions.ibv_query_gid;
        // SAFETY: the context is open while `self` lives, and `gid` lives past the call.
        let code = unsafe { query(self.as_ptr(), port, index, &raw mut gid) };
        self.check("ibv_query_gid", code)?;
        // SAFETY: sixteen bytes are the whole of the union, and every pattern of them is a value.
        Ok(Gid(unsafe { gid.raw }))
    }

    /// Returns the used entries of a port's address table with their indexes.
    ///
    /// # Errors
    /// Same as [`Self::port`] and [`Self::gid`].
    pub fn gids(&self, port: u8) -> Result<Vec<(u32, Gid)>> {
        let mut used = Vec::new();
        for index in 0..self.port(port)?.gid_count {
            let gid = self.gid(port, index)?;
            if !gid.is_unused() {
                used.push((index, gid));
            }
        }
        Ok(used)
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn as_ptr(&self) -> *mut ibv_context {
        self.handle.as_ptr()
    }

    pub(crate) fn library(&self) -> &Library {
        self.device.library()
    }

    fn check(&self, call: &'static str, code: libc::c_int) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(Error::status(call, self.device.name(), code)) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let close = self.library().functions.ibv_close_device;
        // SAFETY: the context was opened by this library and is closed once, here. Everything made
        // from it holds an `Arc` of it, so that nothing is left. A failure leaves a file descriptor
        // open, which cannot be handled.
        unsafe { close(self.as_ptr()) };
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Context").field(&self.device).finish()
    }
}

impl Gid {
    /// Returns whether the entry is unused: its interface part is zero.
    pub fn is_unused(&self) -> bool {
        self.0[8..] == [0; 8]
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gid_without_interface_part_is_unused() {
        let mut bytes = [0; 16];
        bytes[..2].copy_from_slice(&[0xfe, 0x80]);
        assert!(Gid(bytes).is_unused(), "an InfiniBand port keeps its subnet in empty entries");
        bytes[15] = 1;
        assert!(!Gid(bytes).is_unused());
    }

    #[test]
    fn mapped_gid_displays_as_ipv4() {
        let gid = Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 77, 0, 1]);
        assert_eq!(gid.to_string(), "::ffff:10.77.0.1");
    }
}
