//! Sockets for dummy clients: a TCP port, and an abstract Unix socket named after it.

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    os::{
        fd::OwnedFd,
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr as UnixAddr, UnixListener},
    },
};

use mooncake_base::{Error, Result};
use socket2::{Domain, Protocol, Socket, Type};

/// Length of the accept queue.
const BACKLOG: i32 = 1024;

/// The bound sockets for dummy clients.
#[derive(Debug)]
pub struct Listeners {
    tcp: Socket,
    unix: Option<Socket>,
    address: SocketAddr,
    unix_name: String,
}

impl Listeners {
    /// Binds the port (0: a free port) on every address, and the abstract Unix socket named after
    /// it.
    ///
    /// # Errors
    /// The port is taken.
    pub fn bind(port: u16) -> Result<Self> {
        let bound = listen_on(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)))
            .or_else(|_| listen_on(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))))
            .and_then(|tcp| Ok((tcp.local_addr()?.as_socket(), tcp)));
        let (address, tcp) = bound.map_err(|source| {
            let is_taken = source.kind() == io::ErrorKind::AddrInUse;
            let mut error =
                Error::invalid("the daemon cannot listen on the port; choose another one")
                    .with("port", port)
                    .with("option", "--port");
            if is_taken && let Some(holder) = mooncake_os::port_holder(port) {
                error = error.with("held_by", holder);
            }
            error.caused_by(source)
        })?;
        let address = address.ok_or_else(|| Error::internal("a listener has no address"))?;
        let name = format!("mooncake_client_{}.sock", address.port());
        let unix = UnixAddr::from_abstract_name(&name)
            .and_then(|at| UnixListener::bind_addr(&at))
            .map(|listener| Socket::from(OwnedFd::from(listener)))
            .inspect_err(|error| {
                tracing::warn!(%error, name, "cannot bind the Unix socket; using TCP only");
            })
            .ok();
        let unix_name = if unix.is_some() { name } else { String::new() };
        Ok(Self { tcp, unix, address, unix_name })
    }

    /// The address for dummy clients of this host.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.address.port()))
    }

    /// Name of the Unix socket; empty if there is none.
    pub(crate) fn unix_name(&self) -> &str {
        &self.unix_name
    }

    /// All sockets.
    pub(crate) fn into_sockets(self) -> impl Iterator<Item = Socket> {
        std::iter::once(self.tcp).chain(self.unix)
    }
}

fn listen_on(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket)
}
