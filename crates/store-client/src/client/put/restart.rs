//! Puts whose holders cannot be reached: written again to the same places, or started again on other
//! segments.

use mooncake_base::{Moment, Result};

use super::{upload::UploadWrite, write::Written};
use crate::{client::ClientInner, protocol::STALL_LIMIT};

/// Maximum number of times that a put is started again on other segments.
pub(in crate::client) const RESTARTS_MAX: usize = 2;

impl ClientInner {
    /// Writes into every healthy replica. A silent holder is left for the other replicas; only a put
    /// that has no other replica waits for it. Failures are also recorded in the upload.
    pub(in crate::client) fn write(
        &self,
        puts: &mut [UploadWrite<'_>],
        now: Moment,
    ) -> Vec<Result<()>> {
        let Written { mut outcomes, last_round } = self.write_once(puts, Some(STALL_LIMIT), now);
        self.write_to_silent(puts, &mut outcomes, last_round);
        outcomes
    }

    /// Writes like [`write`](Self::write), but leaves puts that no holder has taken if others may
    /// take them. Returns their indexes: they are to be revoked and started again.
    pub(in crate::client) fn write_or_leave(
        &self,
        puts: &mut [UploadWrite<'_>],
        restarts_left: usize,
        now: Moment,
    ) -> Vec<usize> {
        let Written { mut outcomes, last_round } = self.write_once(puts, Some(STALL_LIMIT), now);
        let is_lost = |put: &UploadWrite<'_>| put.upload.is_lost_to_peers();
        if !puts.iter().any(is_lost) {
            return Vec::new();
        }
        if restarts_left == 0 || !self.has_other_holder() {
            self.write_to_silent(puts, &mut outcomes, last_round);
            return Vec::new();
        }
        (0..puts.len()).filter(|&at| is_lost(&puts[at])).collect()
    }

    /// Writes again to the holders that were silent, where a put has no other replica.
    fn write_to_silent(
        &self,
        puts: &mut [UploadWrite<'_>],
        outcomes: &mut [Result<()>],
        now: Moment,
    ) {
        let mut owners = Vec::new();
        let mut again = Vec::new();
        for (at, put) in puts.iter_mut().enumerate() {
            if put.upload.readmit_silent_replicas() {
                owners.push(at);
                let UploadWrite { key, upload, layout } = put;
                again.push(UploadWrite { key: *key, upload, layout: *layout });
            }
        }
        if again.is_empty() {
            return;
        }
        let written = self.write_once(&mut again, None, now).outcomes;
        for (at, outcome) in owners.into_iter().zip(written) {
            outcomes[at] = outcome;
        }
    }

    /// Returns whether a segment of a peer that is not suspected accepts objects.
    fn has_other_holder(&self) -> bool {
        let suspected = self.transfers.replicas().suspected().endpoints();
        self.segments().is_ok_and(|segments| {
            segments
                .iter()
                .any(|known| known.takes_objects && !suspected.contains(&known.segment.endpoint))
        })
    }
}
