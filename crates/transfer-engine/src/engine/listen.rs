//! The listeners of an engine and the address under which peers reach it.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket},
    time::Duration,
};

use mooncake_base::{Clock, Endpoint, EngineId, Error, ErrorCode, Result, SystemClock};
use socket2::SockRef;

use mooncake_os::dial::resolve;

use super::Engine;
use crate::config::EngineConfig;

/// Time limit for resolving the name of the metadata server.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(2);

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
            (None, Some(endpoint))
                if config.is_p2p()
                    || is_loopback(&endpoint.host) && metadata_address(config).is_none() =>
            {
                endpoint.host.clone()
            }
            // With a metadata server the name need not be an address.
            (None, Some(endpoint)) if is_own_address(&endpoint.host) => endpoint.host.clone(),
            _ => published_address(config).to_string(),
        };
        let address = match &config.bind_address {
            Some(address) => parse(address)?,
            None if is_loopback(&host) => loopback(&host),
            None => wildcard(&host),
        };
        if is_foreign(&host) {
            tracing::warn!(
                host,
                "this machine has no such address: peers are told to come there, and reach this \
                 process only if the network translates it"
            );
        }
        let rpc_address = match &config.rdma_bind_address {
            // Peers come by either address.
            Some(other) if parse(other)? != address => {
                let is_six = parse(other)?.is_ipv6() || address.is_ipv6();
                wildcard(if is_six { "::" } else { "0.0.0.0" })
            }
            _ => address,
        };
        let fixed =
            if config.is_port_fixed { endpoint.and_then(|endpoint| endpoint.port) } else { None };
        let rpc = match fixed {
            Some(port) => listen(rpc_address, port).map_err(|error| {
                refused(error).with("address", SocketAddr::new(rpc_address, port))
            })?,
            None => listen_in_range(rpc_address, config, 2)?,
        };
        // Calling `listen` again changes the backlog of a listening socket.
        SockRef::from(&rpc).listen(i32::from(config.handshake_backlog)).map_err(refused)?;
        let data = listen_in_range(address, config, if fixed.is_some() { 1 } else { 2 })?;
        Ok(Self { host, rpc, data })
    }
}

impl Engine {
    /// Binds a listener of another protocol of this process, on a port of the range that peers may reach.
    ///
    /// # Errors
    /// No port of the range is free.
    pub fn listen_beside(&self, address: IpAddr) -> Result<TcpListener> {
        listen_in_range(address, &self.inner.config, 1)
    }
}

