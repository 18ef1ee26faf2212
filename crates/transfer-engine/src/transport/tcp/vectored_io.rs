//! The system calls between a socket and memory that is named by addresses.
//!
//! Addresses are only ever handed to the kernel, which answers `EFAULT` for one that is not
//! mapped; no Rust reference to them is made. Which address it was is found by going on one span
//! at a time.

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsRawFd, BorrowedFd},
    ptr,
    time::Duration,
};

use mooncake_base::{Clock, Moment, SystemClock};

/// The most spans that one system call gets (the kernel takes 1024; this many lie on the stack).
const IOVECS_MAX: usize = 256;

/// The length of the buffer into which unwanted bytes go.
const DISCARD_BYTES: usize = 64 << 10;

/// Memory that bytes come from or go to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    address: usize,
    length: usize,
    is_discard: bool,
}

/// How far a message is sent or received: first its head, then its spans in order.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Cursor {
    head: usize,
    index: usize,
    offset: usize,
    /// After a fault: one span a call, to find the one that is bad.
    is_single: bool,
}

/// Where bytes go that nobody wants. Made when first needed.
#[derive(Debug, Default)]
pub(super) struct DiscardBuffer(Vec<u8>);

/// Whether a system call waits when nothing has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BlockMode {
    /// It does not.
    NonBlocking,
    /// As long as the socket's own time-out says, if the socket is a blocking one.
    SocketTimeout,
}

/// What a system call would have to wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Readiness {
    Read,
    Write,
}

impl Span {
    /// Memory of this process.
    ///
    /// # Safety
    /// If the address range is mapped, it stays so, and nobody holds a Rust reference to bytes of
    /// it that are received into, until the span is used no more. (It need not be mapped.)
    pub(super) const unsafe fn new(address: usize, length: usize) -> Self {
        Self { address, length, is_discard: false }
    }

    /// So many bytes that are received and thrown away. Cannot be sent.
    pub(super) const fn discard(length: usize) -> Self {
        Self { address: 0, length, is_discard: true }
    }

    /// The same, thrown away.
    pub(super) const fn into_discard(self) -> Self {
        Self::discard(self.length)
    }

    pub(super) const fn length(&self) -> usize {
        self.length
    }

    const fn is_discard(&self) -> bool {
        self.is_discard
    }
}

impl BlockMode {
    const fn flags(self) -> libc::c_int {
        match self {
            Self::NonBlocking => libc::MSG_DONTWAIT,
            Self::SocketTimeout => 0,
        }
    }
}

impl Cursor {
    /// Whether everything has been moved.
    pub(super) fn is_done(&self, head: &[u8], spans: &[Span]) -> bool {
        self.head == head.len() && self.index == spans.len()
    }

    /// To be called after `EFAULT`. The index of the bad span once it is known; until then the
    /// call is to be made again.
    pub(super) fn fault(&mut self) -> Option<usize> {
        let culprit = self.is_single.then_some(self.index);
        self.is_single = culprit.is_none();
        culprit
    }

    fn advance(&mut self, mut moved: usize, head: &[u8], spans: &[Span]) {
        let of_head = moved.min(head.len() - self.head);
        self.head += of_head;
        moved -= of_head;
        while let Some(span) = spans.get(self.index) {
            let step = moved.min(span.length - self.offset);
            self.offset += step;
            moved -= step;
            if self.offset < span.length {
                break;
            }
            self.index += 1;
            self.offset = 0;
        }
        debug_assert_eq!(moved, 0, "the kernel moves no more than it was given");
    }
}

/// Sends a part of what is left, in one system call.
///
/// # Errors
/// Those of `sendmsg`, `EFAULT` and `EAGAIN` among them; nothing was sent then.
pub(super) fn send(
    socket: BorrowedFd<'_>,
    head: &[u8],
    spans: &[Span],
    cursor: &mut Cursor,
) -> io::Result<()> {
    let mut iovecs = IoVecs::default();
    iovecs.push(head[cursor.head..].as_ptr().cast_mut(), head.len() - cursor.head);
    iovecs.extend(spans, cursor, ptr::null_mut(), 0);
    let message = iovecs.message();
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the message points at `iovecs`, which lives through the call; the kernel only reads
    // the ranges in it: the head is borrowed, the spans are kept by the promise of `Span::new`,
    // and an unmapped one gives `EFAULT`.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) };
    let sent = usize::try_from(sent).map_err(|_| io::Error::last_os_error())?;
    cursor.advance(sent, head, spans);
    Ok(())
}

