//! The in-sync set as its leader knows it, with changes whose outcome is not known.

use std::collections::BTreeSet;

use mooncake_base::{Error, ErrorCode, Result};

use crate::{
    in_sync::{InSyncSet, MemberId},
    service::Change,
    view::Lease,
};

/// Maximum number of changes whose outcome is not known.
const UNRESOLVED_MAX: usize = 16;

/// The set in the service, and those that may have replaced it.
#[derive(Debug)]
pub(super) struct KnownSets {
    current: InSyncSet,
    /// Each replaces `current` if its call is carried out, however late.
    unresolved: Vec<InSyncSet>,
}

impl KnownSets {
    pub(super) const fn new(current: InSyncSet) -> Self {
        Self { current, unresolved: Vec::new() }
    }

    pub(super) fn begin_change(
        &mut self,
        lease: Lease,
        members: BTreeSet<MemberId>,
    ) -> Result<Change> {
        let to = self.current.changed(lease.view, members)?;
        if !self.unresolved.contains(&to) {
            if self.unresolved.len() == UNRESOLVED_MAX {
                let text = "the outcomes of too many changes of the in-sync set are not known";
                return Err(Error::new(ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS, text)
                    .with("limit", UNRESOLVED_MAX));
            }
            self.unresolved.push(to.clone());
        }
        Ok(Change { lease, from: self.current.clone(), to })
    }

    /// Takes the set that the service holds, or held not long ago.
    pub(super) fn observe(&mut self, set: &InSyncSet) {
        if set.number > self.current.number {
            // Changes of the former set compare it, so that they fail from now on.
            self.current = set.clone();
            self.unresolved.clear();
        }
    }

    pub(super) fn required_members(&self) -> BTreeSet<MemberId> {
        let sets = self.unresolved.iter().chain([&self.current]);
        sets.flat_map(|set| set.members.iter().cloned()).collect()
    }

    /// The members of the last known set alone.
    pub(super) const fn current_members(&self) -> &BTreeSet<MemberId> {
        &self.current.members
    }
}
