//! Promotions in the model: memory to which bytes may still be on their way is given to nobody.

use mooncake_base::{ClientId, ReplicaId};

use super::{Call, DISK, KEYS, Model};
use crate::state::*;

/// A promotion that the owner of the disk was told to write, and the memory.
pub(super) struct Promoted {
    replica: ReplicaId,
    stretches: Vec<(u64, u64, u64)>,
}

impl Model {
    pub(super) fn run_promotion(&mut self, owner: ClientId, call: Call) {
        let now = self.pool.now;
        match call {
            Call::Prefetch { key } => {
                let tenant = self.pool.tenant.clone();
                let asked = PromotionCalls::new(self.pool.state.tasks()).prefetch(
                    now,
                    &tenant,
                    KEYS[key].as_bytes(),
                );
                let version = self.readable_version(key);
                assert!(asked == Prefetch::Unneeded || version.is_some());
            }
            Call::FetchPromotions => {
                let fetched = PromotionCalls::new(self.pool.state.tasks())
                    .fetch(now, owner, DISK, 2, 400_000);
                for object in fetched.map(|batch| batch.objects).unwrap_or_default() {
                    let stretches = self.stretches(&object.places);
                    self.assert_unfenced(&stretches);
                    let until = now + self.pool.state.rules().late_end();
                    for &(start, end, incarnation) in &stretches {
                        self.fences.insert((incarnation, start, end), until);
                    }
                    let replica = object.places[0].replica;
                    self.disk.promoted.push(Promoted { replica, stretches });
                }
            }
            Call::EndPromotion { nth, fails } if !self.disk.promoted.is_empty() => {
                let at = nth.index(self.disk.promoted.len());
                let Promoted { replica, stretches } = self.disk.promoted.swap_remove(at);
                let mut promotions = PromotionCalls::new(self.pool.state.tasks());
                let reported = promotions.end(now, owner, DISK, replica, !fails);
                if reported.is_ok() && !fails {
                    // All bytes have arrived.
                    for (start, end, incarnation) in stretches {
                        self.fences.remove(&(incarnation, start, end));
                    }
                }
            }
            _ => {}
        }
    }

    /// Checks that nobody reads or writes the memory still.
    pub(super) fn assert_unfenced(&self, stretches: &[(u64, u64, u64)]) {
        for &(start, end, incarnation) in stretches {
            for (&(other, from, to), until) in &self.fences {
                let overlaps = other == incarnation && start < to && from < end;
                assert!(!overlaps || *until <= self.pool.now, "fenced memory was given away");
            }
        }
    }
}
