//! In which order clients announce their memory: a message that was late may not undo a later one.

use mooncake_base::{ClientId, Error, ErrorCode, Result, SegmentId};

use super::State;

impl State {
    /// An announcement of the client with that number begins to be heard. 0 is not counted, and
    /// the same number again is the same announcement, sent twice.
    ///
    /// # Errors
    /// `CLIENT_NOT_FOUND`: register first. `INVALID_PARAMS`: a later one was heard before; this
    /// one counts for nothing.
    pub fn check_sequence(&mut self, client: ClientId, sequence: u64) -> Result<()> {
        let known = self.clients.at_mut(client)?;
        if sequence == 0 || sequence >= known.sequence {
            known.sequence = known.sequence.max(sequence);
            return Ok(());
        }
        Err(Error::new(ErrorCode::INVALID_PARAMS, "a later announcement of the client was heard")
            .with("client", client)
            .with("turn", sequence)
            .with("heard", known.sequence))
    }

    /// The client lends these segments and no others: what else is known of its memory goes.
    pub fn retain_segments(&mut self, client: ClientId, segments: &[SegmentId]) {
        for slot in self.segments_of(client) {
            if !segments.contains(&self.segments.at(slot).spec.id) {
                self.drop_segment(slot);
            }
        }
    }
}
