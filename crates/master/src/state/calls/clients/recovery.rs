//! Owners that claim their segments after a restart.

use mooncake_base::{ClientId, Error, ErrorCode, Incarnation, Moment, Result, SegmentId};

use crate::state::{
    calls::{clients::ClientCalls, put::AbandonReason},
    ids::SegmentSlot,
    inventory::{
        recovery::{end_doubt, recovery_end},
        segments,
    },
    pool::segment::SegmentSpec,
    timer::Timer,
};

impl ClientCalls<'_> {
    /// Drops all segments that came from the log, with their objects, since the log is older than
    /// it may be: their memory may have been reused. Owners that announced them again are
    /// forgotten, so that they register and mount other memory. Puts whose memory is gone with the
    /// segments are abandoned. Returns the number of segments.
    pub(in crate::state) fn drop_recovered(&mut self, now: Moment) -> usize {
        let recovered =
            self.inventory.segments().mounted().filter(|(_, segment)| segment.is_recovered);
        let mut owners: Vec<ClientId> = recovered.map(|(_, segment)| segment.client).collect();
        let count = owners.len();
        owners.sort_unstable_by_key(|owner| owner.bits());
        owners.dedup();
        for owner in owners {
            self.forget_client(now, owner, AbandonReason::Vanished);
        }
        self.disks().drop_recovered();
        self.puts().abandon_lost_writes();
        end_doubt(self.inventory);
        count
    }

    /// Claims a segment that the owner mounted at an earlier master. The objects are readable
    /// again. Has no effect on a segment that is claimed already.
    ///
    /// # Errors
    /// `CLIENT_NOT_FOUND`: register first. `SEGMENT_NOT_FOUND`: the segment is unknown, or its
    /// memory has changed; mount other memory in its place.
    pub(in crate::state) fn resume(
        &mut self,
        client: ClientId,
        segment: &SegmentSpec,
    ) -> Result<()> {
        self.inventory.clients().check(client)?;
        let found = self.inventory.segments().by_id(segment.id).filter(|&slot| {
            let known = self.inventory.segment(slot);
            known.client == client && known.spec == *segment
        });
        let Some(slot) = found else {
            return Err(Error::new(
                ErrorCode::SEGMENT_NOT_FOUND,
                "the segment is unknown or has changed; mount other memory in its place",
            )
            .with("segment", segment.id));
        };
        self.claim_segment(slot);
        Ok(())
    }

    /// Makes the segment available again.
    pub(in crate::state) fn claim_segment(&mut self, slot: SegmentSlot) {
        segments::claim(self.inventory, slot);
    }

    /// Handles the timer of an unclaimed segment: drops it or sets the timer again.
    pub(in crate::state) fn expire_unclaimed(
        &mut self,
        now: Moment,
        id: SegmentId,
        incarnation: Incarnation,
    ) {
        let Some(slot) = self.inventory.segments().by_id(id) else { return };
        let segment = self.inventory.segment(slot);
        if segment.spec.incarnation != incarnation || !segment.is_unclaimed {
            return;
        }
        let end = recovery_end(self.inventory);
        if end.has_passed(now) {
            let client = segment.client;
            self.drop_segment(slot);
            if self.inventory.clients().check(client).is_err() {
                // The client will not come back to fetch them.
                self.tasks().reassign_tasks(now, client);
            }
        } else {
            self.inventory.set_timer(end, Timer::Unclaimed(id, incarnation));
        }
    }
}
