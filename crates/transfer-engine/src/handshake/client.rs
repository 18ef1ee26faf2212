//! Asking a peer's handshake socket, from the calling thread.

use std::{
    io::{self, Read, Write},
    net::Shutdown,
};

use mooncake_base::{Endpoint, Error, ErrorCode, Moment, Result};

use super::{
    codec::{self, MESSAGE_BYTES_MAX_DEFAULT, Message, MessageKind, Notification},
    dial::{dial, peer_error},
    timed::Timed,
};
use crate::descriptor::{DESCRIPTOR_BYTES_MAX, SegmentDescriptor};

/// Sends one message on a connection of its own and returns the answer.
///
/// The deadline holds for connecting, sending and receiving together.
///
/// # Errors
/// The peer cannot be reached, does not answer in time, or answers something else than the
/// question's type.
pub fn ask(endpoint: &Endpoint, message: &Message, deadline: Moment) -> Result<Message> {
    let stream = dial(endpoint, deadline)?;
    let failed =
        |source| peer_error("the peer did not answer on its handshake socket", endpoint, source);
    // Without it the last part of a request waits for an acknowledgement; a refusal costs speed.
    let _ = stream.set_nodelay(true);
    let mut timed = Timed::new(&stream, deadline);
    timed.write_all(&message.encode()).map_err(failed)?;
    let mut prefix = [0; codec::LENGTH_BYTES];
    timed.read_exact(&mut prefix).map_err(failed)?;
    let length = codec::content_length(prefix, DESCRIPTOR_BYTES_MAX)
        .map_err(|error| error.with("peer", endpoint))?;
    // Grown as bytes come, not by what the peer claims.
    let mut content = Vec::new();
    timed.take(length as u64).read_to_end(&mut content).map_err(failed)?;
    if content.len() < length {
        return Err(failed(io::ErrorKind::UnexpectedEof.into()));
    }
    let _ = stream.shutdown(Shutdown::Both);
    let answer = Message::decode(content).map_err(|error| error.with("peer", endpoint))?;
    if answer.typed != message.typed {
        let text = "the peer answered a handshake with another type of message";
        return Err(Error::new(ErrorCode::TRANSFER_FAIL, text).with("peer", endpoint));
    }
    Ok(answer)
}

/// Asks for the peer's descriptor and tells it ours, as the established engine does.
///
/// # Errors
/// Those of [`ask`], and an answer that is no descriptor.
pub fn fetch_descriptor(
    endpoint: &Endpoint,
    own: &SegmentDescriptor,
    deadline: Moment,
) -> Result<SegmentDescriptor> {
    let mut body = own.to_json();
    if body.len() >= MESSAGE_BYTES_MAX_DEFAULT {
        // A peer with the established limit would drop the question; ours does not read it.
        body = SegmentDescriptor { buffers: Vec::new(), ..own.clone() }.to_json();
    }
    let answer = ask(endpoint, &Message::new(MessageKind::Metadata, body), deadline)?;
    SegmentDescriptor::from_json(&answer.body).map_err(|error| error.with("peer", endpoint))
}

/// Asks whether anybody is there.
///
/// # Errors
/// Those of [`ask`].
pub fn probe(endpoint: &Endpoint, deadline: Moment) -> Result<()> {
    ask(endpoint, &Message::new(MessageKind::Probe, *b"{}"), deadline).map(drop)
}

/// Delivers a notification.
///
/// # Errors
/// Those of [`ask`], and a peer that takes no more (its queue is full).
pub fn notify(endpoint: &Endpoint, notification: &Notification, deadline: Moment) -> Result<()> {
    let message = Message::new(MessageKind::Notify, notification.to_json());
    let answer = Notification::from_json(&ask(endpoint, &message, deadline)?.body)?;
    if answer.message == "success" {
        return Ok(());
    }
    Err(Error::new(ErrorCode::TRANSFER_FAIL, "the peer did not take the notification")
        .with("peer", endpoint)
        .with("answer", answer.message))
}
