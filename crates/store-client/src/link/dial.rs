//! Connecting: tries every resolved address in turn, then switches to the master's Unix socket if
//! the same master answers there.

use std::{
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    sync::mpsc,
    time::Duration,
};

use mooncake_base::{Clock, Endpoint, Error, ErrorCode, Moment, Result, SystemClock, Token};
use mooncake_os::{call_limit, threads};
use mooncake_proto::{
    native_frame::{self, ServerGreeting},
    native_token::{self, ClientProof},
};
use socket2::{Domain, SockAddr, Socket, TcpKeepalive, Type};

use super::connection::{Connection, ExchangeError};
use crate::config::LinkConfig;

/// Time limit for the Unix socket to accept and greet; local, so either fast or broken.
const UNIX_TIMEOUT: Duration = Duration::from_secs(1);

/// Time without an acknowledgement from the master's host after which a connection is broken. While
/// the network is cut, TCP repeats a request at growing intervals: after a cut of 15 s, the next
/// one may be 10 s after the network works again. A new connection is made sooner. Several lost
/// packets in a row must not break a connection.
const UNACKNOWLEDGED_MAX: Duration = Duration::from_secs(8);

/// Idle time before the first keepalive probe, and time between probes. They find a cut while the
/// answer to a request that arrived is awaited.
const PROBE_AFTER: Duration = Duration::from_secs(5);
const PROBE_INTERVAL: Duration = Duration::from_secs(2);

/// Connects, exchanges greetings, and proves the token if there is one.
///
/// # Errors
/// No resolved address answers as a master that knows the same token; the error is that of the last
/// address tried.
pub(super) fn dial(to: &Endpoint, config: &LinkConfig, deadline: Moment) -> Result<Connection> {
    let token = config.token.as_ref();
    let (tcp, greeting) = dial_tcp(to, deadline, |greeted| authenticate(greeted, token, deadline))?;
    if config.may_use_unix_socket
        && !greeting.unix_socket.is_empty()
        && let Some(unix) = dial_unix(&greeting, token, deadline)
    {
        return Ok(unix);
    }
    Ok(tcp)
}

/// Returns the first greeting of the server at the address. A token is proven only to a server that
/// refuses, for its reason.
///
/// # Errors
/// No resolved address answers, or the server refuses; the error is that of the last address tried.
pub(super) fn greeting(
    to: &Endpoint,
    token: Option<&Token>,
    deadline: Moment,
) -> Result<ServerGreeting> {
    let accept = |greeted: Greeted| match &greeted.1.refusal {
        Some(_) => authenticate(greeted, token, deadline),
        None => Ok(greeted),
    };
    dial_tcp(to, deadline, accept).map(|(_, greeting)| greeting)
}

/// A connection and the last greeting received on it.
type Greeted = (Connection, ServerGreeting);

fn dial_tcp(
    to: &Endpoint,
    deadline: Moment,
    authenticate: impl Fn(Greeted) -> Result<Greeted>,
) -> Result<Greeted> {
    let mut last = unreachable("the host name of the master has no address");
    for address in resolve(to, deadline)? {
        let left = call_limit::capped(deadline).left(SystemClock.now());
        if left.is_zero() {
            return Err(unreachable("no connection to the master before the deadline"));
        }
        let connect = move || connect_tcp(address, left);
        let timed_out = || Err(io::ErrorKind::TimedOut.into());
        match call_limit::run_blocking(deadline, connect).unwrap_or_else(timed_out) {
            Ok(socket) => match greet(socket, deadline).and_then(&authenticate) {
                Ok(greeted) => return Ok(greeted),
                Err(error) => last = error.with("resolved", address),
            },
            Err(error) => {
                let text = "no connection to the master";
                let is_refused = error.kind() == io::ErrorKind::ConnectionRefused;
                last = unreachable(text).with("resolved", address).caused_by(error);
                if is_refused {
                    last = last.with_remedy(
                        "No program listens there: start `mooncake_master`, whose port is 50051 \
                         unless --rpc_port says otherwise, or correct the address.",
                    );
                }
            }
        }
    }
    Err(last)
}