/// Receives a part of what is left, in one system call.
///
/// # Errors
/// Those of `recvmsg`, `EFAULT` and `EAGAIN` among them, and the end of the stream; nothing was
/// received then.
pub(super) fn receive(
    socket: BorrowedFd<'_>,
    spans: &[Span],
    cursor: &mut Cursor,
    discard: &mut DiscardBuffer,
    mode: BlockMode,
) -> io::Result<()> {
    // Over empty spans, so that a fault is not laid to one of them.
    cursor.advance(0, &[], spans);
    if cursor.is_done(&[], spans) {
        return Ok(()); // the kernel would wait for the byte that nobody wants
    }
    if discard.0.is_empty() && spans[cursor.index..].iter().any(Span::is_discard) {
        discard.0.resize(DISCARD_BYTES, 0);
    }
    let mut iovecs = IoVecs::default();
    iovecs.extend(spans, cursor, discard.0.as_mut_ptr(), discard.0.len());
    let mut message = iovecs.message();
    // SAFETY: the message points at `iovecs`, which lives through the call; the kernel writes to
    // the ranges in it: those of spans, kept and unreferenced by the promise of `Span::new`, where
    // an unmapped one gives `EFAULT`, and the discard, which is borrowed mutably here.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, mode.flags()) };
    let received = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
    if received == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    cursor.advance(received, &[], spans);
    Ok(())
}

/// Receives as many bytes as there are, up to the length of the buffer, which is not 0.
///
/// # Errors
/// Those of `recv`, `EAGAIN` among them, and the end of the stream.
pub(super) fn read(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    mode: BlockMode,
) -> io::Result<usize> {
    let (start, length) = (buffer.as_mut_ptr().cast(), buffer.len());
    // SAFETY: the kernel writes to the buffer only, which is borrowed mutably through the call.
    let received = unsafe { libc::recv(socket.as_raw_fd(), start, length, mode.flags()) };
    match usize::try_from(received) {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(count) => Ok(count),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// Waits until the socket is ready or has failed.
///
/// # Errors
/// The deadline has passed (`TimedOut`), or `poll` failed.
pub(super) fn wait(
    socket: BorrowedFd<'_>,
    readiness: Readiness,
    deadline: Moment,
) -> io::Result<()> {
    let events = match readiness {
        Readiness::Read => libc::POLLIN,
        Readiness::Write => libc::POLLOUT,
    };
    wait_for_any(&mut [libc::pollfd { fd: socket.as_raw_fd(), events, revents: 0 }], deadline)
}

/// Waits until one of the sockets is ready for what it waits for, or has failed.
///
/// # Errors
/// The deadline has passed (`TimedOut`), or `poll` failed.
pub(super) fn wait_for_any(sockets: &mut [libc::pollfd], deadline: Moment) -> io::Result<()> {
    loop {
        let left = deadline.left(SystemClock.now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // Rounded up, so that the last millisecond is slept and not spun through.
        let millis = (left + Duration::from_micros(999)).as_millis();
        let millis = i32::try_from(millis).unwrap_or(i32::MAX);
        let count = sockets.len() as libc::nfds_t;
        // SAFETY: the slice is valid for the call, which writes only `revents`.
        match unsafe { libc::poll(sockets.as_mut_ptr(), count, millis) } {
            0 => {}
            ready if ready > 0 => return Ok(()),
            _ => {
                let failure = io::Error::last_os_error();
                if failure.kind() != io::ErrorKind::Interrupted {
                    return Err(failure);
                }
            }
        }
    }
}

/// Whether the kernel refused an address.
pub(super) fn is_fault(failure: &io::Error) -> bool {
    failure.raw_os_error() == Some(libc::EFAULT)
}

/// The ranges of one system call.
struct IoVecs {
    /// The first `count` of them are set; to set all would take longer than a small call.
    ranges: [MaybeUninit<libc::iovec>; IOVECS_MAX],
    count: usize,
}

impl Default for IoVecs {
    fn default() -> Self {
        Self { ranges: [const { MaybeUninit::uninit() }; IOVECS_MAX], count: 0 }
    }
}

impl IoVecs {
    fn push(&mut self, address: *mut u8, length: usize) {
        if length > 0 {
            let range = libc::iovec { iov_base: address.cast(), iov_len: length };
            self.ranges[self.count].write(range);
            self.count += 1;
        }
    }

    /// Adds what is left of the spans, as far as there is room.
    fn extend(&mut self, spans: &[Span], cursor: &Cursor, discard: *mut u8, discard_length: usize) {
        let mut offset = cursor.offset;
        for span in &spans[cursor.index..] {
            if self.count == IOVECS_MAX || (cursor.is_single && self.count > 0) {
                break;
            }
            let left = span.length - offset;
            if span.is_discard {
                self.push(discard, left.min(discard_length));
                if left > discard_length {
                    break;
                }
            } else {
                self.push(ptr::with_exposed_provenance_mut(span.address + offset), left);
            }
            offset = 0;
        }
    }

    fn message(&mut self) -> libc::msghdr {
        // SAFETY: `msghdr` is plain data of numbers and pointers for which zero is valid.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.ranges.as_mut_ptr().cast();
        message.msg_iovlen = self.count as _;
        message
    }
}
