//! The writing of one put, piece by piece into one copy after the other.

use std::time::Duration;

use mooncake_base::{Moment, ReplicaId, Version};
use mooncake_store_client::protocol::Closing;

use crate::{
    actor::client::Input,
    call::{Place, WrittenPut},
};

/// A put that is being written.
#[derive(Debug)]
pub(super) struct Writing {
    pub(super) version: Version,
    /// The request of the call that started the put.
    pub(super) request: u64,
    /// When the call was sent that began the write window.
    pub(super) window_began: Moment,
    pub(super) places: Vec<Place>,
    /// The next copy, and the next word in that copy.
    pub(super) next: (usize, u64),
    failed: Vec<ReplicaId>,
    /// Failed replicas whose holders took nothing in time; a piece may still be on its way.
    silent: Vec<ReplicaId>,
    /// Replicas that were silent and are written again.
    pub(super) late: Vec<ReplicaId>,
    /// The piece whose confirmation is awaited; 0: none.
    pub(super) piece: u64,
    /// How the put is to be closed; `None` while it is written.
    pub(super) closing: Option<Closing>,
}

impl Writing {
    pub(super) fn new(
        version: Version,
        request: u64,
        window_began: Moment,
        places: Vec<Place>,
    ) -> Self {
        Self {
            version,
            request,
            window_began,
            places,
            next: (0, 0),
            failed: Vec::new(),
            silent: Vec::new(),
            late: Vec::new(),
            piece: 0,
            closing: None,
        }
    }

    /// Handles an input. Returns whether the put goes on with the next piece.
    pub(super) fn step(&mut self, input: &Input) -> bool {
        match *input {
            Input::Wrote { piece, is_written } if piece == self.piece => {
                if !is_written {
                    self.leave();
                }
                true
            }
            Input::Silent { piece } if piece == self.piece => {
                self.silent.extend(self.places.get(self.next.0).map(|place| place.replica));
                self.leave();
                true
            }
            _ => false,
        }
    }

    /// Leaves the holder that is being written to.
    fn leave(&mut self) {
        self.failed.extend(self.places.get(self.next.0).map(|place| place.replica));
        self.next = (self.next.0 + 1, 0);
    }

    /// Takes the silent holders back if no other is left, as the store client does. Returns whether
    /// there are any.
    pub(super) fn readmit(&mut self) -> bool {
        if self.silent.is_empty() || self.has_replica() {
            return false;
        }
        let silent = std::mem::take(&mut self.silent);
        self.failed.retain(|replica| !silent.contains(replica));
        self.late.extend(silent);
        self.next = (0, 0);
        true
    }

    /// Returns whether a copy is left to write.
    pub(super) fn has_replica(&self) -> bool {
        self.failed.len() < self.places.len()
    }

    /// Returns whether a new write window is to be asked for: half of it is over.
    pub(super) fn is_to_be_renewed(&self, now: Moment, window: Duration) -> bool {
        (self.window_began + window / 2).has_passed(now)
            && !(self.window_began + window).has_passed(now)
            && self.closing.is_none()
            && self.has_replica()
    }

    /// Returns the place of the next piece of an object of this length. `None`: all are written.
    pub(super) fn next_place(&mut self, length: u64) -> Option<Place> {
        if self.next.1 >= length {
            self.next = (self.next.0 + 1, 0);
        }
        let is_failed = |place: &Place| self.failed.contains(&place.replica);
        while self.places.get(self.next.0).is_some_and(is_failed) {
            self.next.0 += 1;
        }
        self.places.get(self.next.0).copied()
    }

    /// Returns the replicas that words may still reach if the put is revoked now or given up later.
    pub(super) fn unsettled(&self) -> Vec<ReplicaId> {
        self.failed.iter().chain(&self.late).copied().collect()
    }

    /// Names the put in a call that ends it.
    pub(super) fn ended(&self, key: u64, checksum: Option<u64>) -> WrittenPut {
        let (failed, late) = (self.failed.clone(), self.late.clone());
        WrittenPut { key, version: self.version, failed, late, checksum }
    }

    /// Names the put in a call that revokes it.
    pub(super) fn revoked(&self, key: u64) -> WrittenPut {
        WrittenPut { failed: self.unsettled(), ..WrittenPut::of(key, self.version) }
    }
}
