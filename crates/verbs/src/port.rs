//! A port of a device: the state, the layer and the rate of its link.

use std::{fmt, mem};

use rdma_sys::{ibv_port_attr, ibv_port_state};

use crate::{Context, Result};

/// Attributes of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Port {
    /// State of the link.
    pub state: PortState,
    /// Link layer of the port.
    pub link_layer: LinkLayer,
    /// Current payload size of a packet.
    pub mtu: Mtu,
    /// Data rate of the link in megabits per second; 0 if the driver reports none.
    pub megabits_per_second: u32,
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

/// Payload size of a packet. Both ends of a connection use the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Mtu {
    /// 256 bytes.
    Bytes256 = 1,
    /// 512 bytes.
    Bytes512,
    /// 1024 bytes.
    Bytes1024,
    /// 2048 bytes.
    Bytes2048,
    /// 4096 bytes.
    Bytes4096,
}

impl Context {
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
            mtu: Mtu::from_code(attributes.active_mtu),
            megabits_per_second: lanes(attributes.active_width)
                * lane_megabits(attributes.active_speed),
            gid_count: u32::try_from(attributes.gid_tbl_len).unwrap_or(0),
            lid: attributes.lid,
        })
    }
}

impl Mtu {
    /// All sizes, ascending.
    pub const ALL: [Self; 5] =
        [Self::Bytes256, Self::Bytes512, Self::Bytes1024, Self::Bytes2048, Self::Bytes4096];

    /// Returns the size with this number of bytes, if there is one.
    pub fn from_bytes(bytes: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|mtu| mtu.bytes() == bytes)
    }

    /// Returns the number of bytes.
    pub fn bytes(self) -> u32 {
        128 << self.code()
    }

    /// Returns the number of ibverbs for this size.
    pub(crate) fn code(self) -> u32 {
        self as u32
    }

    /// Returns the size with the number of ibverbs; the smallest for a number that is none.
    fn from_code(code: u32) -> Self {
        Self::ALL.into_iter().find(|mtu| mtu.code() == code).unwrap_or(Self::Bytes256)
    }
}

impl fmt::Display for Mtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes().fmt(f)
    }
}

/// Returns the number of lanes for a link width of the InfiniBand specification.
fn lanes(width: u8) -> u32 {
    match width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 0,
    }
}

/// Returns the signalling rate of a lane for a link speed of the InfiniBand specification.
fn lane_megabits(speed: u8) -> u32 {
    match speed {
        1 => 2_500,
        2 => 5_000,
        4 | 8 => 10_000,
        16 => 14_000,
        32 => 25_000,
        64 => 50_000,
        128 => 100_000,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtu_converts_both_ways() {
        for mtu in Mtu::ALL {
            assert_eq!(Mtu::from_bytes(mtu.bytes()), Some(mtu));
            assert_eq!(Mtu::from_code(mtu.code()), mtu);
        }
        assert_eq!(Mtu::Bytes4096.bytes(), 4096);
        assert_eq!(Mtu::from_bytes(1500), None);
        assert_eq!(Mtu::from_code(0), Mtu::Bytes256);
    }

    #[test]
    fn link_rate_is_lanes_times_lane_speed() {
        assert_eq!(lanes(2) * lane_megabits(32), 100_000, "4 lanes of EDR");
        assert_eq!(lanes(2) * lane_megabits(128), 400_000, "4 lanes of NDR");
        assert_eq!(lanes(0) * lane_megabits(32), 0, "unknown width");
    }
}
