//! Addresses of a port (GIDs), and which of them peers should use.

use std::{
    fmt, fs,
    net::{Ipv4Addr, Ipv6Addr},
    path::Path,
};

use rdma_sys::ibv_gid;

use crate::{Context, Error, LinkLayer, Port, Result, library::KindOfGid};

/// An address of a port: 16 bytes, on Ethernet an IPv6 address or an IPv4 one mapped into it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Gid(pub [u8; 16]);

/// A used entry of a port's address table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GidEntry {
    /// Index in the table.
    pub index: u8,
    /// The address.
    pub gid: Gid,
    /// Protocol of packets that are sent from this entry.
    pub kind: GidKind,
    /// Name of the network interface with this address, if there is one.
    pub interface: Option<String>,
}

/// Protocol of the packets of an address. Both ends of a connection use the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GidKind {
    /// InfiniBand.
    InfiniBand,
    /// RDMA directly over Ethernet, which no router forwards.
    RoceV1,
    /// RDMA over UDP.
    RoceV2,
}

/// Scope of an address, in descending order of preference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Scope {
    /// Reachable from other networks.
    Routable,
    /// An IPv4 address for private networks.
    Private,
    /// Reachable on one link only.
    LinkLocal,
}

/// Interfaces of container networks: their addresses exist on many hosts at once.
const OVERLAY_PREFIXES: [&str; 9] =
    ["docker", "br-", "cni", "flannel", "cali", "veth", "virbr", "vxlan", "tunl"];

/// Where the kernel describes RDMA devices.
const SYSFS: &str = "/sys/class/infiniband";

impl Context {
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

    /// Returns the used entries of a port's address table, by index.
    ///
    /// # Errors
    /// Same as [`Self::port`] and [`Self::gid`].
    pub fn gids(&self, port: u8) -> Result<Vec<GidEntry>> {
        let attributes =
            Path::new(SYSFS).join(self.device().name()).join(format!("ports/{port}/gid_attrs"));
        let mut used = Vec::new();
        let Port { gid_count, link_layer, .. } = self.port(port)?;
        // An address vector has one byte for the index.
        for index in 0..=u8::try_from(gid_count.saturating_sub(1)).unwrap_or(u8::MAX) {
            if gid_count == 0 {
                break;
            }
            let gid = self.gid(port, index.into())?;
            if gid.is_unused() {
                continue;
            }
            let read = |folder: &str| {
                let text = fs::read_to_string(attributes.join(folder).join(index.to_string()));
                text.ok().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
            };
            let text = read("types");
            // The files of the kernel may be hidden from a container.
            let known = if text.is_none() { self.kind_of_gid(port, index) } else { None };
            let kind = known.unwrap_or_else(|| GidKind::parse(text.as_deref(), link_layer));
            used.push(GidEntry { index, gid, kind, interface: read("ndevs") });
        }
        Ok(used)
    }

    /// Asks the library for the kind of an entry, if it can tell.
    fn kind_of_gid(&self, port: u8, index: u8) -> Option<GidKind> {
        let query = self.library().functions._ibv_query_gid_ex?;
        let mut entry = KindOfGid::default();
        let size = size_of::<KindOfGid>();
        let (port, index) = (port.into(), index.into());
        // SAFETY: the context is open while `self` lives, and `entry` lives past the call and has the size
        // that the library is told.
        let code = unsafe { query(self.as_ptr(), port, index, &raw mut entry, 0, size) };
        (code == 0).then(|| GidKind::from_code(entry.kind)).flatten()
    }
}

impl Gid {
    /// Returns whether the entry is unused: its interface part is zero.
    pub fn is_unused(&self) -> bool {
        self.0[8..] == [0; 8]
    }

    /// Returns the IPv4 address that is mapped into this one, if there is one.
    pub fn ipv4(&self) -> Option<Ipv4Addr> {
        Ipv6Addr::from(self.0).to_ipv4_mapped()
    }

    fn scope(&self) -> Scope {
        if let Some(address) = self.ipv4() {
            let [first, second, ..] = address.octets();
            // RFC 6598: shared by customers of a carrier.
            let is_shared = first == 100 && second & 0xc0 == 64;
            return match () {
                () if address.is_link_local() || address.is_loopback() => Scope::LinkLocal,
                () if address.is_private() || is_shared => Scope::Private,
                () => Scope::Routable,
            };
        }
        if self.0[0] == 0xfe && self.0[1] & 0xc0 == 0x80 {
            Scope::LinkLocal
        } else {
            Scope::Routable
        }
    }
}

impl GidEntry {
    /// Returns whether the address belongs to the network of containers of this host.
    fn is_overlay(&self) -> bool {
        let is_of = |name: &String| OVERLAY_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
        self.interface.as_ref().is_some_and(is_of)
    }

    /// Returns whether peers may use this entry as well as another one.
    pub fn is_as_good_as(&self, other: &Self) -> bool {
        self.kind == other.kind && self.rank() <= other.rank()
    }