/// Tries the ports of the range from a random one on, so that engines that start together do not
/// race for the same ones. A range that begins with 0 lets the system choose. `wanted` is the number
/// of ports of the range that are needed at least.
fn listen_in_range(address: IpAddr, config: &EngineConfig, wanted: u32) -> Result<TcpListener> {
    let (first, last) = (*config.ports.start(), *config.ports.end());
    if first == 0 {
        return listen(address, 0).map_err(|error| refused(error).with("address", address));
    }
    let count = u32::from(last.saturating_sub(first)) + 1;
    let start = EngineId::random().halves().0 % u64::from(count);
    for port in (first..=last).cycle().skip(start as usize).take(count as usize) {
        match listen(address, port) {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            Err(error) => return Err(refused(error).with("address", address)),
        }
    }
    // A port outside of the range may be closed to the peers.
    let why = "all ports between MC_MIN_RPC_PORT and MC_MAX_RPC_PORT are taken";
    Err(Error::new(ErrorCode::INVALID_PARAMS, why)
        .with("address", address)
        .with("ports", format_args!("{first}-{last}"))
        .with("needed", wanted)
        .with_remedy(
            "Widen the range of MC_MIN_RPC_PORT and MC_MAX_RPC_PORT; an engine needs two, and a third \
             where a process keeps copies on disk.",
        ))
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

/// Returns whether the text is an address of this host under which other hosts may reach it.
fn is_own_address(host: &str) -> bool {
    host.parse::<IpAddr>().is_ok_and(|address| {
        let is_shared = address.is_loopback() || address.is_unspecified();
        !is_shared && UdpSocket::bind((address, 0)).is_ok()
    })
}

/// Returns whether the text is an address that this host does not have.
fn is_foreign(host: &str) -> bool {
    host.parse::<IpAddr>().is_ok_and(|address| UdpSocket::bind((address, 0)).is_err())
}

/// The address that is published on a metadata server: the one on the network that leads to that
/// server, since the peers reach it as well. A server on this host says nothing about the peers.
fn published_address(config: &EngineConfig) -> IpAddr {
    metadata_address(config).unwrap_or_else(|| own_address(config.is_ipv6_preferred))
}

/// This host's address on the network that leads to the metadata server; `None` if the server is on
/// loopback or its name cannot be resolved.
fn metadata_address(config: &EngineConfig) -> Option<IpAddr> {
    if config.is_p2p() {
        return None;
    }
    let mut server = server_endpoint(&config.metadata)?;
    if is_loopback(&server.host) {
        return None;
    }
    server.port.get_or_insert(80);
    let found = resolve(&server, SystemClock.now() + RESOLVE_TIMEOUT);
    let mut servers = found
        .inspect_err(|error| tracing::debug!(%error, "the metadata server is not resolved"))
        .ok()?;
    servers.sort_by_key(|server| server.is_ipv6() != config.is_ipv6_preferred);
    let mut own = servers.into_iter().filter_map(|server| address_facing(server).ok());
    own.find(|address| !address.is_loopback())
}

/// Returns the first server of a metadata address, such as `http://user@host:80/metadata` or
/// `etcd://a:2379;b:2379`.
fn server_endpoint(metadata: &str) -> Option<Endpoint> {
    let text = metadata.split_once("://").map_or(metadata, |(_, rest)| rest);
    let text = text.split(['/', ';', ',', '?']).next()?;
    let text = text.rsplit_once('@').map_or(text, |(_, server)| server);
    text.parse().ok()
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

    fn config(name: &str, metadata: &str) -> EngineConfig {
        EngineConfig {
            name: name.to_owned(),
            metadata: metadata.to_owned(),
            ..EngineConfig::default()
        }
    }

    #[test]
    fn finds_the_server_in_a_metadata_address() {
        let cases = [
            ("http://10.0.0.1:8080/metadata", "10.0.0.1:8080"),
            ("http://[::2]:80/metadata?x=1", "[::2]:80"),
            ("redis://:secret@host:6379/0", "host:6379"),
            ("etcd://a:2379;b:2379", "a:2379"),
            ("etcd-host:2379", "etcd-host:2379"),
        ];
        for (metadata, expected) in cases {
            assert_eq!(server_endpoint(metadata).unwrap().to_string(), expected);
        }
    }

    #[test]
    fn publishes_the_address_towards_the_metadata_server() {
        // Without a network this is loopback, and so is the server.
        let own = own_address(false);
        let remote = format!("http://{own}:1/metadata");
        for name in ["some-name", "127.0.0.1", "192.0.2.77"] {
            let listeners = Listeners::bind(&config(name, &remote)).unwrap();
            assert_eq!(listeners.host, own.to_string(), "{name}");
        }
        for metadata in [&*remote, "http://127.0.0.1:1/metadata"] {
            let listeners = Listeners::bind(&config(&own.to_string(), metadata)).unwrap();
            assert_eq!(listeners.host, own.to_string());
        }
    }

    /// Returns a port whose neighbor is free, too.
    fn two_free_ports() -> u16 {
        loop {
            let first = listen(Ipv4Addr::LOCALHOST.into(), 0).unwrap();
            let port = first.local_addr().unwrap().port();
            if port < u16::MAX && listen(Ipv4Addr::LOCALHOST.into(), port + 1).is_ok() {
                return port;
            }
        }
    }

    #[test]
    fn handshake_socket_is_reached_by_both_addresses() {
        let both = EngineConfig {
            bind_address: Some("127.0.0.1".to_owned()),
            rdma_bind_address: Some("127.0.0.2".to_owned()),
            ..config("", "P2PHANDSHAKE")
        };
        let listeners = Listeners::bind(&both).unwrap();
        let (rpc, data) =
            (listeners.rpc.local_addr().unwrap(), listeners.data.local_addr().unwrap());
        assert!(rpc.ip().is_unspecified(), "{rpc}");
        assert_eq!((listeners.host.as_str(), data.ip()), ("127.0.0.1", loopback("127.0.0.1")));
        let wrong = EngineConfig { rdma_bind_address: Some("ib0".to_owned()), ..both };
        assert!(Listeners::bind(&wrong).is_err());
    }

    #[test]
    fn listens_within_its_range_only() {
        let first = two_free_ports();
        let narrow = |last| EngineConfig {
            ports: first..=last,
            ..config("127.0.0.1", EngineConfig::default().metadata.as_str())
        };
        let error = Listeners::bind(&narrow(first)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(&format!("ports={first}-{first} needed=2")), "{text}");
        let remedy = "Widen the range of MC_MIN_RPC_PORT and MC_MAX_RPC_PORT; ";
        assert!(error.remedy().starts_with(remedy), "{error:?}");
        let pair = Listeners::bind(&narrow(first + 1)).unwrap();
        let mut ports = [&pair.rpc, &pair.data].map(|each| each.local_addr().unwrap().port());
        ports.sort_unstable();
        assert_eq!(ports, [first, first + 1]);
        assert!(Listeners::bind(&narrow(first + 1)).is_err(), "both are taken");
    }

    #[test]
    fn range_from_zero_lets_the_system_choose() {
        let any = EngineConfig { ports: 0..=0, ..config("127.0.0.1", "P2PHANDSHAKE") };
        assert_ne!(Listeners::bind(&any).unwrap().data.local_addr().unwrap().port(), 0);
    }

    #[test]
    fn own_address_is_neither_loopback_nor_of_another_host() {
        for other in ["127.0.0.1", "0.0.0.0", "::", "192.0.2.1", "a-name"] {
            assert!(!is_own_address(other), "{other}");
            assert_eq!(is_foreign(other), other == "192.0.2.1", "{other}");
        }
    }
}
