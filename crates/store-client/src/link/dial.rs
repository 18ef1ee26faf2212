//! Connecting: tries every resolved address in turn, then switches to the master's Unix socket if
//! the same master answers there.

use std::{
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    sync::mpsc,
    time::Duration,
};

use mooncake_base::{Clock, Endpoint, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_proto::native_frame::{self, ServerGreeting};
use socket2::{Domain, SockAddr, Socket, Type};

use super::connection::{Connection, ExchangeError};

/// Time limit for the Unix socket to accept and greet; local, so either fast or broken.
const UNIX_TIMEOUT: Duration = Duration::from_secs(1);

/// Connects and exchanges greetings.
///
/// # Errors
/// No resolved address answers as a master; the error is that of the last address tried.
pub(super) fn dial(to: &Endpoint, may_use_unix: bool, deadline: Moment) -> Result<Connection> {
    let (tcp, greeting) = dial_tcp(to, deadline)?;
    if may_use_unix
        && !greeting.unix_socket.is_empty()
        && let Some(unix) = dial_unix(&greeting, deadline)
    {
        return Ok(unix);
    }
    Ok(tcp)
}

/// Returns the greeting of the server at the address.
///
/// # Errors
/// Same as [`dial`].
pub(super) fn greeting(to: &Endpoint, deadline: Moment) -> Result<ServerGreeting> {
    dial_tcp(to, deadline).map(|(_, greeting)| greeting)
}

fn dial_tcp(to: &Endpoint, deadline: Moment) -> Result<(Connection, ServerGreeting)> {
    let mut last = unreachable("the host name of the master has no address");
    for address in resolve(to, deadline)? {
        let left = deadline.left(SystemClock.now());
        if left.is_zero() {
            return Err(unreachable("no connection to the master before the deadline"));
        }
        match connect_tcp(address, left) {
            Ok(socket) => match greet(socket, deadline) {
                Ok(greeted) => return Ok(greeted),
                Err(error) => last = error.with("resolved", address),
            },
            Err(error) => {
                let text = "no connection to the master";
                last = unreachable(text).with("resolved", address).caused_by(error);
            }
        }
    }
    Err(last)
}

fn connect_tcp(address: SocketAddr, timeout: Duration) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.connect_timeout(&address.into(), timeout)?;
    socket.set_tcp_nodelay(true)?;
    Ok(socket)
}

/// Connects to the Unix socket named in the greeting, if it is reachable and the same master
/// answers there. Any process may bind an abstract name, so the master's id is compared.
fn dial_unix(tcp: &ServerGreeting, deadline: Moment) -> Option<Connection> {
    let deadline = deadline.min(SystemClock.now() + UNIX_TIMEOUT);
    let connect = || -> io::Result<Socket> {
        let address = SockAddr::unix(format!("\0{}", tcp.unix_socket))?;
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        // Limits the connect, too: it waits while the listener's backlog is full.
        socket.set_write_timeout(Some(UNIX_TIMEOUT))?;
        socket.connect(&address)?;
        Ok(socket)
    };
    let (connection, greeting) = greet(connect().ok()?, deadline).ok()?;
    (greeting.master == tcp.master).then_some(connection)
}

fn greet(socket: Socket, deadline: Moment) -> Result<(Connection, ServerGreeting)> {
    let mut connection = Connection::new(socket);
    let greeting = connection.greet(deadline).map_err(|broken| match broken {
        ExchangeError::Unsent(source) | ExchangeError::Unanswered(source) => {
            unreachable("the server closed the connection instead of greeting").caused_by(source)
        }
        ExchangeError::Malformed(source) => {
            unreachable("the server is no mooncake master").caused_by(source)
        }
        ExchangeError::TimedOut => unreachable("the server did not greet in time"),
    })?;
    if greeting.version == native_frame::VERSION {
        Ok((connection, greeting))
    } else {
        Err(Error::new(ErrorCode::INVALID_VERSION, "the master speaks another native version")
            .with("master_version", greeting.version)
            .with("our_version", native_frame::VERSION))
    }
}

/// Resolves the host name; addresses keep the resolver's order. The resolver has no deadline, so a
/// name is resolved on a thread that may be left behind.
fn resolve(to: &Endpoint, deadline: Moment) -> Result<Vec<SocketAddr>> {
    let port = to.port.unwrap_or(0);
    if let Ok(address) = to.host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let (sender, receiver) = mpsc::sync_channel(1);
    let host = to.host.clone();
    let resolve_host = move || {
        let found = (host.as_str(), port).to_socket_addrs().map(Iterator::collect);
        // Fails if the caller has stopped waiting.
        let _ = sender.send(found);
    };
    std::thread::Builder::new().name("mc-resolve".to_owned()).spawn(resolve_host).map_err(
        |source| unreachable("cannot start a thread for the resolver").caused_by(source),
    )?;
    match receiver.recv_timeout(deadline.left(SystemClock.now())) {
        Ok(found) => found.map_err(|source: io::Error| {
            unreachable("the host name of the master cannot be resolved").caused_by(source)
        }),
        Err(_) => Err(unreachable("the host name of the master was not resolved in time")),
    }
}

fn unreachable(text: &str) -> Error {
    Error::new(ErrorCode::RPC_FAIL, text)
}
