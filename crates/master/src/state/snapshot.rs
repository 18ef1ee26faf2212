//! Snapshots of the state as effects: a head at once, then the objects in slices.
//!
//! Take the head and start the log file under one lock of the state. Changes between the slices are
//! in that log, too, and a replay of both converges, since each effect names its version and
//! places.

use std::time::Duration;

use mooncake_base::Moment;

use crate::state::{
    State,
    calls::put::record::logged_write,
    calls::task::records::append_records,
    catalog::object::Object,
    ids::{ObjectSlot, SegmentSlot, Slot},
    inventory::{Inventory, quota::quotas},
    ledger::{effect::Effect, objects::logged_object},
    pool::segment::{Segment, SegmentStatus},
};

/// Position of a snapshot that [`State::begin_snapshot`](crate::state::State::begin_snapshot) started.
#[derive(Debug)]
pub struct SnapshotCursor {
    next: u32,
}

impl State {
    /// Appends all but the objects to `into` and returns a cursor over the objects.
    pub fn begin_snapshot(&self, now: Moment, into: &mut Vec<u8>) -> SnapshotCursor {
        debug_assert!(self.inventory.pool().is_counted(), "each block waits for one reason");
        let (version, number) =
            (self.inventory.next_version(), self.inventory.segments().next_number());
        Effect::NextIds { version, number }.encode(into);
        let max_granted = self.inventory.max_granted();
        let (fence, lease) = (max_granted.fence, max_granted.lease);
        Effect::MaxGranted { fence, lease }.encode(into);
        for (_, segment) in self.inventory.segments().mounted() {
            let (number, client) = (segment.number, segment.client);
            Effect::Mounted { number, client, spec: segment.spec.clone() }.encode(into);
            if segment.status != SegmentStatus::Ok {
                let status = segment.status.code();
                let grace = segment.unmount_at.map_or(Duration::ZERO, |end| end.left(now));
                Effect::SegmentStatus { number, status, grace }.encode(into);
            }
        }
        for (_, disk) in self.inventory.disks().kept() {
            let (number, client, spec) = (disk.number, disk.client, disk.spec.clone());
            Effect::DiskMounted { number, client, spec }.encode(into);
        }
        for quota in quotas(&self.inventory).unwrap_or_default() {
            let tenant = quota.tenant.as_str();
            Effect::Quota { tenant, bytes: Some(quota.requested) }.encode(into);
        }
        append_records(&self.tasks, &self.jobs, self.inventory.objects(), into);
        append_quarantine(self, now, into);
        for write in self.writes.iter() {
            if let Some(started) = logged_write(&self.inventory, write) {
                started.encode(into);
            }
        }
        SnapshotCursor { next: 0 }
    }

    /// Appends the next `objects` slots to `into`. Returns whether they were the last.
    pub fn snapshot_slice(
        &self,
        cursor: &mut SnapshotCursor,
        objects: u32,
        into: &mut Vec<u8>,
    ) -> bool {
        let end = cursor.next.saturating_add(objects).min(self.inventory.objects().slot_count());
        for slot in ObjectSlot::range(cursor.next, end) {
            let Some(object) = self.inventory.objects().get(slot) else { continue };
            if object.is_complete() {
                append_object(&self.inventory, slot, object, into);
            }
        }
        cursor.next = end;
        end == self.inventory.objects().slot_count()
    }
}

/// Records all memory that late reads or writes may reach, so that a master which takes over right behind
/// these records may use all other free memory at once. Returns `false`, and records nothing, while some
/// rests that is not known block by block: since a restart, or since it was mounted.
pub fn log_rest(state: &mut State, now: Moment) -> bool {
    let rests = |segment: &Segment| segment.quarantined_until.is_some() || segment.awaits_sync;
    if state.inventory.segments().mounted().any(|(_, segment)| rests(segment)) {
        return false;
    }
    let mut records = Vec::new();
    for_each_resting(state, now, |effect, _| records.push(effect));
    for effect in records {
        state.inventory.record(|| effect);
    }
    true
}

/// Appends an object.
fn append_object(inventory: &Inventory, slot: ObjectSlot, object: &Object, into: &mut Vec<u8>) {
    let logged = logged_object(inventory.catalog(), inventory.pool(), slot, object);
    let Some(logged) = logged else { return };
    logged.encode(into);
    if let Some(annotation) = inventory.catalog().annotation(slot) {
        let object = inventory.objects().logged_name(object);
        let expires = annotation.expires.map(|at| inventory.rules().unix_time(at));
        Effect::Annotated { object, expires, tags: annotation.tags.clone() }.encode(into);
    }
}

/// Appends memory that is quarantined for longer than all memory is after a restart, since late
/// reads or writes may reach it; memory of displaced puts included.
fn append_quarantine(state: &State, now: Moment, into: &mut Vec<u8>) {
    let bounds = state.inventory.max_granted();
    for_each_resting(state, now, |effect, time| {
        if !bounds.covers(time) {
            effect.encode(into);
        }
    });
}

/// Calls `visit` with the record of each block that late reads or writes may reach, and with the time for
/// which it must rest.
fn for_each_resting(state: &State, now: Moment, mut visit: impl FnMut(Effect<'static>, Duration)) {
    let inventory = &state.inventory;
    let mut visit_block = |slot: SegmentSlot, block, time: Duration| {
        let segment = inventory.segment(slot);
        if segment.is_mounted() {
            let offset = segment.allocator.offset(block);
            let length = segment.allocator.size(block);
            visit(Effect::Quarantined { number: segment.number, offset, length, time }, time);
        }
    };
    for (until, slot, block) in inventory.pool().quarantined() {
        visit_block(slot, block, until.left(now));
    }
    for (slot, block) in inventory.pool().prepared() {
        visit_block(slot, block, inventory.rules().late_end());
    }
    // The target of a task or a promotion becomes a replica only when that ends.
    for replica in state.tasks.placed().chain(inventory.promotions().placed()) {
        visit_block(replica.segment, replica.block, inventory.rules().late_end());
    }
    for write in state.writes.iter().filter(|write| write.object.is_none()) {
        let end = write.window_began + inventory.rules().late_end();
        for replica in write.replicas.iter() {
            visit_block(replica.segment, replica.block, end.left(now));
        }
    }
}
