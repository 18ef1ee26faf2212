//! The listeners of an engine and the address under which peers reach it.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket},
};

use mooncake_base::{EngineId, Error, ErrorCode, Result};
use socket2::SockRef;

use crate::config::EngineConfig;

/// Number of ports of the range that are tried before the system chooses one.
const TRIES: usize = 64;

/// The two listeners of an engine.
#[derive(Debug)]
pub(super) struct Listeners {
    /// The host that is published to peers.
    pub(super) host: String,
    pub(super) rpc: TcpListener,
    pub(super) data: TcpListener,
}

impl Listeners {
    pub(super) fn bind(config: &EngineConfig) -> Result<Self> {
        let endpoint = config.endpoint()?;
        let host = match (&config.bind_address, &endpoint) {
            (Some(address), _) => address.clone(),
            (None, Some(endpoint)) if config.is_p2p() || is_loopback(&endpoint.host) => {
                endpoint.host.clone()
            }
            // With a metadata server the name need not be an address.
            _ => own_address(config.is_ipv6_preferred).to_string(),
        };
        let address = match &config.bind_address {
            Some(address) => parse(address)?,
            None if is_loopback(&host) => loopback(&host),
            None => wildcard(&host),
        };
        let fixed = endpoint.and_then(|endpoint| endpoint.port).filter(|_| config.is_port_fixed);
        let rpc = match fixed {
            Some(port) => listen(address, port)
                .map_err(|error| refused(error).with("address", SocketAddr::new(address, port)))?,
            None => listen_in_range(address, config)?,
        };
        // Calling `listen` again changes the backlog of a listening socket.
        SockRef::from(&rpc).listen(i32::from(config.handshake_backlog)).map_err(refused)?;
        let data = listen_in_range(address, config)?;
        Ok(Self { host, rpc, data })
    }
}

/// Tries ports in random order, so that engines that start together do not race for the same ones.
fn listen_in_range(address: IpAddr, config: &EngineConfig) -> Result<TcpListener> {
    let (first, last) = (*config.ports.start(), *config.ports.end());
    let count = u64::from(last.saturating_sub(first)) + 1;
    let mut random = EngineId::random().halves().0;
    for _ in 0..TRIES.min(usize::try_from(count).unwrap_or(TRIES)) {
        let offset = u16::try_from(random % count).expect("a remainder of a number of ports");
        if first > last || first == 0 {
            break;
        }
        match listen(address, first + offset) {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            Err(error) => return Err(refused(error).with("address", address)),
        }
        random = EngineId::random().halves().0;
    }
    listen(address, 0).map_err(|error| refused(error).with("address", address))
}

fn listen(address: IpAddr, port: u16) -> io::Result<TcpListener> {
    TcpListener::bind(SocketAddr::new(address, port))
}

fn refused(error: io::Error) -> Error {
    Error::new(ErrorCode::INVALID_PARAMS, "the engine cannot listen on this address")
        .caused_by(error)
}

fn parse(address: &str) -> Result<IpAddr> {
    let text = address.trim_start_matches('[').trim_end_matches(']');
    text.parse().map_err(|_| {
        Error::invalid("the address to bind is not an IP address").with("address", address)
    })
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn loopback(host: &str) -> IpAddr {
    host.parse().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
}

/// The wildcard address, in the family of the host's address. Peers may come over any network.
fn wildcard(host: &str) -> IpAddr {
    match host.parse() {
        Ok(IpAddr::V6(_)) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        _ => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    }
}

/// The address that this host uses for outgoing connections.
fn own_address(is_ipv6_preferred: bool) -> IpAddr {
    // Addresses reserved for documentation: only the choice of a route matters.
    let six = SocketAddr::from((Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 9));
    let four = SocketAddr::from((Ipv4Addr::new(192, 0, 2, 1), 9));
    let outward = [six, four].into_iter().skip(usize::from(!is_ipv6_preferred));
    let found = outward.filter_map(|outward| address_facing(outward).ok()).next();
    found.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
}

/// Returns this host's address on the network that leads to another host. Sends no packet.
///
/// # Errors
/// There is no route to the other host.
pub fn address_facing(other: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = match other {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(other)?;
    Ok(socket.local_addr()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefers_the_wanted_address_family() {
        assert!(own_address(false).is_ipv4());
        let six = SocketAddr::from((Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 9));
        assert_eq!(own_address(true).is_ipv6(), address_facing(six).is_ok());
    }
}
