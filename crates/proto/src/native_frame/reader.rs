//! The receiving end of a blocking connection: collects bytes, and takes messages from them.

use std::io;

use bytes::{Buf as _, BytesMut};
use mooncake_base::Result;
use prost::Message;

use super::{LENGTH_BYTES, decode_with_trailer, release_large};

/// Bytes that a read asks for: at least as many as most frames have, and at most so many of a large one.
const READ_BYTES_MIN: usize = 4 << 10;
const READ_BYTES_MAX: usize = 256 << 10;

/// Received bytes whose messages have not been taken yet. The caller reads from the connection, and
/// decides how long a read may wait.
#[derive(Debug, Default)]
pub struct Reader {
    bytes: BytesMut,
    trailer_bytes: usize,
}

/// Outcome of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filled {
    /// Bytes arrived, or a signal interrupted the read.
    Open,
    /// The peer closed the connection between two frames.
    Closed,
}

impl Reader {
    /// Begins with bytes that were read already.
    pub const fn new(bytes: BytesMut) -> Self {
        Self { bytes, trailer_bytes: 0 }
    }

    /// Moves the received bytes to a reader with the same trailers.
    pub fn split_off(&mut self) -> Self {
        let bytes = std::mem::take(&mut self.bytes);
        Self { bytes, trailer_bytes: self.trailer_bytes }
    }

    /// Sets how many bytes follow each frame from here on, as its checksum for instance.
    pub const fn set_trailer_bytes(&mut self, trailer_bytes: usize) {
        self.trailer_bytes = trailer_bytes;
    }

    /// Returns whether no byte waits to be taken.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Calls `read` once, with a buffer that has room for what is missing of the next frame.
    ///
    /// # Errors
    /// The error of `read`, or `UnexpectedEof`: the peer closed the connection inside a frame.
    pub fn fill(
        &mut self,
        read: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<Filled> {
        let filled = self.bytes.len();
        let missing = self.next_bytes().unwrap_or(0).saturating_sub(filled);
        self.bytes.resize(filled + missing.clamp(READ_BYTES_MIN, READ_BYTES_MAX), 0);
        let outcome = read(&mut self.bytes[filled..]);
        self.bytes.truncate(filled + *outcome.as_ref().unwrap_or(&0));
        match outcome {
            Ok(0) if filled == 0 => Ok(Filled::Closed),
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => Ok(Filled::Open),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Filled::Open),
            Err(error) => Err(error),
        }
    }

