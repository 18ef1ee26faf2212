//! The socket options that both ends set on every connection.

use std::{fs, io, sync::OnceLock, time::Duration};

use socket2::{SockAddr, SockRef, TcpKeepalive};

/// The time that sent bytes may stay unacknowledged before the peer's host is considered dead.
const UNACKNOWLEDGED_MAX: Duration = Duration::from_secs(20);

/// The requested size of the send buffer to a peer on this host; the kernel doubles it. A small
/// buffer keeps the bytes in flight in the CPU cache until the peer copies them out. By default the
/// buffer grows to megabytes, which helps on links with a high latency but on loopback only evicts
/// the bytes from the cache.
const LOCAL_SEND_BYTES: usize = 256 << 10;

/// The minimum useful send buffer. A smaller buffer may not hold one packet of the loopback device;
/// each packet would then wait for a delayed acknowledgement.
const LOCAL_SEND_BYTES_MIN: usize = 128 << 10;

/// Sets the options of a connection: detection of dead hosts with bytes in flight (a limit for
/// missing acknowledgements) and without (keepalive probes), no delay of small packets, and for
/// peers on this host the options that suit loopback.
pub(super) fn set_socket_options(socket: SockRef<'_>) -> io::Result<()> {
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(10))
        .with_interval(Duration::from_secs(5))
        .with_retries(3);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.set_tcp_user_timeout(Some(UNACKNOWLEDGED_MAX))?;
    socket.set_tcp_nodelay(true)?;
    if is_local(&socket) {
        set_local_options(&socket);
    }
    Ok(())
}

/// Returns whether the peer is on this host, where only the CPUs limit the throughput.
pub(super) fn is_local(socket: &SockRef<'_>) -> bool {
    let ip = |address: io::Result<SockAddr>| address.ok()?.as_socket().map(|known| known.ip());
    let own = ip(socket.local_addr());
    own.is_some() && own == ip(socket.peer_addr())
}

/// Sets the options for loopback. Failures are ignored: they only cost throughput.
fn set_local_options(socket: &SockRef<'_>) {
    if send_bytes_max() >= LOCAL_SEND_BYTES_MIN {
        let _ = socket.set_send_buffer_size(LOCAL_SEND_BYTES);
    }
    // Loopback has no congestion, but some congestion controls pace the bytes regardless.
    let _ = socket.set_tcp_congestion(b"reno");
}

/// Returns the system's limit for requested send buffers, or no limit if it cannot be read.
fn send_bytes_max() -> usize {
    static MOST: OnceLock<usize> = OnceLock::new();
    *MOST.get_or_init(|| {
        let limit = fs::read_to_string("/proc/sys/net/core/wmem_max").ok();
        limit.and_then(|text| text.trim().parse().ok()).unwrap_or(usize::MAX)
    })
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// Returns whether a connection to the address is local, and its send buffer before and after.
    fn check(address: &str) -> (bool, usize, usize) {
        let listener = TcpListener::bind((address, 0)).unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = SockRef::from(&stream);
        let before = socket.send_buffer_size().unwrap();
        set_socket_options(SockRef::from(&stream)).unwrap();
        (is_local(&socket), before, socket.send_buffer_size().unwrap())
    }

    #[test]
    fn loopback_connections_get_a_small_send_buffer() {
        let (is_local, before, after) = check("127.0.0.1");
        assert!(is_local);
        // The system may grant less, but the default on loopback is megabytes.
        assert!(after <= 2 * LOCAL_SEND_BYTES && after < before, "{before} {after}");
    }

    #[test]
    fn other_connections_keep_the_default_send_buffer() {
        // The connection goes from 127.0.0.1 to another address, like one to another host.
        let (is_local, before, after) = check("127.0.0.2");
        assert!(!is_local);
        assert_eq!(before, after);
    }
}
