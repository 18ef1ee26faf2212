//! One frame to the owner, and its answer: our protocol and upstream's.

use std::io;

use mooncake_base::{Endpoint, Error, ErrorCode};

use super::connection::{DataConnection, SendFailure};
use crate::{
    transfer_entry::{Opcode, TransferEntry},
    transport::{
        TimeLimits,
        tcp::{
            batch_split::Part,
            compat_frame,
            data_frame::{self, Refusal, RequestHeader, ResponseHeader},
            vectored_io::Span,
        },
    },
};

/// The outcome of one frame.
pub(super) enum FrameOutcome {
    /// Every part has its outcome, and the connection can be reused.
    Done,
    /// Every part has its outcome, but the peer closes the connection.
    Closing,
    /// The local memory of one part cannot be read, so the request cannot be completed.
    BadPart(usize),
    /// The connection broke; `is_before_response` if no byte of the response had arrived.
    Broken { source: io::Error, is_before_response: bool },
}

/// The exchange of one frame.
pub(super) struct FrameExchange<'a> {
    pub(super) connection: &'a mut DataConnection,
    pub(super) opcode: Opcode,
    pub(super) parts: &'a [Part],
    pub(super) entries: &'a mut [TransferEntry],
    pub(super) endpoint: &'a Endpoint,
    pub(super) limits: TimeLimits,
}

impl FrameExchange<'_> {
    /// Moves all parts in one native request.
    pub(super) fn native(&mut self) -> FrameOutcome {
        self.connection.sequence += 1;
        let payload = self.parts.iter().map(|part| part.remote.length).sum();
        let (opcode, count, sequence) = (self.opcode, self.parts.len(), self.connection.sequence);
        let request = RequestHeader { opcode, count, sequence, payload };
        self.connection.wire.clear();
        request.encode(&mut self.connection.wire);
        for part in self.parts {
            data_frame::encode_entry(part.remote, &mut self.connection.wire);
        }
        self.load_spans(self.opcode == Opcode::Write, &[]);
        if let Err(failure) = self.connection.send(self.limits) {
            return failure.into();
        }
        self.native_response(&request).unwrap_or_else(|(source, is_before_response)| {
            FrameOutcome::Broken { source, is_before_response }
        })
    }

    fn native_response(
        &mut self,
        request: &RequestHeader,
    ) -> Result<FrameOutcome, (io::Error, bool)> {
        let mut header = [0; data_frame::RESPONSE_BYTES];
        self.connection.read(&mut header, self.limits).map_err(|source| (source, true))?;
        let mid_response = |source: io::Error| (source, false);
        let answer =
            ResponseHeader::decode(&header, request).map_err(|bad| mid_response(bad.into()))?;
        let mut list = vec![0; answer.refused * data_frame::REFUSAL_BYTES];
        self.connection.read(&mut list, self.limits).map_err(mid_response)?;
        let refusals =
            Refusal::decode_all(&list, self.parts.len()).map_err(|bad| mid_response(bad.into()))?;
        for refusal in &refusals {
            let part = &self.parts[refusal.index];
            part.complete(self.entries, Err(part.refused(refusal.code, self.endpoint)));
        }
        if self.opcode == Opcode::Read {
            self.load_spans(true, &refusals);
            let expected: u64 = self.connection.spans.iter().map(|span| span.length() as u64).sum();
            if answer.payload != expected {
                return Err(mid_response(
                    data_frame::Malformed("the length of the payload is wrong").into(),
                ));
            }
            self.receive_parts().map_err(mid_response)?;
        }
        self.complete_parts();
        Ok(FrameOutcome::Done)
    }

    /// Moves the only part in an upstream request.
    pub(super) fn compat(&mut self, has_status: bool) -> FrameOutcome {
        self.compat_exchange(has_status).unwrap_or_else(|exchange| exchange)
    }

    fn compat_exchange(&mut self, has_status: bool) -> Result<FrameOutcome, FrameOutcome> {
        let before_response = |source| FrameOutcome::Broken { source, is_before_response: true };
        let mid_response = |source| FrameOutcome::Broken { source, is_before_response: false };
        // Upstream's frames carry one range; the framer was given that limit.
        let header =
            compat_frame::Header { opcode: self.opcode, range: self.parts[0].remote, has_status };
        self.connection.wire.clear();
        self.connection.wire.extend_from_slice(&header.encode());
        self.load_spans(self.opcode == Opcode::Write, &[]);
        let sent = self.connection.send(self.limits);
        if let Err(failure @ SendFailure::BadSpan(_)) = sent {
            return Err(failure.into());
        }
        // A refusal may have arrived before everything was sent; it is the cause of the failure.
        if has_status {
            let mut status = [0; compat_frame::STATUS_BYTES];
            let read = self.connection.read(&mut status, self.limits);
            if let (Err(SendFailure::Broken(source)), Err(_)) = (sent, &read) {
                return Err(before_response(source));
            }
            read.map_err(before_response)?;
            let status =
                compat_frame::Status::decode(status).map_err(|bad| mid_response(bad.into()))?;
            if status == compat_frame::Status::Refused {
                let part = &self.parts[0];
                let error = part.refused(ErrorCode::TRANSFER_FAIL, self.endpoint);
                part.complete(self.entries, Err(error));
                return Ok(FrameOutcome::Closing);
            }
        } else {
            sent.map_err(FrameOutcome::from)?;
        }
        if self.opcode == Opcode::Read {
            self.load_spans(true, &[]);
            self.receive_parts().map_err(mid_response)?;
        }
        self.complete_parts();
        Ok(FrameOutcome::Done)
    }

    /// Lists the local memory of the parts that were not refused, or nothing if not `is_wanted`.
    fn load_spans(&mut self, is_wanted: bool, refusals: &[Refusal]) {
        let spans = &mut self.connection.spans;
        spans.clear();
        if !is_wanted {
            return;
        }
        let mut refusals = refusals.iter().peekable();
        for (index, part) in self.parts.iter().enumerate() {
            let is_refused = refusals.next_if(|refusal| refusal.index == index).is_some();
            spans.push(if is_refused {
                Span::discard(0) // keeps the indexes of spans and parts equal
            } else {
                part.span()
            });
        }
    }

    fn receive_parts(&mut self) -> io::Result<()> {
        for index in self.connection.receive(self.limits)? {
            let part = &self.parts[index];
            part.complete(self.entries, Err(bad_local_error(part)));
        }
        Ok(())
    }

    fn complete_parts(&mut self) {
        for part in self.parts {
            part.complete(self.entries, Ok(()));
        }
    }
}

impl From<SendFailure> for FrameOutcome {
    fn from(failure: SendFailure) -> Self {
        match failure {
            SendFailure::Broken(source) => Self::Broken { source, is_before_response: true },
            SendFailure::BadSpan(index) => Self::BadPart(index),
        }
    }
}

pub(super) fn bad_local_error(part: &Part) -> Error {
    Error::invalid("the local address is not accessible memory")
        .with("address", format_args!("{:#x}", part.address))
        .with("length", part.length())
}
