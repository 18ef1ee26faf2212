//! Segments that come into the pool, change their status, and leave it.

use std::time::Duration;

use mooncake_base::{ClientId, Incarnation, Moment, SegmentId};

use crate::state::{
    ids::{SegmentSlot, TenantIndex},
    inventory::{Inventory, prepared},
    ledger::effect::Effect,
    pool::segment::{Segment, SegmentSpec, SegmentStatus},
    timer::Timer,
};

/// Segments that left the pool, and what they had.
#[derive(Debug, Default)]
pub(in crate::state) struct LeftSegments {
    /// Whether memory in them was being written.
    pub(in crate::state) was_written: bool,
    /// Those without memory in use: their slots can be freed at once.
    unused: Vec<SegmentSlot>,
}

/// Lets those segments accept objects whose quarantine is over.
pub(in crate::state) fn open_due(inventory: &mut Inventory, now: Moment) {
    inventory.pool.segments.open_due(now);
}

/// Adds a segment that was checked. It accepts no objects before the fences and writes have ended that
/// were granted in its memory.
pub(in crate::state) fn mount(
    inventory: &mut Inventory,
    now: Moment,
    client: ClientId,
    spec: SegmentSpec,
) {
    let Inventory { pool, log, timers, recovery, clients, .. } = inventory;
    let is_synced = |position| pool.unsynced.is_synced(position);
    let before = pool.segments.before(now, spec.id, spec.incarnation, is_synced);
    let unsynced_position = before.map(|gone| gone.position).filter(|&at| !is_synced(at));
    let granted_until = before.map(|gone| gone.busy_until).filter(|end| !end.has_passed(now));
    let unknown_until = recovery.unknown_grants_until;
    let busy_until = granted_until.max((!unknown_until.has_passed(now)).then_some(unknown_until));
    if let Some(busy_until) = busy_until {
        timers.push(busy_until, Timer::QuarantineEnd(spec.id, spec.incarnation));
    }
    let number = pool.segments.next_number();
    log.effects.record(|| Effect::Mounted { number, client, spec: spec.clone() });
    let mut new = Segment::new(number, client, spec, busy_until.unwrap_or(now));
    new.quarantined_until = busy_until;
    new.is_suspect = clients.is_suspect(client);
    new.awaits_sync = unsynced_position.is_some();
    let slot = pool.segments.insert(new);
    if let Some(position) = unsynced_position {
        pool.await_sync_of_mount(slot, position);
    }
}

/// Makes a segment from before the restart available again. Has no effect on another one.
pub(in crate::state) fn claim(inventory: &mut Inventory, slot: SegmentSlot) {
    let Inventory { pool, recovery, clients, .. } = inventory;
    let segment = pool.segments.at_mut(slot);
    if std::mem::take(&mut segment.is_unclaimed) {
        segment.is_suspect = clients.is_suspect(segment.client);
        recovery.segments -= 1;
        pool.segments.refresh(slot);
    }
}

/// Marks the segments of a client whose connection closed, or that is back.
pub(in crate::state) fn mark_suspect(
    inventory: &mut Inventory,
    client: ClientId,
    is_suspect: bool,
) {
    let segments = &mut inventory.pool.segments;
    for slot in segments.of_client(client) {
        segments.at_mut(slot).is_suspect = is_suspect;
        segments.refresh(slot);
    }
}

/// Lets a segment leave after a grace. It accepts no objects meanwhile.
pub(in crate::state) fn begin_grace(
    inventory: &mut Inventory,
    now: Moment,
    slot: SegmentSlot,
    grace: Duration,
) {
    let Inventory { pool, log, timers, .. } = inventory;
    let segment = pool.segments.at_mut(slot);
    segment.status = SegmentStatus::GracefullyUnmounting;
    segment.unmount_at = Some(now + grace);
    let (number, status) = (segment.number, segment.status.code());
    log.effects.record(|| Effect::SegmentStatus { number, status, grace });
    timers.push(now + grace, Timer::Unmount(segment.spec.id, segment.spec.incarnation));
    pool.segments.refresh(slot);
}

/// Sets the status of a segment, unless its owner unmounts it after a grace: it leaves.
pub(in crate::state) fn set_status(
    inventory: &mut Inventory,
    slot: SegmentSlot,
    status: SegmentStatus,
) {
    let Inventory { pool, log, .. } = inventory;
    let segment = pool.segments.at_mut(slot);
    if segment.unmount_at.is_some() {
        return;
    }
    segment.status = status;
    let (number, status, grace) = (segment.number, status.code(), Duration::ZERO);
    log.effects.record(|| Effect::SegmentStatus { number, status, grace });
    pool.segments.refresh(slot);
    prepared::release_segment(inventory, slot);
}

/// Drops segments and every replica in them. Quarantined memory and memory that waits for the log are
/// looked through once for all of them.
pub(in crate::state) fn drop_all(inventory: &mut Inventory, slots: &[SegmentSlot]) -> LeftSegments {
    slots.iter().for_each(|&slot| prepared::release_segment(inventory, slot));
    let Inventory { pool, log, recovery, sweeps, .. } = inventory;
    let (mut left, mut was_waiting) = (LeftSegments::default(), false);
    for &slot in slots {
        let segment = pool.segments.at_mut(slot);
        let number = segment.number;
        left.was_written |= segment.reserved.writing > 0;
        was_waiting |= segment.reserved.fenced + segment.reserved.withheld > 0;
        let is_used = segment.allocator.used() > 0;
        if std::mem::take(&mut segment.is_unclaimed) {
            recovery.segments -= 1;
        }
        log.effects.record(|| Effect::SegmentDropped { number });
        pool.segments.close(slot, log.effects.position());
        if is_used { sweeps.begin(slot) } else { left.unused.push(slot) }
    }
    if was_waiting {
        pool.quarantine.forget(|slot| !pool.segments.at(slot).is_mounted());
        pool.unsynced.forget(&pool.segments);
    }
    left
}

/// Ends what was written to dropped segments: promotions here, and what the caller knows of, by tenant
/// and bytes.
pub(in crate::state) fn end_lost_writes(
    inventory: &mut Inventory,
    lost: impl Iterator<Item = (TenantIndex, u64)>,
) {
    let Inventory { pool, promotions, catalog, .. } = inventory;
    let promoted = promotions.forget_segments(|slot| !pool.segments.at(slot).is_mounted());
    for (tenant, bytes) in lost.chain(promoted) {
        catalog.tenants.uncharge(tenant, bytes);
    }
}

/// Frees the slots of those dropped segments that no object names.
pub(in crate::state) fn free_unused(inventory: &mut Inventory, left: LeftSegments) {
    left.unused.into_iter().for_each(|slot| inventory.pool.segments.free_slot(slot));
}

/// Handles the timer at the end of the quarantine of a segment.
pub(in crate::state) fn end_quarantine(
    inventory: &mut Inventory,
    now: Moment,
    id: SegmentId,
    incarnation: Incarnation,
) {
    inventory.pool.end_segment_quarantine(now, id, incarnation);
}
