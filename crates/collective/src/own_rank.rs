//! What every part of a group needs of it: its number, the slot of this process, its state, its connections
//! and its counters; and the groups that are open in this process.

use std::sync::{Arc, Weak};

use mooncake_base::{Error, Result, exposition::Exposition, sync::Mutex};

use crate::{
    call::Call,
    inbox::Inbox,
    mesh::Mesh,
    metrics::{Counters, GroupMetrics, GroupReport, write_reports},
    rank_frame::{Header, Kind, slot_number},
};

/// The groups that are open in this process.
static OPEN: Mutex<Vec<Weak<OwnRank>>> = Mutex::new(Vec::new());

/// This process as a rank of one group.
#[derive(Debug)]
pub(crate) struct OwnRank {
    pub(crate) group_name: String,
    pub(crate) group_id: u64,
    pub(crate) slot: usize,
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) mesh: Arc<Mesh>,
    pub(crate) metrics: Arc<GroupMetrics>,
}

impl OwnRank {
    /// Shows the group in the metrics of this process until [`Self::hide`].
    pub(crate) fn show(self: &Arc<Self>) {
        OPEN.lock().push(Arc::downgrade(self));
    }

    pub(crate) fn hide(self: &Arc<Self>) {
        OPEN.lock().retain(|other| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(self)));
    }

    pub(crate) fn check_member(&self) -> Result<()> {
        let state = self.inbox.state.lock();
        if let Some(error) = &state.closed {
            return Err(error.clone());
        }
        if !state.progress.view.is_member(self.slot) {
            return Err(not_active());
        }
        Ok(())
    }

    /// Returns the header of a frame of a message.
    pub(crate) fn message_header(&self, kind: Kind, id: u64, tag: u32, length: usize) -> Header {
        Header {
            kind,
            group: self.group_id,
            attempt: 0,
            sequence: id,
            step: tag,
            source: slot_number(self.slot),
            length: length as u64,
            call: Call::NONE,
        }
    }

    pub(crate) fn counters(&self) -> Counters {
        let bytes_buffered = self.inbox.state.lock().messages.buffered_bytes();
        Counters { bytes_buffered, ..self.metrics.snapshot() }
    }

    fn report(&self) -> GroupReport {
        let state = self.inbox.state.lock();
        let active = state.progress.view.active.iter().filter(|active| **active).count();
        let epoch = state.progress.view.epoch;
        drop(state);
        GroupReport {
            name: self.group_name.clone(),
            slot: self.slot.to_string(),
            epoch,
            active,
            counters: self.counters(),
        }
    }
}

/// Writes the metrics of all groups that are open in this process; nothing if there is none.
pub fn add_metrics(out: &mut Exposition) {
    let open: Vec<_> = OPEN.lock().iter().filter_map(Weak::upgrade).collect();
    let reports: Vec<_> = open.iter().map(|rank| rank.report()).collect();
    write_reports(out, &reports);
}

pub(crate) fn not_active() -> Error {
    Error::invalid(
        "this rank is not active in this group: the others have removed it; call join_group",
    )
}