fn connect_tcp(address: SocketAddr, timeout: Duration) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.connect_timeout(&address.into(), timeout)?;
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_user_timeout(Some(UNACKNOWLEDGED_MAX))?;
    let keepalive = TcpKeepalive::new().with_time(PROBE_AFTER).with_interval(PROBE_INTERVAL);
    socket.set_tcp_keepalive(&keepalive)?;
    Ok(socket)
}

/// Connects to the Unix socket named in the greeting, if it is reachable and the same master
/// answers there. Any process may bind an abstract name, so the master's id is compared.
fn dial_unix(tcp: &ServerGreeting, token: Option<&Token>, deadline: Moment) -> Option<Connection> {
    let deadline = deadline.min(SystemClock.now() + UNIX_TIMEOUT);
    let connect = || -> io::Result<Socket> {
        let address = SockAddr::unix(format!("\0{}", tcp.unix_socket))?;
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        // Limits the connect, too: it waits while the listener's backlog is full.
        socket.set_write_timeout(Some(UNIX_TIMEOUT))?;
        socket.connect(&address)?;
        Ok(socket)
    };
    let greeted = greet(connect().ok()?, deadline).ok()?;
    let (connection, greeting) = authenticate(greeted, token, deadline).ok()?;
    (greeting.master == tcp.master).then_some(connection)
}

fn greet(socket: Socket, deadline: Moment) -> Result<Greeted> {
    let mut connection = Connection::new(socket);
    let greeting = connection.greet(deadline).map_err(no_greeting)?;
    // A standby refuses, whatever its version: it answers no calls, and says who leads.
    if greeting.refusal.is_some() || greeting.version == native_frame::VERSION {
        Ok((connection, greeting))
    } else {
        let why = "the master speaks another version of the native protocol; install its version";
        Err(Error::new(ErrorCode::INVALID_VERSION, why)
            .with("master_version", greeting.version)
            .with("our_version", native_frame::VERSION))
    }
}

/// Proves the token to the master and has the master prove it.
///
/// # Errors
/// The refusal of a standby, or `ILLEGAL_CLIENT`: only one side has a token, or the tokens differ.
fn authenticate(
    (mut connection, greeting): Greeted,
    token: Option<&Token>,
    deadline: Moment,
) -> Result<Greeted> {
    let prove = |proof: &ClientProof| connection.prove(proof, deadline).map_err(no_greeting);
    let greeting = native_token::authenticate(token, greeting, prove)?;
    Ok((connection, greeting))
}

fn no_greeting(broken: ExchangeError) -> Error {
    match broken {
        ExchangeError::Unsent(source) | ExchangeError::Unanswered(source) => {
            unreachable("the server closed the connection instead of greeting").caused_by(source)
        }
        ExchangeError::Malformed(source) => {
            unreachable("the server is no mooncake master").caused_by(source)
        }
        ExchangeError::TimedOut => unreachable("the server did not greet in time"),
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
    threads::start_detached("mc-resolve", resolve_host).map_err(|source| {
        unreachable("cannot start a thread for the resolver").caused_by(source)
    })?;
    match call_limit::receive(&receiver, deadline) {
        Some(found) => found.map_err(|source: io::Error| {
            unreachable("the host name of the master cannot be resolved").caused_by(source)
        }),
        None => Err(unreachable("the host name of the master was not resolved in time")),
    }
}

fn unreachable(text: &str) -> Error {
    Error::new(ErrorCode::RPC_FAIL, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_is_given_up_while_the_network_is_cut() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let socket = connect_tcp(address, Duration::from_secs(5)).unwrap();
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(UNACKNOWLEDGED_MAX));
        assert!(socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), PROBE_AFTER);
        assert_eq!(socket.tcp_keepalive_interval().unwrap(), PROBE_INTERVAL);
    }
}
