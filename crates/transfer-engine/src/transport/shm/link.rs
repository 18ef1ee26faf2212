//! A Unix `SOCK_SEQPACKET` socket between two processes of one host, which also carries file
//! descriptors.

use std::{
    io::{self, IoSlice},
    mem::{self, MaybeUninit},
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        linux::net::SocketAddrExt,
        unix::net::SocketAddr,
    },
    time::Duration,
};

use mooncake_base::Moment;
use mooncake_os::{call_limit, fork};
use socket2::{Domain, MaybeUninitSlice, MsgHdr, MsgHdrMut, SockAddr, Socket, Type};

use super::message::{MESSAGE_BYTES_MAX, ShmMessage};

/// The maximum number of connections waiting to be accepted.
const BACKLOG: i32 = 128;

/// One end of a connection, or a listener.
#[derive(Debug)]
pub(super) struct Link {
    socket: Option<Socket>,
    generation: u64,
}

/// The identity of the other end, as the kernel reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Credentials {
    /// The process id in this process's pid namespace; 0 if it is not visible there.
    pub(super) process: i32,
    pub(super) user: u32,
}

/// The result of a non-blocking receive.
#[derive(Debug)]
pub(super) enum Received {
    ShmMessage(ShmMessage, Option<OwnedFd>),
    /// The packet is not a valid message.
    Malformed,
    Empty,
    Closed,
}

impl Link {
    /// Listens on the abstract socket with this name.
    pub(super) fn listen(name: &str) -> io::Result<Self> {
        let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None)?;
        socket.bind(&abstract_address(name)?)?;
        socket.listen(BACKLOG)?;
        socket.set_nonblocking(true)?;
        Ok(Self::guard(socket))
    }

    /// Connects to the abstract socket with this name.
    pub(super) fn connect(name: &str, timeout: Duration) -> io::Result<Self> {
        let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None)?;
        socket.set_write_timeout(Some(timeout.max(Duration::from_millis(1))))?;
        socket.connect(&abstract_address(name)?)?;
        socket.set_nonblocking(true)?;
        Ok(Self::guard(socket))
    }

    /// Accepts the next waiting connection, or fails with `WouldBlock`.
    pub(super) fn accept(&self) -> io::Result<Self> {
        let (socket, _) = self.socket().accept()?;
        socket.set_nonblocking(true)?;
        Ok(Self::guard(socket))
    }

    fn guard(socket: Socket) -> Self {
        let generation = fork::generation();
        fork::guard_descriptor(socket.as_raw_fd());
        Self { socket: Some(socket), generation }
    }

    fn socket(&self) -> &Socket {
        self.socket.as_ref().expect("only drop takes the socket")
    }

    pub(super) fn raw_fd(&self) -> RawFd {
        self.socket().as_raw_fd()
    }

    /// Sends without blocking. A full socket is an error: the other end does not read.
    pub(super) fn send(&self, message: ShmMessage, file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let bytes = message.encode();
        let buffers = [IoSlice::new(&bytes)];
        let mut control = [0; RIGHTS_BYTES];
        let mut header = MsgHdr::new().with_buffers(&buffers);
        if let Some(file) = file {
            control[..8].copy_from_slice(&RIGHTS_BYTES.to_ne_bytes());
            control[8..12].copy_from_slice(&libc::SOL_SOCKET.to_ne_bytes());
            control[12..16].copy_from_slice(&libc::SCM_RIGHTS.to_ne_bytes());
            control[16..].copy_from_slice(&file.as_raw_fd().to_ne_bytes());
            header = header.with_control(&control);
        }
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        self.socket().sendmsg(&header, flags).map(drop)
    }

    /// Receives the next message without blocking.
    pub(super) fn receive(&self) -> Received {
        // One byte more than the longest message, so that a longer packet is detected.
        let mut bytes = [MaybeUninit::zeroed(); MESSAGE_BYTES_MAX + 1];
        let mut control = [MaybeUninit::zeroed(); RIGHTS_BYTES];
        let mut buffers = [MaybeUninitSlice::new(&mut bytes)];
        let mut header = MsgHdrMut::new().with_buffers(&mut buffers).with_control(&mut control);
        let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
        let received = self.socket().recvmsg(&mut header, flags);
        let control_length = header.control_len();
        let length = match received {
            Ok(0) => return Received::Closed,
            Ok(length) => length,
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {
                    return Received::Empty;
                }
                _ => return Received::Closed,
            },
        };
        // SAFETY: the array was zeroed, so all of its bytes are initialized.
        let control = control.map(|byte| unsafe { byte.assume_init() });
        let file = (control_length == RIGHTS_BYTES).then(|| received_file(&control)).flatten();
        // SAFETY: the array was zeroed, so all of its bytes are initialized.
        let bytes = bytes.map(|byte| unsafe { byte.assume_init() });
        ShmMessage::decode(&bytes[..length])
            .map_or(Received::Malformed, |message| Received::ShmMessage(message, file))
    }

    /// Waits until the deadline for the next message.
    pub(super) fn receive_until(
        &self,
        deadline: Moment,
    ) -> io::Result<(ShmMessage, Option<OwnedFd>)> {
        loop {
            match self.receive() {
                Received::ShmMessage(message, file) => return Ok((message, file)),
                Received::Malformed => return Err(io::ErrorKind::InvalidData.into()),
                Received::Closed => return Err(io::ErrorKind::UnexpectedEof.into()),
                Received::Empty => {}
            }
            let left = call_limit::next_wait(deadline);
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let mut polled = [poll_readable(self.raw_fd())];
            poll(&mut polled, left);
        }
    }

    /// Returns whether the other end is known to be closed.
    pub(super) fn is_closed(&self) -> bool {
        let events = libc::POLLRDHUP;
        let mut polled = [libc::pollfd { fd: self.raw_fd(), events, revents: 0 }];
        poll(&mut polled, Duration::ZERO);
        polled[0].revents & (libc::POLLHUP | libc::POLLRDHUP | libc::POLLERR) != 0
    }

    /// Shuts the connection down; both ends notice.
    pub(super) fn shut_down(&self) {
        // A failure means that the connection is already shut down.
        let _ = self.socket().shutdown(std::net::Shutdown::Both);
    }

    /// Ends this side of the connection; the other end notices and can still send.
    pub(super) fn end_sending(&self) {
        // A failure means that the connection is already shut down.
        let _ = self.socket().shutdown(std::net::Shutdown::Write);
    }

    pub(super) fn credentials(&self) -> io::Result<Credentials> {
        let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut length = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: the socket is open and owned here; the result is written to a local of this size.
        let failed = unsafe {
            libc::getsockopt(
                self.raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut found).cast(),
                &raw mut length,
            )
        };
        if failed != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Credentials { process: found.pid, user: found.uid })
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let Some(socket) = self.socket.take() else { return };
        if fork::is_forked_since(self.generation) {
            // The fork handler has already closed the socket in this process.
            mem::forget(socket);
        } else {
            fork::unguard(socket.as_raw_fd());
        }
    }
}