    /// Takes the first `N` bytes, which belong to no frame; `None` if fewer have arrived.
    pub fn take_bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let bytes = self.bytes.first_chunk::<N>().copied()?;
        self.bytes.advance(N);
        Some(bytes)
    }

    /// Returns the next frame and its trailer, once both have arrived.
    pub fn next_frame(&self) -> Option<(&[u8], &[u8])> {
        let whole = self.bytes.get(..self.next_bytes()?)?;
        Some(whole.split_at(whole.len() - self.trailer_bytes))
    }

    /// Takes the next message; `None` if its frame is incomplete.
    ///
    /// # Errors
    /// Those of [`decode`](super::decode).
    pub fn take_message<M: Message + Default>(&mut self, limit: usize) -> Result<Option<M>> {
        decode_with_trailer(&mut self.bytes, limit, self.trailer_bytes)
    }

    /// Frees a buffer that has grown large, unless it holds bytes.
    pub fn release_large_buffer(&mut self) {
        release_large(&mut self.bytes);
    }

    /// Returns the length of the next frame with all that belongs to it, once its head has arrived.
    fn next_bytes(&self) -> Option<usize> {
        let length = self.bytes.first_chunk::<LENGTH_BYTES>()?;
        Some(LENGTH_BYTES + u32::from_le_bytes(*length) as usize + self.trailer_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::native_frame::{DaemonGreeting, GREETING_BYTES_MAX, KEPT_BYTES_MAX, encode};

    const TRAILER: [u8; 4] = *b"tail";

    fn message(number: usize) -> DaemonGreeting {
        DaemonGreeting { name: "n".repeat(number), metadata: String::new() }
    }

    /// Returns two frames, each with a trailer.
    fn wire(trailer: &[u8]) -> BytesMut {
        let mut wire = BytesMut::new();
        for number in [1, 2] {
            encode(&message(number), &mut wire).unwrap();
            wire.extend_from_slice(trailer);
        }
        wire
    }

    /// Takes the messages of bytes that arrive one by one, and how the connection ends.
    fn receive(bytes: &[u8], trailer_bytes: usize) -> (Vec<DaemonGreeting>, io::Result<Filled>) {
        let mut reader = Reader::default();
        reader.set_trailer_bytes(trailer_bytes);
        let mut rest = bytes.chunks(1);
        let mut messages = Vec::new();
        loop {
            while let Some(message) = reader.take_message(GREETING_BYTES_MAX).unwrap() {
                messages.push(message);
            }
            let filled = reader.fill(|into| {
                let next = rest.next().unwrap_or_default();
                into[..next.len()].copy_from_slice(next);
                Ok(next.len())
            });
            if !matches!(filled, Ok(Filled::Open)) {
                return (messages, filled);
            }
        }
    }

    #[test]
    fn messages_are_taken_as_their_last_byte_arrives() {
        for trailer in [&[][..], &TRAILER] {
            let (messages, end) = receive(&wire(trailer), trailer.len());
            assert_eq!(messages, [message(1), message(2)]);
            assert_eq!(end.unwrap(), Filled::Closed);
        }
    }

    #[test]
    fn end_inside_a_frame_or_its_trailer_is_an_error() {
        for trailer in [&[][..], &TRAILER] {
            let wire = wire(trailer);
            let (messages, end) = receive(&wire[..wire.len() - 1], trailer.len());
            assert_eq!(messages, [message(1)]);
            assert_eq!(end.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        }
    }

    #[test]
    fn frame_is_shown_with_its_trailer_once_both_have_arrived() {
        let wire = wire(&TRAILER);
        let mut reader = Reader::new(wire.clone());
        reader.set_trailer_bytes(TRAILER.len());
        let whole = wire.len() / 2;
        let (frame, trailer) = reader.next_frame().unwrap();
        assert_eq!((frame, trailer), (&wire[..frame.len()], &TRAILER[..]));
        let mut cut = Reader::new(BytesMut::from(&wire[..whole - 1]));
        cut.set_trailer_bytes(TRAILER.len());
        assert!(cut.next_frame().is_none());
        assert_eq!(cut.take_message::<DaemonGreeting>(GREETING_BYTES_MAX).unwrap(), None);
    }

    #[test]
    fn frame_above_the_limit_is_an_error_before_it_arrives() {
        let mut reader = Reader::new(BytesMut::from(&u32::MAX.to_le_bytes()[..]));
        reader.set_trailer_bytes(TRAILER.len());
        assert!(reader.next_frame().is_none());
        reader.take_message::<DaemonGreeting>(GREETING_BYTES_MAX).unwrap_err();
    }

    #[test]
    fn failed_read_adds_no_bytes() {
        let mut reader = Reader::default();
        assert_eq!(reader.fill(|_| Err(io::ErrorKind::Interrupted.into())).unwrap(), Filled::Open);
        let error = reader.fill(|_| Err(io::ErrorKind::WouldBlock.into())).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert!(reader.is_empty());
    }

    #[test]
    fn read_asks_for_what_is_missing_of_a_large_frame() {
        let length = u32::try_from(READ_BYTES_MAX / 2).unwrap();
        let mut reader = Reader::new(BytesMut::from(&length.to_le_bytes()[..]));
        let ask = |reader: &mut Reader, bytes| {
            let mut asked = 0;
            let read = |into: &mut [u8]| {
                asked = into.len();
                Ok(bytes)
            };
            assert_eq!(reader.fill(read).unwrap(), Filled::Open);
            asked
        };
        assert_eq!(ask(&mut reader, READ_BYTES_MAX / 4), READ_BYTES_MAX / 2);
        assert_eq!(ask(&mut reader, READ_BYTES_MAX / 4 - 1), READ_BYTES_MAX / 4);
        assert_eq!(ask(&mut reader, 1), READ_BYTES_MIN);
    }

    #[test]
    fn bytes_in_front_of_the_first_frame_are_taken() {
        let mut reader = Reader::new(BytesMut::from(&b"greet"[..]));
        assert_eq!(reader.take_bytes::<6>(), None);
        assert_eq!(reader.take_bytes::<4>(), Some(*b"gree"));
        assert!(!reader.is_empty());
    }

    #[test]
    fn both_readers_of_a_connection_expect_trailers() {
        let mut first = Reader::new(wire(&TRAILER));
        first.set_trailer_bytes(TRAILER.len());
        let mut second = first.split_off();
        assert!(first.is_empty());
        first.bytes = wire(&TRAILER);
        for reader in [&mut first, &mut second] {
            for number in [1, 2] {
                let taken = reader.take_message(GREETING_BYTES_MAX).unwrap();
                assert_eq!(taken, Some(message(number)));
            }
        }
    }

    #[test]
    fn large_buffer_is_freed_once_it_is_empty() {
        let mut reader = Reader::new(BytesMut::zeroed(KEPT_BYTES_MAX + 1));
        reader.release_large_buffer();
        assert_eq!(reader.bytes.len(), KEPT_BYTES_MAX + 1);
        reader.bytes.clear();
        reader.release_large_buffer();
        assert_eq!(reader.bytes.capacity(), 0);
    }
}
