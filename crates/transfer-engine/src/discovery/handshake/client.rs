//! A blocking client of the handshake socket.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpStream},
};

use mooncake_base::{Endpoint, Error, ErrorCode, Moment, Result};
use mooncake_os::{
    DeadlineStream,
    dial::{dial, peer_error},
};

use super::{
    codec::{self, KIND_BYTES, MESSAGE_BYTES_MAX_DEFAULT, Message, MessageKind, Notification},
    proof,
};
use crate::{
    discovery::descriptor::{DESCRIPTOR_BYTES_MAX, SegmentDescriptor},
    token::Token,
};

/// Sends one message on a new connection and returns the answer.
///
/// The deadline covers connecting, sending and receiving together.
///
/// # Errors
/// The peer cannot be reached, does not answer in time, or answers with another message type.
pub fn request(endpoint: &Endpoint, message: &Message, deadline: Moment) -> Result<Message> {
    HandshakeConnection::begin(endpoint, deadline)?.exchange(message)
}

/// Like [`request`], but requires that the peer has the same token, or that neither side has one.
///
/// # Errors
/// Those of [`request`], and a peer with which no token is shared.
pub(crate) fn request_with_token(
    token: Option<&Token>,
    endpoint: &Endpoint,
    message: &Message,
    deadline: Moment,
) -> Result<Message> {
    let connection = HandshakeConnection::begin(endpoint, deadline)?;
    let denied = |text| proof::denied(text).with("peer", endpoint);
    let Some(token) = token else {
        let answer = connection.exchange(message)?;
        return match proof::read_refusal(&answer.body) {
            Some(_) => Err(denied("the peer asks for a token, and this engine has none")),
            None => Ok(answer),
        };
    };
    let challenge = connection.exchange(&proof::challenge_request())?;
    let Some(owner_nonce) = proof::read_challenge(&challenge) else {
        return Err(denied("the peer asks for no token, and has shown none"));
    };
    let (sealed, exchange) = proof::seal(token, owner_nonce, message);
    let answer = connection.exchange(&sealed)?;
    proof::unseal_answer(token, &exchange, &answer).map_err(|error| error.with("peer", endpoint))
}

/// A connection for alternating requests and answers.
struct HandshakeConnection<'a> {
    endpoint: &'a Endpoint,
    stream: TcpStream,
    deadline: Moment,
}

impl<'a> HandshakeConnection<'a> {
    fn begin(endpoint: &'a Endpoint, deadline: Moment) -> Result<Self> {
        let stream = dial(endpoint, deadline)?;
        // Otherwise the last part of a request waits for an acknowledgement. A failure only costs
        // speed.
        let _ = stream.set_nodelay(true);
        Ok(Self { endpoint, stream, deadline })
    }

    fn exchange(&self, message: &Message) -> Result<Message> {
        let endpoint = self.endpoint;
        let failed = |source| {
            peer_error("the peer did not answer on its handshake socket", endpoint, source)
        };
        let mut timed = DeadlineStream::new(&self.stream, self.deadline);
        timed.write_all(&message.encode()).map_err(failed)?;
        let mut prefix = [0; codec::LENGTH_BYTES];
        timed.read_exact(&mut prefix).map_err(failed)?;
        let length = codec::content_length(prefix, DESCRIPTOR_BYTES_MAX)
            .map_err(|error| error.with("peer", endpoint))?;
        // Grows with the bytes received, not with the length that the peer claims.
        let mut content = Vec::new();
        timed.take(length as u64).read_to_end(&mut content).map_err(failed)?;
        if content.len() < length {
            return Err(failed(io::ErrorKind::UnexpectedEof.into()));
        }
        let answer = Message::decode(content).map_err(|error| error.with("peer", endpoint))?;
        if answer.typed != message.typed {
            let text = "the peer answered a handshake with another type of message";
            return Err(Error::new(ErrorCode::TRANSFER_FAIL, text).with("peer", endpoint));
        }
        Ok(answer)
    }
}

impl Drop for HandshakeConnection<'_> {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Requests the peer's descriptor and sends ours, as upstream does. With a token, only a peer with
/// the same token gets our descriptor, and only its answer is believed.
///
/// # Errors
/// Those of [`request`], a peer with which no token is shared, and an invalid descriptor.
pub fn fetch_descriptor(
    endpoint: &Endpoint,
    own: &SegmentDescriptor,
    token: Option<&Token>,
    deadline: Moment,
) -> Result<SegmentDescriptor> {
    let mut body = own.to_json();
    if body.len() + proof::SEAL_BYTES >= MESSAGE_BYTES_MAX_DEFAULT {
        // A peer with upstream's limit would drop the request; our server does not read its body.
        body = SegmentDescriptor { buffers: Vec::new(), ..own.clone() }.to_json();
    }
    let message = Message::new(MessageKind::Metadata, body);
    let answer = request_with_token(token, endpoint, &message, deadline)?;
    SegmentDescriptor::from_json(&answer.body).map_err(|error| error.with("peer", endpoint))
}

/// Checks whether a peer is alive.
///
/// # Errors
/// Those of [`request`].
pub fn probe(endpoint: &Endpoint, deadline: Moment) -> Result<()> {
    request(endpoint, &Message::new(MessageKind::Probe, *b"{}"), deadline).map(drop)
}

/// Returns the length of the message for a notification, as its receiver counts it.
pub(crate) fn notification_length(notification: &Notification, is_sealed: bool) -> usize {
    let seal = if is_sealed { proof::SEAL_BYTES } else { 0 };
    KIND_BYTES + seal + notification.to_json().len()
}

/// Delivers a notification; with a token, only to a peer with the same token.
///
/// # Errors
/// Those of [`request`], a peer with which no token is shared, and a peer whose queue is full.
pub fn notify(
    endpoint: &Endpoint,
    notification: &Notification,
    token: Option<&Token>,
    deadline: Moment,
) -> Result<()> {
    let message = Message::new(MessageKind::Notify, notification.to_json());
    let answer =
        Notification::from_json(&request_with_token(token, endpoint, &message, deadline)?.body)?;
    if answer.message == "success" {
        return Ok(());
    }
    Err(Error::new(ErrorCode::TRANSFER_FAIL, "the peer did not take the notification")
        .with("peer", endpoint)
        .with("answer", answer.message))
}
