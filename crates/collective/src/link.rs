//! A connection to another rank: a socket and, on one host, rings in shared memory.

mod frame_sender;

use std::{
    io::{self, IoSlice, Read, Write},
    net::{Shutdown, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use mooncake_base::sync::{Condvar, Mutex};
use socket2::SockRef;

use crate::{
    rank_frame::{Frame, HEADER_BYTES, Header},
    ring::{Rings, Wake, Written},
    shared_futex::SharedFutex,
    staging::peer_buffers::PeerBuffers,
};

pub(crate) use self::frame_sender::FrameSender;

/// The limit of a write to a socket whose peer takes no bytes: the socket's, for each call. Who sends looks
/// in between whether its frame is still wanted.
pub(crate) const WRITE_LIMIT: Duration = Duration::from_millis(20);

/// A connection to another rank.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) rank: u32,
    pub(crate) incarnation: u64,
    pub(crate) stream: TcpStream,
    pub(crate) access: Access,
    pub(crate) rings: Option<Rings>,
    /// Where a thread of the peer sleeps until a frame is in the ring.
    pub(crate) futex: Option<SharedFutex>,
    /// The name under which the peer's memory is read from another host.
    pub(crate) segment: Option<String>,
    pub(crate) staged: PeerBuffers,
    pub(crate) outgoing: Mutex<Sending>,
    /// A frame that was sent by a [`FrameSender`] has ended.
    pub(crate) frame_ended: Condvar,
    /// Number of the next frame that is delivered, whether it comes over the socket or the ring.
    pub(crate) next_delivered: Mutex<u64>,
    pub(crate) is_alive: AtomicBool,
}

#[derive(Debug, Default)]
pub(crate) struct Sending {
    /// Number of the next frame.
    number: u64,
    /// Number of the frame after the last one that woke the peer over the socket.
    after_wake: u64,
    /// The rest of a frame that was sent in part: it goes before any other.
    rest: Vec<u8>,
    /// Whether a [`FrameSender`] has sent a part of a frame, and has the rest.
    is_sending: bool,
}

impl Sending {
    /// Returns whether another frame may be sent now.
    fn is_free(&self) -> bool {
        self.rest.is_empty() && !self.is_sending
    }
}

/// How much of a frame a call that does not block has sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SendProgress {
    /// Nothing: the socket has no room, or another thread writes.
    Nothing,
    /// A part: [`Link::flush`] must be called for the rest.
    Begun,
    /// The whole frame.
    Whole,
}

/// Who of two ranks can read the other's memory.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Access {
    /// The process at the other end, if it is on this host.
    pub(crate) process: Option<u32>,
    /// Whether the peer has proven that it reads this process.
    pub(crate) is_reader: bool,
}

impl Access {
    /// Makes rings in shared memory, if each side can read the other's memory and the peer opens them.
    pub(crate) fn make_rings(self, stream: &mut TcpStream) -> io::Result<Option<Rings>> {
        if self.process.is_none() || !self.is_reader {
            return Ok(None);
        }
        let rings = found(Rings::create());
        let descriptor = rings.as_ref().map_or(-1, Rings::descriptor);
        stream.write_all(&descriptor.to_le_bytes())?;
        let mut is_open = [0];
        stream.read_exact(&mut is_open)?;
        Ok(if is_open == [1] { rings } else { None })
    }

    /// Opens the rings that the peer has made.
    pub(crate) fn open_rings(self, stream: &mut TcpStream) -> io::Result<Option<Rings>> {
        let (Some(process), true) = (self.process, self.is_reader) else { return Ok(None) };
        let rings = found(Rings::open(process, read_descriptor(stream)?));
        stream.write_all(&[u8::from(rings.is_some())])?;
        Ok(rings)
    }

