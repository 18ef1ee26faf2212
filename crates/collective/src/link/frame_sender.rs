//! Sends one frame in parts, so that its sender can give up though the peer takes no bytes.

use std::{
    io::{self, IoSlice, Write},
    net::Shutdown,
};

use super::{Link, Sending, WRITE_LIMIT};
use crate::rank_frame::{HEADER_BYTES, Header};

/// A frame that is being sent. Between two parts no lock is held and no thread waits. What is left of a
/// frame that was begun is kept by the link if this is dropped.
#[derive(Debug)]
pub(crate) struct FrameSender<'a> {
    link: &'a Link,
    header: &'a Header,
    payload: &'a [u8],
    /// What goes over the socket, once the frame has its turn, and how much of it was sent.
    begun: Option<([u8; HEADER_BYTES], &'a [u8])>,
    sent: usize,
}

impl<'a> FrameSender<'a> {
    pub(crate) fn new(link: &'a Link, header: &'a Header, payload: &'a [u8]) -> Self {
        Self { link, header, payload, begun: None, sent: 0 }
    }

    /// Sends what the peer has room for, and returns whether it has got all. Waits for a short time at most
    /// while the peer takes no bytes, or another frame is sent.
    pub(crate) fn send_part(&mut self) -> io::Result<bool> {
        let mut outgoing = self.link.outgoing.lock();
        if self.begun.is_none() {
            if outgoing.is_sending {
                self.link.frame_ended.wait_for(&mut outgoing, WRITE_LIMIT);
                return Ok(false);
            }
            if !self.link.send_rest(&mut outgoing)? {
                return Ok(false);
            }
            self.begun = self.link.send_in_ring(&mut outgoing, self.header, self.payload);
            if self.begun.is_none() {
                return Ok(true);
            }
            outgoing.number += 1;
            outgoing.is_sending = true;
        }
        match self.write() {
            Ok(true) => {
                self.end(&mut outgoing);
                Ok(true)
            }
            Ok(false) => Ok(false),
            Err(error) => {
                self.end(&mut outgoing);
                // A frame after a torn one would be misread.
                let _ = self.link.stream.shutdown(Shutdown::Both);
                Err(error)
            }
        }
    }

    /// Writes to the socket, and returns whether it has got all.
    fn write(&mut self) -> io::Result<bool> {
        let Some((head, payload)) = &self.begun else { return Ok(true) };
        while self.sent < head.len() + payload.len() {
            let (head, payload) = rest(head, payload, self.sent);
            match (&self.link.stream).write_vectored(&[IoSlice::new(head), IoSlice::new(payload)]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(sent) => self.sent += sent,
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock => return Ok(false),
                    _ => return Err(error),
                },
            }
        }
        Ok(true)
    }

    fn end(&mut self, outgoing: &mut Sending) {
        self.begun = None;
        outgoing.is_sending = false;
        self.link.frame_ended.notify_all();
    }
}

impl Drop for FrameSender<'_> {
    fn drop(&mut self) {
        let Some((head, payload)) = self.begun else { return };
        let mut outgoing = self.link.outgoing.lock();
        let (head, payload) = rest(&head, payload, self.sent);
        outgoing.rest.extend_from_slice(head);
        outgoing.rest.extend_from_slice(payload);
        self.end(&mut outgoing);
    }
}

/// Returns what is left of a frame.
fn rest<'a>(head: &'a [u8], payload: &'a [u8], sent: usize) -> (&'a [u8], &'a [u8]) {
    let head_left = head.get(sent..).unwrap_or_default();
    (head_left, &payload[sent.saturating_sub(head.len())..])
}
