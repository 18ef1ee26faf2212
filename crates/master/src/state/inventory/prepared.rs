//! Memory that is prepared for the next puts: see [`pool::prepared`](crate::state::pool::prepared).

use std::time::Duration;

use crate::state::{
    ids::{BlockId, SegmentSlot},
    inventory::Inventory,
    ledger::effect::Effect,
    replica::Replica,
};

/// Blocks that a put prepares in each of its segments: one in place of its own, and one more until there
/// are enough.
const BLOCKS_PER_PUT: usize = 2;

/// Sets the log position up to which answers need not wait. `None`: waits cost little, and no memory is
/// prepared.
pub(in crate::state) fn set_answerable(inventory: &mut Inventory, position: Option<u64>) {
    inventory.pool.set_answerable(position);
    if position.is_none() {
        release_all(inventory);
    }
}

/// Prepares memory like that of these replicas, which hold an object of that length. Called only while
/// waits are long.
pub(in crate::state) fn prepare_more(inventory: &mut Inventory, replicas: &[Replica], length: u64) {
    let time = inventory.rules.late_end();
    for segment in replicas.iter().map(|replica| replica.segment) {
        for _ in 0..BLOCKS_PER_PUT {
            let block = inventory.pool.begin_preparing(segment, length).or_else(|| {
                // Another size is put here now.
                let unused = inventory.pool.take_unused(segment, Some(length))?;
                release(inventory, segment, unused);
                inventory.pool.begin_preparing(segment, length)
            });
            let Some(block) = block else { break };
            record(inventory, segment, block, time);
            let position = inventory.log.effects.position();
            inventory.pool.keep_prepared(segment, block, position);
        }
    }
}

/// Frees all prepared memory. Returns whether there was any.
pub(in crate::state) fn release_all(inventory: &mut Inventory) -> bool {
    if !inventory.pool.has_prepared() {
        return false;
    }
    let mut slots: Vec<SegmentSlot> = inventory.pool.prepared().map(|(slot, _)| slot).collect();
    slots.dedup();
    slots.into_iter().for_each(|slot| release_segment(inventory, slot));
    true
}

/// Frees the prepared memory of a segment.
pub(in crate::state) fn release_segment(inventory: &mut Inventory, slot: SegmentSlot) {
    while let Some(block) = inventory.pool.take_unused(slot, None) {
        release(inventory, slot, block);
    }
}

fn release(inventory: &mut Inventory, slot: SegmentSlot, block: BlockId) {
    record(inventory, slot, block, Duration::ZERO);
    // It was free before, and nobody has got it since.
    inventory.pool.segments.free(slot, block);
}

/// Records for how long a block rests after a restart.
fn record(inventory: &mut Inventory, slot: SegmentSlot, block: BlockId, time: Duration) {
    let segment = inventory.pool.segments.at(slot);
    let (number, offset) = (segment.number, segment.allocator.offset(block));
    let length = segment.allocator.size(block);
    inventory.log.effects.record(|| Effect::Quarantined { number, offset, length, time });
}
