//! System calls that move bytes between a socket and memory given by addresses.
//!
//! Addresses are passed only to the kernel, which fails with `EFAULT` for unmapped ones; no Rust
//! reference to the memory is created. After a fault the transfer continues one span at a time,
//! which finds the bad span.

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsRawFd, BorrowedFd},
    ptr,
    time::Duration,
};

use mooncake_base::Moment;
use mooncake_os::call_limit;

/// The maximum number of spans per system call. The kernel accepts 1024; the array is on the stack.
const IOVECS_MAX: usize = 256;

/// The size of the buffer that receives discarded bytes.
const DISCARD_BYTES: usize = 64 << 10;

/// A range of memory that bytes are sent from or received into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    address: usize,
    length: usize,
    is_discard: bool,
}

/// The progress of sending or receiving a message: first its head, then its spans in order.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Cursor {
    head: usize,
    index: usize,
    offset: usize,
    /// True after a fault: one span per call, to find the bad one.
    is_single: bool,
}

/// A buffer for bytes that are discarded, allocated on first use.
#[derive(Debug, Default)]
pub(super) struct DiscardBuffer(Vec<u8>);

/// The behaviour of a receiving system call while no bytes are available.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BlockMode {
    /// The call does not block.
    NonBlocking,
    /// The call blocks up to the receive timeout of the socket, if the socket is in blocking mode.
    SocketTimeout,
}

/// The event for which a system call would block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Readiness {
    Read,
    Write,
}

impl Span {
    /// Creates a span of memory of this process.
    ///
    /// # Safety
    /// If the address range is mapped, it stays mapped until the last use of the span, and until
    /// then no Rust reference exists to bytes that are received into. The range may be unmapped.
    pub(super) const unsafe fn new(address: usize, length: usize) -> Self {
        Self { address, length, is_discard: false }
    }

    /// Creates a span whose bytes are received and discarded. It cannot be sent.
    pub(super) const fn discard(length: usize) -> Self {
        Self { address: 0, length, is_discard: true }
    }

    /// Returns a span of the same length whose bytes are discarded.
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
    /// Returns whether everything was moved.
    pub(super) fn is_done(&self, head: &[u8], spans: &[Span]) -> bool {
        self.head == head.len() && self.index == spans.len()
    }

    /// Handles an `EFAULT`. Returns the index of the bad span once it is known; until then the
    /// caller repeats the system call.
    pub(super) fn fault(&mut self) -> Option<usize> {
        let culprit = self.is_single.then_some(self.index);
        self.is_single = culprit.is_none();
        culprit
    }

    fn advance(&mut self, mut moved: usize, head: &[u8], spans: &[Span]) {
        let head_bytes = moved.min(head.len() - self.head);
        self.head += head_bytes;
        moved -= head_bytes;
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

/// Sends a part of the remaining bytes in one system call.
///
/// # Errors
/// Those of `sendmsg`, including `EFAULT` and `EAGAIN`; nothing was sent then.
pub(super) fn send(
    socket: BorrowedFd<'_>,
    head: &[u8],
    spans: &[Span],
    cursor: &mut Cursor,
) -> io::Result<()> {
    let mut iovecs = SpanRanges::default();
    iovecs.push(head[cursor.head..].as_ptr().cast_mut(), head.len() - cursor.head);
    iovecs.extend(spans, cursor, ptr::null_mut(), 0);
    let message = iovecs.message();
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the message points to `iovecs`, which outlives the call. The kernel only reads the
    // listed ranges: the head is borrowed, the spans stay valid by the contract of `Span::new`, and
    // an unmapped span causes `EFAULT`.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) };
    let sent = usize::try_from(sent).map_err(|_| io::Error::last_os_error())?;
    cursor.advance(sent, head, spans);
    Ok(())
}

/// Receives a part of the remaining bytes in one system call.
///
/// # Errors
/// Those of `recvmsg`, including `EFAULT` and `EAGAIN`, and the end of the stream; nothing was
/// received then.
pub(super) fn receive(
    socket: BorrowedFd<'_>,
    spans: &[Span],
    cursor: &mut Cursor,
    discard: &mut DiscardBuffer,
    mode: BlockMode,
) -> io::Result<()> {
    // Skips empty spans, so that a fault is not attributed to one of them.
    cursor.advance(0, &[], spans);
    if cursor.is_done(&[], spans) {
        return Ok(()); // the kernel would block for a byte of the next message
    }
    if discard.0.is_empty() && spans[cursor.index..].iter().any(Span::is_discard) {
        discard.0.resize(DISCARD_BYTES, 0);
    }
    let mut iovecs = SpanRanges::default();
    iovecs.extend(spans, cursor, discard.0.as_mut_ptr(), discard.0.len());
    let mut message = iovecs.message();
    // SAFETY: the message points to `iovecs`, which outlives the call. The kernel writes to the
    // listed ranges: the spans stay valid and unreferenced by the contract of `Span::new`, an
    // unmapped span causes `EFAULT`, and the discard buffer is mutably borrowed here.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, mode.flags()) };
    let received = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
    if received == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    cursor.advance(received, &[], spans);
    Ok(())
}

/// Receives the available bytes into the buffer, which is not empty.
///
/// # Errors
/// Those of `recv`, including `EAGAIN`, and the end of the stream.
pub(super) fn read(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    mode: BlockMode,
) -> io::Result<usize> {
    let (start, length) = (buffer.as_mut_ptr().cast(), buffer.len());
    // SAFETY: the kernel writes only to the buffer, which is mutably borrowed during the call.
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

/// Waits until one of the sockets has an event that it waits for, or has failed.
///
/// # Errors
/// The deadline has passed (`TimedOut`), or `poll` failed.
pub(super) fn wait_for_any(sockets: &mut [libc::pollfd], deadline: Moment) -> io::Result<()> {
    loop {
        let left = call_limit::next_wait(deadline);
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // Rounded up, so that the last millisecond is not spent in a busy loop.
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

/// Returns whether the kernel rejected an address.
pub(super) fn is_fault(failure: &io::Error) -> bool {
    failure.raw_os_error() == Some(libc::EFAULT)
}

/// The ranges of one system call.
struct SpanRanges {
    /// Only the first `count` are initialized; setting all would take longer than a small call.
    ranges: [MaybeUninit<libc::iovec>; IOVECS_MAX],
    count: usize,
}

impl Default for SpanRanges {
    fn default() -> Self {
        Self { ranges: [const { MaybeUninit::uninit() }; IOVECS_MAX], count: 0 }
    }
}

impl SpanRanges {
    fn push(&mut self, address: *mut u8, length: usize) {
        if length > 0 {
            let range = libc::iovec { iov_base: address.cast(), iov_len: length };
            self.ranges[self.count].write(range);
            self.count += 1;
        }
    }

    /// Adds the remaining spans, as far as they fit.
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
        // SAFETY: `msghdr` is plain data of numbers and pointers, for which zero is valid.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.ranges.as_mut_ptr().cast();
        message.msg_iovlen = self.count as _;
        message
    }
}
