//! What is set on every connection, at both of its ends.

use std::{fs, io, sync::OnceLock, time::Duration};

use socket2::{SockAddr, SockRef, TcpKeepalive};

/// How long sent bytes may stay unacknowledged before the peer's host counts as dead.
const UNACKNOWLEDGED_MAX: Duration = Duration::from_secs(20);

/// How much the kernel is asked to hold of what is sent to a peer on this host; it doubles that. So
/// the bytes under way still lie in the cache when the peer copies them out. Left alone, the buffer
/// grows to megabytes, which fills a long line and here only pushes the bytes out to memory.
const LOCAL_SEND_BYTES: usize = 256 << 10;

/// Less than this may be smaller than one packet of the loopback device, and each then waits for an
/// acknowledgement that is delayed.
const LOCAL_SEND_BYTES_MIN: usize = 128 << 10;

/// Makes the end of a host be noticed, whether bytes are under way (acknowledgements are missed) or
/// not (probes are), and sends small things at once. Peers on this host get what is best there.
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

/// Whether the peer is on this host, where a stream is limited by processors only.
pub(super) fn is_local(socket: &SockRef<'_>) -> bool {
    let ip = |address: io::Result<SockAddr>| address.ok()?.as_socket().map(|known| known.ip());
    let own = ip(socket.local_addr());
    own.is_some() && own == ip(socket.peer_addr())
}

/// Refused by the system, it is only slower.
fn set_local_options(socket: &SockRef<'_>) {
    if send_bytes_max() >= LOCAL_SEND_BYTES_MIN {
        let _ = socket.set_send_buffer_size(LOCAL_SEND_BYTES);
    }
    // Nothing is in the way of the bytes that could be crowded; some methods pace them all the same.
    let _ = socket.set_tcp_congestion(b"reno");
}

/// The most that the system lets a socket ask for. Where it does not print_flush, that is left to it.
fn send_bytes_max() -> usize {
    static MOST: OnceLock<usize> = OnceLock::new();
    *MOST.get_or_init(|| {
        let told = fs::read_to_string("/proc/sys/net/core/wmem_max").ok();
        told.and_then(|text| text.trim().parse().ok()).unwrap_or(usize::MAX)
    })
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// Whether a connection to that address is local, and its send buffer before and after.
    fn check(address: &str) -> (bool, usize, usize) {
        let listener = TcpListener::bind((address, 0)).unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = SockRef::from(&stream);
        let before = socket.send_buffer_size().unwrap();
        set_socket_options(SockRef::from(&stream)).unwrap();
        (is_local(&socket), before, socket.send_buffer_size().unwrap())
    }

    #[test]
    fn a_connection_within_the_host_keeps_little_under_way() {
        let (is_local, before, after) = check("127.0.0.1");
        assert!(is_local);
        // A system may grant less, but on loopback it begins with room for megabytes.
        assert!(after <= 2 * LOCAL_SEND_BYTES && after < before, "{before} {after}");
    }

    #[test]
    fn the_buffer_of_any_other_connection_is_left_to_the_system() {
        // It goes from 127.0.0.1 to another address, as to another host.
        let (is_local, before, after) = check("127.0.0.2");
        assert!(!is_local);
        assert_eq!(before, after);
    }
}