    /// Shows the peer the futex of this process, and opens the peer's, if each side can read the
    /// other's memory. Who has none of the peer wakes it over the socket.
    pub(crate) fn exchange_futexes(
        self,
        stream: &mut TcpStream,
        own: Option<&SharedFutex>,
    ) -> io::Result<Option<SharedFutex>> {
        let (Some(process), true) = (self.process, self.is_reader) else { return Ok(None) };
        stream.write_all(&own.map_or(-1, SharedFutex::descriptor).to_le_bytes())?;
        Ok(found(SharedFutex::open(process, read_descriptor(stream)?)))
    }
}

fn found<T>(shared: io::Result<T>) -> Option<T> {
    shared.inspect_err(|error| tracing::debug!(%error, "no memory is shared with a peer")).ok()
}

fn read_descriptor(stream: &mut TcpStream) -> io::Result<i32> {
    let mut descriptor = [0; 4];
    stream.read_exact(&mut descriptor)?;
    Ok(i32::from_le_bytes(descriptor))
}

impl Link {
    /// Sends a frame. Blocks until the peer's thread has room for it, or `is_over` says to give up; what
    /// the peer has not got then of a frame that was begun goes before the next one.
    pub(crate) fn send(
        &self,
        header: &Header,
        payload: &[u8],
        is_over: impl Fn() -> bool,
    ) -> io::Result<()> {
        let mut frame = FrameSender::new(self, header, payload);
        while !frame.send_part()? {
            if is_over() {
                return Err(io::ErrorKind::Interrupted.into());
            }
        }
        Ok(())
    }

