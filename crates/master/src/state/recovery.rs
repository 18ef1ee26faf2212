//! What the log knows of and nobody has announced yet: kept for its owners, shown to nobody.
//!
//! For a grace after a restart a call that meets a dormant object is worth waiting with; whoever
//! drives the state asks [`State::awaits`]. After it the object is absent for readers and free for
//! writers. It comes back when its owner announces the very segment, unless it was removed or
//! replaced meanwhile; what is not announced in time is dropped.

use crate::state::ids::{ObjectSlot, SegmentSlot};
use std::time::Duration;

use mooncake_base::{ClientId, Error, ErrorCode, Incarnation, Moment, Result, SegmentId, TenantId};

use super::{Rules, SegmentSpec, State, timer::Timer};

/// How long what was restored is waited for.
#[derive(Debug, Default)]
pub(super) struct Recovery {
    /// Segments that nobody has announced.
    pub(super) segments: u64,
    grace: Moment,
    end: Moment,
    /// Until when memory of which nothing is known may have been lent to the earlier master.
    pub(super) unknown_grants_until: Moment,
}

impl Recovery {
    pub(super) fn begin(now: Moment, unknown_grants_until: Moment, rules: &Rules) -> Self {
        let grace = now + rules.resume_grace;
        let end = grace.max(now + rules.unclaimed_ttl);
        Self { segments: 0, grace, end, unknown_grants_until }
    }

    /// When what was not announced is dropped.
    pub(super) fn end(&self) -> Moment {
        self.end
    }

    /// Nobody could announce anything for so long.
    pub(super) fn postpone(&mut self, by: Duration) {
        (self.grace, self.end) = (self.grace + by, self.end + by);
    }
}

/// What a call is about, as far as waiting for owners goes.
#[derive(Debug)]
pub enum RecoveryScope<'a> {
    /// These keys.
    Keys(&'a TenantId, &'a [&'a [u8]]),
    /// Room for something new.
    Space,
    /// Anything.
    All,
}

impl State {
    /// Until when the call should wait for owners who have not come back yet; `None`: it need not,
    /// or no longer.
    pub fn recovery_wait(&self, now: Moment, awaited: &RecoveryScope<'_>) -> Option<Moment> {
        if self.recovery.segments == 0 || self.recovery.grace.has_passed(now) {
            return None;
        }
        let awaits = match awaited {
            RecoveryScope::All => true,
            RecoveryScope::Space => self.segments.open().is_empty(),
            RecoveryScope::Keys(tenant, keys) => {
                self.objects.tenant_index(tenant).is_some_and(|tenant| {
                    keys.iter().any(|key| {
                        self.objects.find(tenant, key).is_some_and(|slot| self.is_unclaimed(slot))
                    })
                })
            }
        };
        awaits.then_some(self.recovery.grace)
    }

    /// How many segments of before the restart nobody has announced.
    pub fn unclaimed_segments(&self) -> u64 {
        self.recovery.segments
    }

    /// The owner still has the memory that it lent to an earlier master: what lies there can be
    /// read again. Nothing if it is in use already.
    ///
    /// # Errors
    /// `CLIENT_NOT_FOUND`: register first. `SEGMENT_NOT_FOUND`: nothing is known of it, or it is
    /// not the same memory any more; lend other memory in its place.
    pub fn resume(&mut self, client: ClientId, segment: &SegmentSpec) -> Result<()> {
        self.clients.check(client)?;
        let found = self.segments.by_id(segment.id).filter(|&slot| {
            let known = self.segments.at(slot);
            known.client == client && known.spec == *segment
        });
        let Some(slot) = found else {
            return Err(Error::new(
                ErrorCode::SEGMENT_NOT_FOUND,
                "nothing is known of the memory; lend other memory in its place",
            )
            .with("segment", segment.id));
        };
        self.claim_segment(slot);
        Ok(())
    }

    /// The segment is its owner's to read and write again.
    pub(super) fn claim_segment(&mut self, slot: SegmentSlot) {
        let client = self.segments.at(slot).client;
        let is_suspect = self.clients.is_suspect(client);
        let segment = self.segments.at_mut(slot);
        if std::mem::take(&mut segment.is_unclaimed) {
            segment.is_suspect = is_suspect;
            self.recovery.segments -= 1;
            self.segments.refresh_open();
        }
    }

    /// Whether all that can be read of an object waits for its owners.
    pub(super) fn is_unclaimed(&self, slot: ObjectSlot) -> bool {
        if self.recovery.segments == 0 {
            return false;
        }
        let copies = &self.objects.at(slot).replicas[..];
        let mut standing = copies
            .iter()
            .map(|copy| self.segments.at(copy.segment))
            .filter(|segment| segment.is_mounted())
            .peekable();
        standing.peek().is_some() && standing.all(|segment| segment.is_unclaimed)
    }

    /// The timer of a segment rang: nobody has announced it, or it is set again.
    pub(super) fn expire_unclaimed(
        &mut self,
        now: Moment,
        id: SegmentId,
        incarnation: Incarnation,
    ) {
        let Some(slot) = self.segments.by_id(id) else { return };
        let segment = self.segments.at(slot);
        if segment.spec.incarnation != incarnation || !segment.is_unclaimed {
            return;
        }
        let end = self.recovery.end();
        if end.has_passed(now) {
            let client = segment.client;
            self.drop_segment(slot);
            if self.clients.check(client).is_err() {
                // Nobody will fetch what waits for it.
                self.reassign_tasks(now, client);
            }
        } else {
            self.timers.push(end, Timer::Unclaimed(id, incarnation));
        }
    }
}
