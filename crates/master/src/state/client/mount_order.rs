//! Sequence numbers of mount messages: a delayed message may not undo a later one.

use crate::state::client::{ClientCalls, Clients};
use mooncake_base::{ClientId, Error, ErrorCode, Result, SegmentId};
use rustc_hash::FxHashSet;

impl ClientCalls<'_> {
    /// Drops all segments of the client but these.
    pub(in crate::state) fn retain_segments(&mut self, client: ClientId, segments: &[SegmentId]) {
        let kept: FxHashSet<SegmentId> = segments.iter().copied().collect();
        let mut dropped = self.inventory.pool.segments.of_client(client);
        dropped.retain(|&slot| !kept.contains(&self.inventory.pool.segments.at(slot).spec.id));
        self.drop_segments(&dropped);
    }
}

impl Clients {
    /// Accepts a mount message by its sequence number. 0 is not checked; an equal number is the
    /// same message, sent again.
    ///
    /// # Errors
    /// `CLIENT_NOT_FOUND`: register first. `INVALID_PARAMS`: a later message was processed before;
    /// drop this one.
    pub(in crate::state) fn check_sequence(
        &mut self,
        client: ClientId,
        sequence: u64,
    ) -> Result<()> {
        let known = self.at_mut(client)?;
        if sequence == 0 || sequence >= known.sequence {
            known.sequence = known.sequence.max(sequence);
            return Ok(());
        }
        Err(Error::new(
            ErrorCode::INVALID_PARAMS,
            "a later mount message of the client was processed",
        )
        .with("client", client)
        .with("sequence", sequence)
        .with("last_sequence", known.sequence))
    }
}
