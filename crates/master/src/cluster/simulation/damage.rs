//! Messages between members whose bytes change on their way.

use bytes::BytesMut;
use mooncake_base::{Error, Result};
use mooncake_proto::native_frame::{FRAME_BYTES_MAX, Reader};

use super::{Simulation, bugs::Bug, wire::Message};
use crate::cluster::channel::{CHECKSUM_BYTES, check_frame, encode};

impl Simulation {
    /// Returns what arrives of a message between members of which a bit was changed.
    pub(super) fn damage(&mut self, message: Message) -> Message {
        let (connection, damaged) = match message {
            Message::ToLeader { connection, message } => {
                let damaged = self.flip_bit(&message);
                (connection, damaged.map(|message| Message::ToLeader { connection, message }))
            }
            Message::ToStandby { connection, message } => {
                let damaged = self.flip_bit(&message);
                (connection, damaged.map(|message| Message::ToStandby { connection, message }))
            }
            other => return other,
        };
        self.outcome.damaged += 1;
        damaged.unwrap_or(Message::Broken { connection })
    }

    /// Sends a message as bytes of which one bit is another one when they arrive.
    fn flip_bit<M: prost::Message + Default>(&mut self, message: &M) -> Result<M> {
        let mut bytes = BytesMut::new();
        encode(message, true, &mut bytes)?;
        let at = self.random.below(bytes.len());
        bytes[at] ^= 1 << self.random.below(8);
        let mut input = Reader::new(bytes);
        input.set_trailer_bytes(CHECKSUM_BYTES);
        if !self.plan.has(Bug::TrustsDamage) {
            check_frame(&input)?;
        }
        // A length that has become longer waits for bytes until the connection is given up.
        input.take_message(FRAME_BYTES_MAX)?.ok_or_else(|| Error::internal("incomplete"))
    }
}
