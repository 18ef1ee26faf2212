//! Connects to a peer from the calling thread, within a deadline, trying all addresses of its name.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs},
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc::sync_channel,
    },
    time::Duration,
};

use mooncake_base::{Clock, Endpoint, Error, ErrorCode, Moment, Result, SystemClock};

use crate::{call_limit, threads};

/// Maximum number of addresses that are tried per name.
const ADDRESSES_MAX: usize = 16;

/// Maximum number of concurrent name lookups. The system's resolver has no timeout, so a lookup may
/// outlive the call that started it.
const LOOKUPS_MAX: usize = 32;

static LOOKUPS: AtomicUsize = AtomicUsize::new(0);

/// Connects to the first address of the endpoint that accepts.
///
/// # Errors
/// No address accepted before the deadline; the error names the endpoint and the last failure.
pub fn dial(endpoint: &Endpoint, deadline: Moment) -> Result<TcpStream> {
    let addresses = resolve(endpoint, deadline)?;
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for (index, address) in addresses.iter().enumerate() {
        let left = call_limit::capped(deadline).left(SystemClock.now());
        if left.is_zero() {
            last = io::ErrorKind::TimedOut.into();
            break;
        }
        // A silent address must leave time for the addresses after it.
        let share = left / u32::try_from(addresses.len() - index).unwrap_or(1);
        let (address, share) = (*address, share.max(Duration::from_millis(1)));
        let connect = move || TcpStream::connect_timeout(&address, share);
        match call_limit::run_blocking(deadline, connect) {
            Some(Ok(stream)) => return Ok(stream),
            Some(Err(failure)) => last = failure,
            None => last = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(unreachable(endpoint, last))
}

/// Returns whether the host refused the connection, which means that no process listens there.
pub fn is_refused(error: &Error) -> bool {
    std::error::Error::source(error)
        .and_then(|source| source.downcast_ref::<io::Error>())
        .is_some_and(|source| source.kind() == io::ErrorKind::ConnectionRefused)
}

/// Wraps an I/O failure of a peer; a timeout has an error code of its own.
pub fn peer_error(message: &str, endpoint: &Endpoint, source: io::Error) -> Error {
    let code = match source.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => ErrorCode::RPC_TIMEOUT,
        _ => ErrorCode::TRANSFER_FAIL,
    };
    Error::new(code, message).with("peer", endpoint).caused_by(source)
}

fn unreachable(endpoint: &Endpoint, source: io::Error) -> Error {
    peer_error("the peer cannot be reached", endpoint, source)
}

/// Returns the addresses of the endpoint, at least one.
pub fn resolve(endpoint: &Endpoint, deadline: Moment) -> Result<Vec<SocketAddr>> {
    let Some(port) = endpoint.port.filter(|port| *port != 0) else {
        return Err(Error::invalid("the address of the peer has no port").with("peer", endpoint));
    };
    if let Ok(address) = endpoint.host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let addresses = look_up(endpoint.host.clone(), port, deadline).map_err(|source| {
        peer_error("the name of the peer cannot be resolved", endpoint, source)
    })?;
    if addresses.is_empty() {
        return Err(unreachable(endpoint, io::ErrorKind::AddrNotAvailable.into()));
    }
    Ok(addresses)
}

/// Resolves a name on a separate thread, which ends with the lookup.
fn look_up(host: String, port: u16, deadline: Moment) -> io::Result<Vec<SocketAddr>> {
    if LOOKUPS.fetch_add(1, Ordering::Relaxed) >= LOOKUPS_MAX {
        LOOKUPS.fetch_sub(1, Ordering::Relaxed);
        return Err(io::Error::other("too many names are being looked up at once"));
    }
    let (answer, answered) = sync_channel(1);
    let thread = threads::start_detached("mooncake-lookup", move || {
        let found = (host.as_str(), port)
            .to_socket_addrs()
            .map(|addresses| addresses.take(ADDRESSES_MAX).collect::<Vec<_>>());
        LOOKUPS.fetch_sub(1, Ordering::Relaxed);
        // The receiver may have timed out; then the result is of no use.
        let _ = answer.send(found);
    });
    if let Err(failure) = thread {
        LOOKUPS.fetch_sub(1, Ordering::Relaxed);
        return Err(failure);
    }
    call_limit::receive(&answered, deadline).unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn soon() -> Moment {
        SystemClock.now() + Duration::from_secs(20)
    }

    #[test]
    fn reaches_names_and_both_address_families() {
        for host in ["127.0.0.1", "::1", "localhost"] {
            let Ok(listener) = TcpListener::bind((host, 0)) else { continue };
            let port = listener.local_addr().unwrap().port();
            dial(&Endpoint::new(host, port), soon()).unwrap();
        }
    }

    #[test]
    fn tries_all_addresses_of_a_name() {
        // Where `localhost` has two addresses, only one of them listens here.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        dial(&Endpoint::new("localhost", port), soon()).unwrap();
    }

    #[test]
    fn refused_connection_differs_from_other_failures() {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let refused = dial(&Endpoint::new("127.0.0.1", port), soon()).unwrap_err();
        assert!(is_refused(&refused), "{refused}");
        assert!(refused.to_string().contains("127.0.0.1"), "{refused}");
        let late = dial(&Endpoint::new("127.0.0.1", port), SystemClock.now()).unwrap_err();
        assert_eq!(late.code(), ErrorCode::RPC_TIMEOUT);
        assert!(dial(&Endpoint { host: "127.0.0.1".into(), port: None }, soon()).is_err());
    }
}