    /// Sends a frame as far as the socket has room for it. Does not block.
    pub(crate) fn try_send(&self, header: &Header, payload: &[u8]) -> io::Result<SendProgress> {
        let Some(mut outgoing) = self.outgoing.try_lock() else { return Ok(SendProgress::Nothing) };
        if !outgoing.is_free() {
            return Ok(SendProgress::Nothing);
        }
        let first = outgoing.number;
        let Some((head, payload)) = self.send_in_ring(&mut outgoing, header, payload) else {
            return Ok(SendProgress::Whole);
        };
        let is_in_ring = outgoing.number > first;
        let parts = [IoSlice::new(&head), IoSlice::new(payload)];
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        let sent = match SockRef::from(&self.stream).send_vectored_with_flags(&parts, flags) {
            Ok(sent) => sent,
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => 0,
                _ => return Err(error),
            },
        };
        if sent == 0 && !is_in_ring {
            return Ok(SendProgress::Nothing);
        }
        outgoing.number += 1;
        if sent == head.len() + payload.len() {
            return Ok(SendProgress::Whole);
        }
        outgoing.rest.extend_from_slice(head.get(sent..).unwrap_or_default());
        outgoing.rest.extend_from_slice(&payload[sent.saturating_sub(head.len())..]);
        Ok(SendProgress::Begun)
    }

    /// Sends the rest of a frame that [`Self::try_send`] has begun. Blocks as [`Self::send`].
    pub(crate) fn flush(&self, is_over: impl Fn() -> bool) -> io::Result<()> {
        while !self.send_rest(&mut self.outgoing.lock())? && !is_over() {}
        Ok(())
    }

    /// Wakes the peer if it has not read all frames in the ring. Does not block; if a part was sent,
    /// [`Self::flush`] must be called for the rest.
    pub(crate) fn wake_reader(&self) -> SendProgress {
        let Some(rings) = self.rings.as_ref().filter(|rings| rings.has_unread()) else {
            return SendProgress::Nothing;
        };
        if let (Wake::Futex, Some(futex)) = (rings.reader_wake(), &self.futex) {
            futex.wake();
            return SendProgress::Nothing;
        }
        // Who has the lock sends something over the socket, or the peer reads that.
        let Some(mut outgoing) = self.outgoing.try_lock() else { return SendProgress::Nothing };
        if !outgoing.is_free() || outgoing.after_wake == outgoing.number {
            return SendProgress::Nothing;
        }
        let head = Header::WAKE.encode(outgoing.number);
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // A full socket wakes the peer as well, and a closed one is noticed by its reader.
        let sent = SockRef::from(&self.stream).send_with_flags(&head, flags).unwrap_or(0);
        if sent == 0 {
            return SendProgress::Nothing;
        }
        outgoing.number += 1;
        outgoing.after_wake = outgoing.number;
        outgoing.rest.extend_from_slice(&head[sent..]);
        if outgoing.rest.is_empty() { SendProgress::Whole } else { SendProgress::Begun }
    }

    /// Writes a frame into the ring, if there is room. Returns what must go over the socket: the
    /// frame, nothing, or one that wakes the peer's reader.
    fn send_in_ring<'a>(
        &self,
        outgoing: &mut Sending,
        header: &Header,
        payload: &'a [u8],
    ) -> Option<([u8; HEADER_BYTES], &'a [u8])> {
        let head = header.encode(outgoing.number);
        let written =
            self.rings.as_ref().map_or(Written::No, |rings| rings.write(&[&head, payload]));
        let Written::Yes(wake) = written else { return Some((head, payload)) };
        outgoing.number += 1;
        match (wake, &self.futex) {
            (Wake::None, _) => None,
            (Wake::Futex, Some(futex)) => {
                futex.wake();
                None
            }
            (Wake::Futex, None) | (Wake::Socket, _) => {
                // The caller sends the frame that wakes.
                outgoing.after_wake = outgoing.number + 1;
                Some((Header::WAKE.encode(outgoing.number), &payload[..0]))
            }
        }
    }

    /// Sends the rest of a frame that was begun, and returns whether nothing is left. Waits for
    /// [`WRITE_LIMIT`] at most while the peer takes no bytes.
    fn send_rest(&self, outgoing: &mut Sending) -> io::Result<bool> {
        while !outgoing.rest.is_empty() {
            match (&self.stream).write(&outgoing.rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(sent) => drop(outgoing.rest.drain(..sent)),
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock => return Ok(false),
                    _ => return Err(error),
                },
            }
        }
        Ok(true)
    }

    /// Returns whether the peer has written a frame into the ring.
    pub(crate) fn has_record(&self) -> bool {
        self.rings.as_ref().is_some_and(Rings::has_record)
    }

    /// Takes the frame with this number out of the ring, if it is the next one there.
    pub(crate) fn take_record(&self, number: u64) -> io::Result<Option<Frame>> {
        let Some(rings) = &self.rings else { return Ok(None) };
        rings.read(|record| {
            let (head, payload) = record.split_first_chunk()?;
            let (header, found) = Header::decode(head)?;
            (found == number).then(|| (header, found, payload.to_vec()))
        })
    }

    pub(crate) fn close(&self) {
        self.is_alive.store(false, Ordering::SeqCst);
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test panics where a step fails")]
pub(crate) mod tests {
    use std::{net::TcpListener, sync::Arc, thread};

    use super::*;
    use crate::{
        call::Call,
        rank_frame::{Kind, read_frame},
    };

    pub(crate) fn link_of(stream: TcpStream, rings: Option<Rings>) -> Arc<Link> {
        stream.set_write_timeout(Some(WRITE_LIMIT)).unwrap();
        Arc::new(Link {
            rank: 0,
            incarnation: 0,
            stream,
            access: Access::default(),
            rings,
            futex: None,
            segment: None,
            staged: PeerBuffers::default(),
            outgoing: Mutex::default(),
            frame_ended: Condvar::default(),
            next_delivered: Mutex::default(),
            is_alive: true.into(),
        })
    }

    pub(crate) fn connected() -> (Arc<Link>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let peer = listener.accept().unwrap().0;
        (link_of(stream, None), peer)
    }

    pub(crate) fn header(sequence: u64, length: usize) -> Header {
        Header {
            kind: Kind::Message,
            group: 0,
            attempt: 0,
            sequence,
            step: 0,
            source: 0,
            length: length as u64,
            call: Call::NONE,
        }
    }

    /// Sends frames until the socket is full, and returns how many were begun, and how the last ended.
    fn fill(link: &Link, payload: &[u8]) -> (u64, SendProgress) {
        for sequence in 0.. {
            let progress = link.try_send(&header(sequence, payload.len()), payload).unwrap();
            match progress {
                SendProgress::Whole => {}
                SendProgress::Begun => return (sequence + 1, progress),
                SendProgress::Nothing => return (sequence, progress),
            }
        }
        unreachable!("no socket has room for all numbers");
    }

    #[test]
    fn full_socket_takes_part_of_a_frame() {
        let (link, mut peer) = connected();
        let payload: Vec<u8> = (0..=250).cycle().take(1 << 20).collect();
        let (begun, progress) = fill(&link, &payload);
        assert_eq!(progress, SendProgress::Begun);
        assert_eq!(link.try_send(&header(99, 0), &[]).unwrap(), SendProgress::Nothing);
        let writing = Arc::clone(&link);
        let writer = thread::spawn(move || {
            writing.flush(|| false).unwrap();
            writing.send(&header(begun, 3), b"end", || false).unwrap();
        });
        for sequence in 0..begun {
            let (found, number, bytes) = read_frame(&mut peer).unwrap();
            assert_eq!((found.sequence, number), (sequence, sequence));
            assert!(bytes == payload, "frame {sequence} is torn");
        }
        assert_eq!(read_frame(&mut peer).unwrap(), (header(begun, 3), begun, b"end".to_vec()));
        writer.join().unwrap();
        assert_eq!(link.try_send(&header(0, 0), &[]).unwrap(), SendProgress::Whole);
    }

    #[test]
    fn thread_that_blocks_in_a_send_blocks_no_other() {
        let (link, mut peer) = connected();
        let (begun, _) = fill(&link, &[7; 1 << 20]);
        let writing = Arc::clone(&link);
        let writer = thread::spawn(move || writing.send(&header(begun, 0), &[], || false));
        assert_eq!(link.try_send(&header(0, 0), &[]).unwrap(), SendProgress::Nothing);
        let mut frames = (0..=begun).map(|_| read_frame(&mut peer).unwrap().0.sequence);
        assert!((0..=begun).all(|sequence| frames.next() == Some(sequence)));
        writer.join().unwrap().unwrap();
    }

    #[test]
    fn frame_that_is_given_up_is_whole_before_the_next() {
        let (link, mut peer) = connected();
        let payload: Vec<u8> = (0..=250).cycle().take(1 << 20).collect();
        // Its peer takes no bytes. Frames that were not begun are left out.
        let mut begun = 0;
        for sequence in 0..64 {
            let number = link.outgoing.lock().number;
            let sent = link.send(&header(sequence, payload.len()), &payload, || true);
            begun += link.outgoing.lock().number - number;
            assert_eq!(sent.is_ok(), begun > sequence && link.outgoing.lock().rest.is_empty());
        }
        assert!(0 < begun && begun < 64, "{begun}");
        let writing = Arc::clone(&link);
        let writer = thread::spawn(move || writing.send(&header(99, 0), &[], || false));
        for sequence in 0..begun {
            let (found, number, bytes) = read_frame(&mut peer).unwrap();
            assert_eq!((found.sequence, number), (sequence, sequence));
            assert!(bytes == payload, "frame {sequence} is torn");
        }
        assert_eq!(read_frame(&mut peer).unwrap().0.sequence, 99);
        writer.join().unwrap().unwrap();
    }

    #[test]
    fn frame_for_a_closed_socket_is_an_error() {
        let (link, peer) = connected();
        link.close();
        assert!(link.try_send(&header(0, 0), &[]).is_err());
        assert!(link.send(&header(0, 0), &[], || false).is_err());
        drop(peer);
    }
}