    /// Returns the place in the order of preference; lower is better.
    fn rank(&self) -> u8 {
        let has_interface = self.interface.is_some();
        match self.gid.scope() {
            _ if self.is_overlay() => 3,
            Scope::Routable if has_interface => 0,
            Scope::Routable => 1,
            Scope::Private if has_interface => 2,
            Scope::LinkLocal if has_interface => 3,
            Scope::Private => 4,
            Scope::LinkLocal => 5,
        }
    }
}

/// Returns the entries that peers can be addressed from, the best first.
///
/// RoCE v1 entries are left out, since no router forwards their packets. An address of a network
/// interface comes before one without, a routable one before a private one, and addresses of container
/// networks and link-local ones come last. Among equals the lowest index wins, so that all hosts with
/// the same setup choose the same kind.
pub fn rank_gids(mut entries: Vec<GidEntry>) -> Vec<GidEntry> {
    entries.retain(|entry| entry.kind != GidKind::RoceV1);
    entries.sort_by_key(|entry| (entry.rank(), entry.index));
    entries
}

impl GidKind {
    /// Returns the kind for the text of the kernel, which is the same for an InfiniBand port and a RoCE
    /// v1 entry. A kernel that says nothing of an Ethernet port is taken to speak RoCE v2.
    fn parse(text: Option<&str>, link_layer: LinkLayer) -> Self {
        match (text, link_layer) {
            (Some("RoCE v2"), _) | (None, LinkLayer::Ethernet) => Self::RoceV2,
            (Some(_), LinkLayer::Ethernet) => Self::RoceV1,
            _ => Self::InfiniBand,
        }
    }

    /// Returns the kind with a number of `ibv_gid_type`.
    fn from_code(code: u32) -> Option<Self> {
        [Self::InfiniBand, Self::RoceV1, Self::RoceV2].get(code as usize).copied()
    }
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "InfiniBand",
            Self::RoceV1 => "RoCE v1",
            Self::RoceV2 => "RoCE v2",
        })
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

    fn entry(index: u8, address: &str, kind: GidKind, interface: &str) -> GidEntry {
        let address = match address.parse::<Ipv4Addr>() {
            Ok(address) => address.to_ipv6_mapped(),
            Err(_) => address.parse().expect("an address"),
        };
        let interface = (!interface.is_empty()).then(|| interface.to_owned());
        GidEntry { index, gid: Gid(address.octets()), kind, interface }
    }

    fn order(entries: &[GidEntry]) -> Vec<u8> {
        rank_gids(entries.to_vec()).iter().map(|entry| entry.index).collect()
    }

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
        assert_eq!(gid.ipv4(), Some(Ipv4Addr::new(10, 77, 0, 1)));
    }

    #[test]
    fn routable_address_of_an_interface_is_best() {
        use GidKind::{RoceV1, RoceV2};
        let entries = [
            entry(0, "fe80::1", RoceV1, "eth0"),
            entry(1, "fe80::1", RoceV2, "eth0"),
            entry(2, "10.1.2.3", RoceV1, "eth0"),
            entry(3, "10.1.2.3", RoceV2, "eth0"),
            entry(4, "172.17.0.1", RoceV2, "docker0"),
            entry(5, "10.9.9.9", RoceV2, ""),
            entry(6, "2001:db8::7", RoceV2, ""),
            entry(7, "8.8.8.8", RoceV2, "eth1"),
        ];
        assert_eq!(order(&entries), [7, 6, 3, 1, 4, 5]);
    }

    #[test]
    fn lowest_index_wins_among_equals() {
        let of = |index| entry(index, "10.0.0.1", GidKind::RoceV2, "eth0");
        assert_eq!(order(&[of(9), of(3), of(5)]), [3, 5, 9]);
    }

    #[test]
    fn carrier_and_private_ranges_are_private() {
        for (address, expected) in [
            ("100.64.0.1", Scope::Private),
            ("100.128.0.1", Scope::Routable),
            ("192.168.1.1", Scope::Private),
            ("169.254.7.7", Scope::LinkLocal),
            ("fd00::1", Scope::Routable),
        ] {
            assert_eq!(entry(0, address, GidKind::RoceV2, "").gid.scope(), expected, "{address}");
        }
    }

    #[test]
    fn kernel_text_tells_the_kind() {
        use LinkLayer::{Ethernet, InfiniBand};
        assert_eq!(GidKind::parse(Some("RoCE v2"), Ethernet), GidKind::RoceV2);
        assert_eq!(GidKind::parse(Some("IB/RoCE v1"), Ethernet), GidKind::RoceV1);
        assert_eq!(GidKind::parse(Some("IB/RoCE v1"), InfiniBand), GidKind::InfiniBand);
        assert_eq!(GidKind::parse(None, InfiniBand), GidKind::InfiniBand);
    }
}