/// The length of a control message with one file descriptor, without padding: 8 bytes of length, 4
/// of level, 4 of type, and 4 of descriptor. There is space for only one, so that the kernel closes
/// any others.
const RIGHTS_BYTES: usize = 20;

const _: () = assert!(size_of::<libc::cmsghdr>() == 16, "the layout on 64-bit Linux");

fn received_file(control: &[u8; RIGHTS_BYTES]) -> Option<OwnedFd> {
    let number = |at: usize| {
        let bytes = control[at..].first_chunk().expect("the offsets are inside");
        i32::from_ne_bytes(*bytes)
    };
    if (number(8), number(12)) != (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
        return None;
    }
    // SAFETY: the kernel has just created this descriptor in this process; no other code owns it.
    Some(unsafe { OwnedFd::from_raw_fd(number(16)) })
}

fn abstract_address(name: &str) -> io::Result<SockAddr> {
    // Validates the name, which may come from a peer's segment descriptor.
    SocketAddr::from_abstract_name(name)?;
    SockAddr::unix(format!("\0{name}"))
}

/// Returns the [`poll`] entry that waits until a file descriptor is readable.
pub(super) const fn poll_readable(descriptor: RawFd) -> libc::pollfd {
    libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 }
}

/// Waits until a file descriptor has an event or the timeout ends. A signal ends the wait early.
pub(super) fn poll(polled: &mut [libc::pollfd], timeout: Duration) {
    // Rounded up, so that waits below a millisecond do not busy-loop.
    let millis = i32::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX);
    // SAFETY: the slice is valid for the call, which writes only `revents`.
    let count = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, millis) };
    if count < 0 {
        polled.iter_mut().for_each(|one| one.revents = 0);
    }
}

/// Returns the effective user id of this process.
pub(super) fn effective_user() -> u32 {
    // SAFETY: the call reads a property of the process and cannot fail.
    unsafe { libc::geteuid() }
}

#[cfg(test)]
mod tests {
    use std::{io::Read, os::fd::AsFd};

    use mooncake_base::{Clock, SystemClock};

    use super::*;

    #[test]
    fn delivers_messages_with_files_and_detects_close() {
        let name = format!("mooncake-test-{}", mooncake_base::EngineId::random());
        let listener = Link::listen(&name).unwrap();
        assert!(Link::listen(&name).is_err());
        let near = Link::connect(&name, Duration::from_secs(5)).unwrap();
        let far = listener.accept().unwrap();
        assert_eq!(far.credentials().unwrap().process as u32, std::process::id());
        assert!(matches!(far.receive(), Received::Empty));
        let mut file = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut file, b"x").unwrap();
        near.send(ShmMessage::Missing { id: 4 }, Some(file.as_fd())).unwrap();
        near.send(ShmMessage::Confirm { base: 5 }, None).unwrap();
        let deadline = SystemClock.now() + Duration::from_secs(5);
        let (message, received) = far.receive_until(deadline).unwrap();
        assert_eq!(message, ShmMessage::Missing { id: 4 });
        let mut received = std::fs::File::from(received.unwrap());
        io::Seek::rewind(&mut received).unwrap();
        let mut text = String::new();
        received.read_to_string(&mut text).unwrap();
        assert_eq!(text, "x");
        let (message, none) = far.receive_until(deadline).unwrap();
        assert!(message == ShmMessage::Confirm { base: 5 } && none.is_none());
        assert!(!far.is_closed());
        drop(near);
        assert!(far.is_closed());
        assert!(matches!(far.receive(), Received::Closed));
    }
}
