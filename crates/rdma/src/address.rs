//! How peers reach a device: which address of its port is used, and when another one is.

use mooncake_base::{Error, ErrorCode, Result};
use mooncake_verbs::{ConnectionSettings, Gid, GidEntry, Port, PortState, rank_gids};

use crate::settings::RdmaSettings;

/// How peers reach a device. Queue pairs are connected from one address, and work while it counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Address {
    /// Grows with each change; connections of an older number are given up.
    pub(crate) generation: u64,
    pub(crate) entry: GidEntry,
    /// Identifier in an InfiniBand subnet; 0 on Ethernet.
    pub(crate) lid: u16,
    pub(crate) connection: ConnectionSettings,
}

/// Returns the address by which peers reach a device.
///
/// # Errors
/// The port is down, or has no such address.
pub(crate) fn choose_address(
    device: &str,
    port: &Port,
    entries: Vec<GidEntry>,
    settings: &RdmaSettings,
) -> Result<GidEntry> {
    ranked(device, port, entries, settings).map(|mut ranked| ranked.swap_remove(0))
}

/// Returns the addresses that may be used, the best first; at least one.
fn ranked(
    device: &str,
    port: &Port,
    mut entries: Vec<GidEntry>,
    settings: &RdmaSettings,
) -> Result<Vec<GidEntry>> {
    let unusable = |text: &str| {
        Error::new(ErrorCode::INVALID_PARAMS, text)
            .with("device", device)
            .with("port", settings.port)
    };
    if port.state != PortState::Active {
        return Err(unusable("the port of an RDMA device is down"));
    }
    let ranked = match settings.gid_index {
        Some(index) => {
            entries.retain(|entry| entry.index == index);
            entries
        }
        None => rank_gids(entries),
    };
    if ranked.is_empty() {
        return Err(unusable("the port of an RDMA device has no such address"));
    }
    Ok(ranked)
}

impl Address {
    /// Chooses the first address of a device whose connections have these settings otherwise.
    ///
    /// # Errors
    /// The port is down, or has no such address.
    pub(crate) fn first(
        device: &str,
        port: &Port,
        entries: Vec<GidEntry>,
        settings: &RdmaSettings,
        connection: ConnectionSettings,
    ) -> Result<Self> {
        let entry = choose_address(device, port, entries, settings)?;
        Ok(Self { generation: 0, entry, lid: 0, connection }.at(port, settings))
    }

    /// Chooses again after a change of the port. An address that the port still has is kept, unless there
    /// is a better one.
    ///
    /// # Errors
    /// The port is down, or has no such address.
    pub(crate) fn again(
        &self,
        device: &str,
        port: &Port,
        entries: Vec<GidEntry>,
        settings: &RdmaSettings,
    ) -> Result<Self> {
        let mut ranked = ranked(device, port, entries, settings)?;
        let is_kept = |entry: &GidEntry| {
            (entry.gid, entry.kind) == (self.entry.gid, self.entry.kind)
                && entry.is_as_good_as(&ranked[0])
        };
        let index = ranked.iter().position(is_kept).unwrap_or(0);
        let next = Self { entry: ranked.swap_remove(index), ..self.clone() }.at(port, settings);
        Ok(if next == *self { next } else { Self { generation: self.generation + 1, ..next } })
    }

    /// Takes over what the port says.
    fn at(mut self, port: &Port, settings: &RdmaSettings) -> Self {
        self.lid = port.lid;
        self.connection.gid_index = self.entry.index;
        self.connection.mtu = port.mtu.min(settings.mtu);
        self
    }

    pub(crate) fn gid(&self) -> Gid {
        self.entry.gid
    }
}

#[cfg(test)]
mod tests {
    use mooncake_verbs::{GidKind, LinkLayer, Mtu};

    use super::*;

    fn port() -> Port {
        Port {
            state: PortState::Active,
            link_layer: LinkLayer::Ethernet,
            mtu: Mtu::Bytes4096,
            megabits_per_second: 100_000,
            gid_count: 8,
            lid: 0,
        }
    }

    fn entry(index: u8, last: u8) -> GidEntry {
        let gid = Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, last]);
        GidEntry { index, gid, kind: GidKind::RoceV2, interface: Some("eth0".to_owned()) }
    }

    fn again(address: &Address, port: &Port, entries: &[GidEntry]) -> Result<Address> {
        address.again("d", port, entries.to_vec(), &RdmaSettings::default())
    }

    fn first() -> Address {
        let connection = ConnectionSettings::default();
        let settings = RdmaSettings::default();
        Address::first("d", &port(), vec![entry(3, 1)], &settings, connection).unwrap()
    }

    #[test]
    fn address_is_kept_while_the_port_has_it() {
        let first = first();
        assert_eq!(again(&first, &port(), &[entry(1, 9), entry(3, 1)]).unwrap(), first);
        let moved = again(&first, &port(), &[entry(1, 9), entry(5, 1)]).unwrap();
        assert_eq!(
            (moved.generation, moved.gid(), moved.connection.gid_index),
            (1, first.gid(), 5)
        );
    }

    #[test]
    fn lost_or_worse_address_is_replaced() {
        let first = first();
        let other = again(&first, &port(), &[entry(1, 9)]).unwrap();
        assert_eq!((other.generation, other.connection.gid_index), (1, 1));
        assert_ne!(other.gid(), first.gid());
        let public = Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 8, 8, 8, 8]);
        let better = GidEntry { gid: public, ..entry(6, 0) };
        let found = again(&first, &port(), &[entry(3, 1), better]).unwrap();
        assert_eq!(found.gid(), public);
        assert!(again(&first, &port(), &[]).is_err());
    }

    #[test]
    fn other_identifier_or_mtu_is_a_change() {
        let first = first();
        let entries = [entry(3, 1)];
        let moved = again(&first, &Port { lid: 7, ..port() }, &entries).unwrap();
        assert_eq!((moved.generation, moved.lid), (1, 7));
        let mtu = again(&first, &Port { mtu: Mtu::Bytes1024, ..port() }, &entries).unwrap();
        assert_eq!((mtu.generation, mtu.connection.mtu), (1, Mtu::Bytes1024));
        let down = Port { state: PortState::Down, ..port() };
        assert!(again(&first, &down, &entries).unwrap_err().to_string().contains("is down"));
    }
}
